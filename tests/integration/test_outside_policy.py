"""A stranger's policy, made from the template, in simulations, replays and a live cell, with no edit of this checkout.

The page on it is run from its first command to its last, in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from markdown_it import MarkdownIt

from services.scheduler.recording import Header, read_frames
from tests.outside_package import run_python
from tests.waiting import until
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = pytest.mark.integration
pytest.importorskip("cookiecutter", reason="the template is filled in by cookiecutter, which is not installed")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/your-own-policy.md"
ADDRESS = "http://127.0.0.1:8000"
UP = "thermocline up --policy most-shared"


class Environment:
    """Python with everything that this one has, and with what a page installs into it."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
        self.python = folder / "bin/python"
        self.site = Path(
            subprocess.check_output(
                [str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
            ).strip()
        )
        seen = [str(ROOT), sysconfig.get_path("purelib"), *filter(None, sys.path)]
        (self.site / "seen.pth").write_text("\n".join(dict.fromkeys(seen)), encoding="utf-8")
        for name in ("pip", "thermocline", "pytest", "cookiecutter"):
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(str(self.python))} -P -m {name} "$@"\n', encoding="utf-8")
            program.chmod(0o755)
        self.environ = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",  # What a page installs from an index is here already.
            "PIP_NO_BUILD_ISOLATION": "false",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, script: str, folder: Path) -> str:
        """What a shell prints that runs a script in a folder. Fails where it fails."""
        done = subprocess.run(
            ["sh", "-e", "-c", script], capture_output=True, text=True, timeout=300, cwd=folder, env=self.environ
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment in which nobody has installed a policy yet."""
    return Environment(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    """The page's blocks of shell, in order."""
    tokens = MarkdownIt("commonmark").parse(PAGE.read_text(encoding="utf-8"))
    return [token.content for token in tokens if token.type == "fence" and token.info == "sh"]


@pytest.fixture(scope="module")
def project(environment: Environment, blocks: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project that the page's first block makes and installs, beside a clone that has the template."""
    clone = tmp_path_factory.mktemp("beside") / "thermocline"
    clone.mkdir()
    (clone / "examples").symlink_to(ROOT / "examples")
    environment.run(blocks[0], clone)
    return clone.parent / "most-shared"


def test_the_projects_own_tests_pass(environment: Environment, blocks: list[str], project: Path) -> None:
    """The kit's eleven, and the one of what the policy is for."""
    assert "12 passed" in environment.run(blocks[1], project)


def test_it_has_a_hit_ratio_on_a_trace(environment: Environment, blocks: list[str], project: Path) -> None:
    """The page's trace, under LRU and under the policy: the shares of tokens found that the page says."""
    printed = environment.run(blocks[2], project)

    shares = re.findall(r"hit ratio\W+(0\.\d+)", printed)
    page = PAGE.read_text(encoding="utf-8")
    assert len(shares) == 2
    assert all(share in page for share in shares), printed


@pytest.fixture(scope="module")
def cell(
    environment: Environment, blocks: list[str], project: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCell]:
    """The page's cell, on a free port, with a device that holds a few prompts, and snapshots every few inputs."""
    assert blocks[3].strip() == UP
    settings = tmp_path_factory.mktemp("settings") / "cell.toml"
    settings.write_text("[scheduler]\nsnapshot_every_inputs = 8\n", encoding="utf-8")
    path = os.pathsep.join(map(str, (ROOT, project, environment.site)))
    config = SupervisorConfig(port=0, threads=1, device_kv_bytes=4 * 2**20, policy="most-shared")
    with running(config, config_file=settings, environ={"PYTHONPATH": path}) as running_cell:
        yield running_cell


def ask(cell: RunningCell, subject: int) -> str:
    """Ask about one of several documents, each about a third of what the device holds."""
    facts = " ".join(f"The access code of the office {subject * 100 + place} is {place + 1000}." for place in range(6))
    answer = httpx.post(
        f"{cell.base_url}/v1/completions",
        json={"model": "thermocline-mha", "prompt": facts, "max_tokens": 2, "temperature": 0},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def events(cell: RunningCell, name: str) -> list[dict[str, Any]]:
    """What the scheduler's log has of one kind."""
    lines = [json.loads(line) for line in cell.logs("scheduler", 4000).splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


def test_a_live_cell_runs_it(environment: Environment, blocks: list[str], project: Path, cell: RunningCell) -> None:
    """The page's question is answered; its recording says whose policy it was, and replays to the byte."""
    for subject in range(12):
        ask(cell, subject % 7)
    printed = environment.run(blocks[4].replace(ADDRESS, cell.base_url), project)

    header = next(iter(read_frames(project / "run.tcrec")))
    assert isinstance(header, Header)
    assert header.policies == ("policy most-shared",)
    assert "4821" in printed
    assert "no difference" in printed
    assert [each["used"] for each in events(cell, "outside_policies")] == [["policy most-shared"]]


def test_a_live_cell_goes_on_from_a_snapshot_with_it(
    environment: Environment, project: Path, cell: RunningCell
) -> None:
    """Its scheduler is killed; the next one restores the policy's bytes, and all that was decided replays."""
    for subject in range(9):
        ask(cell, subject % 4)
    asyncio.run(until(lambda: any(each["seq"] > 20 for each in events(cell, "snapshot"))))
    cell.wait_restarted("scheduler", cell.kill("scheduler"))
    for subject in range(9):
        ask(cell, subject % 5)
    printed = environment.run("thermocline record --out again.tcrec && thermocline replay again.tcrec", project)

    assert "no difference" in printed
    restored = events(cell, "restored")[-1]
    assert restored["snapshot_seq"] > 20
    assert not restored["state_lost"]
    assert events(cell, "snapshot_unusable") == events(cell, "policy_begins_anew") == []


def test_without_the_package_the_recording_is_one_line(project: Path, cell: RunningCell) -> None:
    """As the page says."""
    done = run_python("-m", "thermocline", "replay", str(project / "run.tcrec"))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr in PAGE.read_text(encoding="utf-8")


def test_what_if_names_the_class(environment: Environment, project: Path) -> None:
    """By its module, of a recording that was made with another policy."""
    recording = ROOT / "tests/replay/recordings/shared-documents.tcrec"
    printed = environment.run(f"thermocline replay {recording} --policy most_shared:MostShared", project)

    assert "policy=most-shared" in printed
