"""The README's examples do what it says, run as written against the bundled model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def cell() -> Iterator[RunningCell]:
    """What ``./task up`` starts, on a free port."""
    with running(SupervisorConfig(port=0, threads=1)) as running_cell:
        yield running_cell


def curl_commands() -> list[str]:
    """The commands between the README's markers."""
    block = README.split("<!-- begin: curl -->")[1].split("<!-- end: curl -->")[0]
    return [part.strip() for part in re.sub(r"```\w*", "", block).split("\n\n") if part.strip()]


def test_the_readme_has_curl_examples() -> None:
    """The markers are there and hold the five commands that are run below."""
    assert len(curl_commands()) == 5
    assert all(command.startswith("curl -s") and ADDRESS in command for command in curl_commands())


@pytest.mark.parametrize("number", range(5))
def test_curl_examples_work(cell: RunningCell, number: int) -> None:
    """Each command succeeds and its answer is no error."""
    command = curl_commands()[number].replace(ADDRESS, cell.base_url).replace("curl -s", "curl -f -s", 1)

    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert '"error"' not in done.stdout
    if "chat/completions" in command:
        answer = json.loads(done.stdout)
        assert answer["choices"][0]["message"]["content"].strip() == "4821"
    if '"stream": true' in command:
        assert done.stdout.rstrip().endswith("data: [DONE]")


def test_the_python_example_works(cell: RunningCell) -> None:
    """The official client's example prints an answer and its cached tokens."""
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None

    done = subprocess.run(
        [sys.executable, "-c", code[1].replace(ADDRESS, cell.base_url)], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+$", done.stdout.strip())
