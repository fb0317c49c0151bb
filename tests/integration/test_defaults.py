"""A cell as a stranger starts it: nothing is set but where it keeps what it has, and it measures at its start.

Other tests turn the measuring off (``tests/conftest.py``), so that plans do not depend on the machine. What is asserted
here holds whatever is measured.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import httpx
import pytest

from tests.idle import hears_of_chunks, settled, status_at
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = pytest.mark.integration

DOCUMENT = "The office of the harbour opens at nine, and its crane lifts 17 tonnes. " * 60
QUESTIONS = ("When does the office open?", "What does the crane lift?")


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing was measured yet, apart from the native code, which takes long to compile."""
    before = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "thermocline"
    mine = tmp_path / "cache" / "thermocline"
    mine.mkdir(parents=True)
    for library in before.glob("*.so"):
        shutil.copy2(library, mine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(mine.parent))
    monkeypatch.delenv("THERMOCLINE_MEASURE_AT_START")


@pytest.mark.usefixtures("nothing_measured")
def test_a_restarted_cell_says_the_same_and_can_use_what_it_kept(tmp_path: Path) -> None:
    """Every process and the broker are new: whichever form of KV was measured to be cheaper is on the disk, in a form
    that the second cell reads too, and nothing is degraded.
    """
    config = SupervisorConfig(port=0, data_dir=str(tmp_path / "data"), disk_dir=(str(tmp_path / "disk"),))

    with running(config) as cell:
        answers = [_asked(cell, question) for question in QUESTIONS]
        kept = asyncio.run(settled(lambda: status_at(cell.nats_url)))
        assert "measuring what restoring costs" in cell.logs("worker-0")
        assert "measuring the disk" in cell.logs("storage")
    with running(config) as cell:
        asyncio.run(hears_of_chunks(lambda: status_at(cell.nats_url), kept.chunks_in_all))
        again = [_asked(cell, question) for question in QUESTIONS]
        found = asyncio.run(settled(lambda: status_at(cell.nats_url)))
        logs = "".join(cell.logs(name, 10_000) for name in ("worker-0", "storage"))

    assert kept.chunks_in_all > 0
    assert again == answers
    assert (kept.degraded, found.degraded) == ((), ())
    assert logs.count("measuring what restoring costs") == 1
    assert logs.count("measuring the disk") == 1


def _asked(cell: RunningCell, question: str) -> str:
    """What the cell says, greedily."""
    body = {
        "messages": [{"role": "user", "content": f"{DOCUMENT}\n{question}"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    with httpx.Client(base_url=cell.base_url, timeout=120, trust_env=False) as client:
        answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text
