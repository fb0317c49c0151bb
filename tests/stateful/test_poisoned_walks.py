"""Poisoned inputs arrive under load at an active scheduler and its standby: both go on, and everything ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler import core
from services.scheduler.cell_metrics import DIVERGED
from services.scheduler.quarantine import FAILURES
from services.scheduler.record import record
from services.scheduler.replay import replay
from shared.codec import Input
from shared.messages.requests import SubmitRequest
from shared.messages.worker_events import BatchDone, RequestFinished
from tests.stateful.poisoned_cell import Poison, PoisonedCell
from tests.virtual_loop import run_virtually

REQUESTS = 40


@pytest.mark.parametrize("seed", range(6))
def test_active_and_standby_go_on_behind_poison(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each poison costs two deaths, its request an error, its worker a new life; the fold is one, and it replays."""
    near = seed % 9
    wanted: list[tuple[type[Input], int]] = [
        (SubmitRequest, 12 + near),
        (SubmitRequest, 13 + 2 * near),
        (BatchDone, 30 + near),
        (RequestFinished, 60),
    ]
    poison = Poison(wanted, monkeypatch)
    differences = DIVERGED._value.get()

    async def walk() -> PoisonedCell:
        cell = PoisonedCell(seed)
        await cell.start()
        await cell.load(REQUESTS)
        await cell.rest(REQUESTS)
        await record(cell.bus, tmp_path / "walk.tcrec")
        await cell.stop()
        return cell

    cell = run_virtually(walk())

    assert [type(found) for found in poison.found.values()].count(SubmitRequest) == 2
    assert len(poison.found) == len(wanted)
    states = [scheduler.state for scheduler in cell.schedulers]
    assert states[0] is not None
    assert states[1] is not None
    assert core.encode_state(states[0]) == core.encode_state(states[1])
    assert sorted(states[0].quarantined) == sorted(poison.found)
    assert sum(scheduler.deaths for scheduler in cell.schedulers) == (FAILURES - 1) * len(wanted)
    refused = {name for name, outcome in cell.outcomes.items() if outcome == "internal_error"}
    assert refused == {found.request_id for found in poison.found.values() if isinstance(found, SubmitRequest)}
    assert set(cell.outcomes.values()) <= {"finished", "cancelled", "internal_error"}
    assert cell.lives > 1
    assert DIVERGED._value.get() == differences
    report = replay(tmp_path / "walk.tcrec")
    assert (report.difference, report.unrecorded, report.skipped) == (None, 0, len(wanted))
