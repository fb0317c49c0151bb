"""The programs in ``examples/`` run as written against one cell, and show what they say that they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LONGEST_LINES = 120
ADMIN_KEY = "an-admin-key-of-some-length"
CACHED = re.compile(r"(\d+) of (\d+) prompt tokens cached")


@pytest.fixture(scope="module")
def cell() -> Iterator[RunningCell]:
    """A cell whose device holds some 1,300 tokens, so that requests push one another out."""
    config = SupervisorConfig(port=0, threads=1, device_kv_bytes=8 * 2**20, host_kv_bytes=64 * 2**20)
    with running(config, environ={"THERMOCLINE_ADMIN_KEY": ADMIN_KEY}) as running_cell:
        yield running_cell


def output_of(cell: RunningCell, name: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--url", cell.base_url, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "THERMOCLINE_ADMIN_KEY": ADMIN_KEY},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def cached(line: str) -> tuple[int, int]:
    """Cached tokens and all tokens of the prompt that a line speaks of."""
    found = CACHED.search(line)
    assert found is not None, line
    return int(found[1]), int(found[2])


def test_each_example_is_short_and_explained() -> None:
    """None is longer than it may be, and each has a page's section and a command there."""
    page = (ROOT / "docs/how-to/examples.md").read_text(encoding="utf-8")
    files = sorted(EXAMPLES.glob("*.py"))

    assert len(files) == 5
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST_LINES, file.name
        assert text.startswith('"""'), file.name
        assert f".venv/bin/python examples/{file.name} --url http://127.0.0.1:8000" in page
        assert f"`{file.name}`" in page


def test_the_openai_client_finds_its_system_prompt_again(cell: RunningCell) -> None:
    """The second question and the stream are hits on the device; the answers are right."""
    first, second, streamed = output_of(cell, "openai_client.py")

    assert "'4821'" in first
    assert "'1907'" in second
    assert "'4821'" in streamed
    assert cached(first)[0] == 0
    for line in (second, streamed):
        hit, prompt = cached(line)
        assert hit > prompt / 2
        assert f"{{'device_tokens': {hit}}}" in line


def test_documents_in_one_order_are_found_more_often(cell: RunningCell) -> None:
    """Both orders ask the same questions; in the stable one all but the first find the documents."""
    lines = output_of(cell, "rag_shared_documents.py")

    by_name = [cached(line) for line in lines if line.startswith("by name")]
    by_rank = [cached(line) for line in lines if line.startswith("by rank")]
    assert [hit > 0 for hit, _ in by_name] == [False, True, True, True]
    assert all(hit > prompt * 0.8 for hit, prompt in by_name[1:])
    assert [prompt for _, prompt in by_name] == [prompt for _, prompt in by_rank]
    assert sum(hit for hit, _ in by_name) > sum(hit for hit, _ in by_rank)
    assert sum("ms to the first token in the median" in line for line in lines) == 2


def test_a_turn_of_the_agent_computes_what_is_new(cell: RunningCell) -> None:
    """From the second turn on the prompt of the turn before is found, but for its last page or two."""
    lines = output_of(cell, "agent_many_turns.py", "--turns", "5")

    turns = [re.search(r"(\d+) prompt tokens, (\d+) cached, (\d+) computed", line) for line in lines[:-1]]
    figures = [tuple(map(int, turn.groups())) for turn in turns if turn is not None]
    assert len(figures) == 5
    for (before, _, _), (prompt, hit, computed) in pairwise(figures):
        assert before - 32 < hit < prompt
        assert hit + computed == prompt
    assert lines[-1].startswith("5 turns: ")


def test_a_pin_outlives_a_flush_and_prewarming_makes_the_first_question_a_hit(cell: RunningCell) -> None:
    """Unprepared nothing is found; prewarmed most is; after a flush what is pinned is, and the other prompt is not."""
    lines = {line.partition(":")[0]: line for line in output_of(cell, "prewarm_and_pin.py")}

    assert cached(lines["nothing prepared"])[0] == 0
    hit, prompt = cached(lines["prewarmed"])
    assert hit > prompt * 0.8
    assert cached(lines["pinned, after the flush"]) == (hit, prompt)
    assert cached(lines["not pinned, after the flush"])[0] == 0


def test_a_replay_is_the_same_and_another_policy_is_compared(cell: RunningCell) -> None:
    """The recording replays without a difference, and both policies have figures for what was asked."""
    recorded, replayed, heading, *rows = output_of(cell, "what_if_replay.py", "--requests", "30")

    assert recorded.startswith("recorded: ")
    assert replayed.endswith("outputs, all as recorded")
    requests = re.match(r"(\d+) requests", heading)
    assert requests is not None
    assert int(requests[1]) >= 30
    assert heading.split()[-1] == "fifo"
    # The recording says nothing of evictions; all else has three columns.
    assert [len(re.findall(r" [\d,]+", row)) for row in rows] == [3, 3, 2, 3]
    evicted = [row for row in rows if row.startswith("evicted pages, device")]
    assert all(int(number.replace(",", "")) > 0 for number in re.findall(r" ([\d,]+)", evicted[0]))


def test_without_the_admin_key_pinning_says_so(cell: RunningCell) -> None:
    """It ends with the code of a wrong use, and names the variable."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "prewarm_and_pin.py"), "--url", cell.base_url],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "THERMOCLINE_ADMIN_KEY"},
    )

    assert done.returncode == 2
    assert "THERMOCLINE_ADMIN_KEY" in done.stderr
