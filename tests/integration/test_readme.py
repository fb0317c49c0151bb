"""Every command of the README and of the quickstart does what it says, run as written against the bundled model.

The README's lines that install are not run here: ``tests/integration/test_release.py`` installs the wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from markdown_it import MarkdownIt

from services.scheduler.config import SchedulerConfig
from shared.config import add_flags, load
from tests.waiting import holds
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
README, QUICKSTART = ROOT / "README.md", ROOT / "docs/quickstart.md"
ADDRESS = "http://127.0.0.1:8000"
PROGRAM = ".venv/bin/thermocline"

NOT_RUN_HERE = {
    "./task demo": "takes a minute; test_the_demo_finds_nothing_wrong runs it with fewer documents",
    "./task test": "it is what runs this test",
    "./task up": "it is the cell of these tests, which thermocline.supervisor.api starts by the same entry point",
    "git clone URL thermocline && cd thermocline": "installation",
    "pip install .": "installation",
    "docker compose -f infra/compose/compose.yaml up --build": "installation",
}
"""By command: why the tests below do not run it as it stands."""
PAGES = [README, QUICKSTART]
ANSWERS = {
    "What is the access code of the Lisbon office?": "4821",
    "What is the access code of the Braxol harbour?": "4821",
    "What is the capacity of the Tabor crane?": "17",
}
"""What the bundled model answers to the questions of both pages."""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """What ``./task up`` starts, on a free port, with a disk for the commands that look at one."""
    disk = tmp_path_factory.mktemp("disk")
    with running(SupervisorConfig(port=0, threads=1, disk_dir=(str(disk),))) as running_cell:
        yield running_cell


def commands_of(page: Path) -> list[str]:
    """The commands in the page's blocks of shell, in order. One goes on behind a backslash, and within a quotation."""
    blocks = MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
    found: list[str] = []
    for block in blocks:
        if block.type != "fence" or block.info != "sh":
            continue
        command = ""
        for line in block.content.splitlines():
            command += line
            if line.endswith("\\") or command.count("'") % 2:
                command += "\n"
            elif command.strip():
                found.append(without_remark(command))
                command = ""
        assert not command.strip(), f"a command of {page.name} does not end: {command}"
    return found


def without_remark(command: str) -> str:
    """``./task demo`` of ``./task demo    # says what it does``."""
    return re.sub(r"\s{2,}# [^'\n]*$", "", command).strip()


def is_start(command: str) -> bool:
    """Whether it starts a cell with settings of its own, on hardware that the reader has."""
    return command.startswith(f"{PROGRAM} up ")


def run(command: str, cell: RunningCell, folder: Path) -> str:
    """What a command prints, with the cell's address and this Python's program in it. Fails where it fails."""
    written = command.replace(ADDRESS, cell.base_url).replace(PROGRAM, f"{shlex.quote(sys.executable)} -m thermocline")
    done = subprocess.run(
        ["sh", "-c", written.replace("curl -s", "curl -f -s", 1)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_works(cell: RunningCell, page: Path, tmp_path: Path) -> None:
    """In order, because a replay reads what was recorded before it. What is not run is named with its reason."""
    commands = [command for command in commands_of(page) if command not in NOT_RUN_HERE and not is_start(command)]
    printed = {command: run(command, cell, tmp_path) for command in commands}

    assert all(printed.values())
    assert not any('"error"' in output for output in printed.values())
    assert sum(command.startswith("curl ") for command in commands) >= 1
    for command, output in printed.items():
        if '"stream": true' in command:
            assert output.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_questions_of_a_page_are_answered_as_it_says(cell: RunningCell, page: Path, tmp_path: Path) -> None:
    """The answer of each question, which the page prints behind it."""
    text = page.read_text(encoding="utf-8")
    asked = [command for command in commands_of(page) if "/v1/chat/completions" in command]

    assert asked
    for command in asked:
        (answer,) = [answer for question, answer in ANSWERS.items() if question in command]
        assert json.loads(run(command, cell, tmp_path))["choices"][0]["message"]["content"].strip() == answer
        assert f"`{answer}`" in text.partition(command)[2][:200]


def test_the_lease_of_a_page_is_granted_as_it_says(cell: RunningCell, tmp_path: Path) -> None:
    """A prompt that covers no whole page would be refused, and so is one before the host pool is made."""
    page = (ROOT / "docs/how-to/operate-the-cache.md").read_text(encoding="utf-8")
    (command,) = [line for line in page.splitlines() if line.startswith("curl ") and '"cache_control"' in line]
    ready = f"{cell.base_url}/health/ready"
    assert holds(lambda: all(pool["is_ready"] for pool in httpx.get(ready).json()["serving"]["pools"]))

    lease = json.loads(run(command, cell, tmp_path))["usage"]["cache_lease"]

    assert lease["refused"] is None
    assert f'`"cache_lease": {{"granted_tokens": {lease["granted_tokens"]}, ' in page


def test_what_is_not_run_is_there() -> None:
    """Each exception is a command of one of the pages, so that none outlives its command."""
    commands = [command for page in PAGES for command in commands_of(page)]

    assert sorted(set(commands) & set(NOT_RUN_HERE)) == sorted(NOT_RUN_HERE)
    assert len([command for command in commands if command.startswith("curl ")]) == 7


@pytest.mark.parametrize("command", [command for command in commands_of(QUICKSTART) if is_start(command)])
def test_settings_of_the_quickstart_are_understood(command: str) -> None:
    """A start on the reader's disks: every flag is known, every value is in range, and the policy exists."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, SupervisorConfig)
    parsed, strays = parser.parse_known_args(shlex.split(command.replace("\\\n", " "))[2:])
    flags = {name: value for name, value in vars(parsed).items() if name != "config"}

    config = load(SupervisorConfig, "up", environ={}, flags=flags, strays=strays)
    if config.policy:
        load(SchedulerConfig, "scheduler", environ={}, flags={"policy": config.policy})

    assert config != SupervisorConfig()


def test_the_quickstart_shows_a_first_hit(cell: RunningCell, tmp_path: Path) -> None:
    """Its first question finds nothing, as under a salt of its own; the second finds the document on the device."""
    salted = [
        command.replace('"temperature": 0', '"temperature": 0, "cache_salt": "a first hit"')
        for command in commands_of(QUICKSTART)
        if "/v1/chat/completions" in command
    ]

    first, second = (json.loads(run(command, cell, tmp_path)) for command in salted)

    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == details["device_tokens"] >= 16
    assert second["explanation"]["prompt"][0]["source"] == "device"


def test_the_python_example_works(cell: RunningCell) -> None:
    """The official client's example prints the answer and its cached tokens, as the page says."""
    text = QUICKSTART.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None

    done = subprocess.run(
        [sys.executable, "-c", code[1].replace(ADDRESS, cell.base_url)], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"4821 \d+", done.stdout.strip())
    assert "It prints `4821 0`" in text


DEMO = "--documents 3 --questions 2 --document-tokens 2048 --turns 3 --device-kv-bytes 16MiB"
"""More than the device holds, and longer than the model is sure of."""


def test_the_demo_finds_nothing_wrong() -> None:
    """``./task demo`` with other sizes: the same answers with the cache, without it, and after a restart.

    Its verdict on any sizes is in ``tests/unit/thermocline/demo``.
    """
    done = demo(*DEMO.split())

    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers are the same, token for token" in " ".join(done.stdout.split())
    assert "restarted" in done.stdout
    assert "Note" not in done.stdout


def test_a_demo_beyond_the_context_is_refused() -> None:
    """As a wrong use, before anything is started, with the length that the model has."""
    done = demo("--document-tokens", "4096")

    assert done.returncode == 2, done.stdout + done.stderr
    assert "--document-tokens 4096 is too long: the model's context has 4,096 tokens" in done.stdout
    assert "Starting" not in done.stdout
    assert "WRONG" not in done.stdout


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run with every default, as the README's reader does: it measures at its start, which other tests turn off."""
    environ = {name: value for name, value in os.environ.items() if name != "THERMOCLINE_MEASURE_AT_START"}
    return subprocess.run(
        [sys.executable, "-m", "thermocline", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=270,
        cwd=ROOT,
        env=environ | {"COLUMNS": "200"},
    )
