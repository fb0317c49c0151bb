"""Recordings of admissions that refer to kept texts: they replay, and other settings see when prompts were computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.replay import replay
from shared.messages.cell_events import CellConfig
from tests.replay.test_prompts_by_reference import record
from tests.small_blocks import small_blocks
from tests.stateful.cell_model import CellModel
from thermocline.replay.recorded_run import read_run


@pytest.mark.parametrize("takes_compact", [False, True])
def test_every_part_replays_and_tells_first_tokens(tmp_path: Path, *, takes_compact: bool) -> None:
    """From the start, and from a snapshot before any input: what it holds is what admissions refer to."""
    path = tmp_path / "a.tcrec"
    with small_blocks(16):
        cell = CellModel(CellConfig())
        cell.kept_tokens, cell.takes_compact = 100, takes_compact
        cell.add_worker("worker-0", pages=64)
        for number in range(5):
            cell.serve([*range(1, 41), *range(50 + number * 10, 58 + number * 10)], max_tokens=4, ignore_eos=True)
        assert [order.base is not None for order in cell.admitted] == [False, True, True, True, True]
        assert any(order.compact for order in cell.admitted) == takes_compact

        for first in range(1, len(cell.log) - 3):
            record(cell, path, first)
            assert replay(path).difference is None
            run = read_run(path)
            assert all(request.first_token_ns for request in run.played)
