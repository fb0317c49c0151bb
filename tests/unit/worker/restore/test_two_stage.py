"""What steps compute reaches the shelf whole or not at all, and the step never waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.hidden_pieces import HiddenPieces
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore import two_stage
from services.worker.restore.attention_inputs import AttentionInputs
from services.worker.restore.saving_step import SavedRows
from services.worker.restore.snapshot_ring import SnapshotRing
from services.worker.restore.two_stage import TwoStageSaver
from shared.memory.segment import SHM_DIRECTORY
from tests.engine_driver import Request, random_prompt
from tests.run_name import shm_prefix
from tests.unit.worker.restore.saved import CPU, Later, Saving, Shelf, saving, shape_of

LoadRunner = Callable[..., ModelRunner]


def request(runner: ModelRunner, length: int, *, seed: int, page: int = 0) -> Request:
    size = runner.geometry.page_size
    return Request(random_prompt(length, seed=seed), np.arange(page, page + 300 // size, dtype=np.int32))


@pytest.mark.parametrize("position", [0, 40, 64])
def test_an_end_flushes_the_tail(position: int, load_runner: LoadRunner) -> None:
    """Finished or preempted, behind a cached prefix or not: what was computed is saved, up to the last token."""
    runner = load_runner("llama")
    with saving(runner) as at:
        resumed = request(runner, 100, seed=2)
        resumed.computed = position
        at.saver.begin("r", position)
        at.step([("r", resumed, 100 - position)])
        before = [(piece.first, piece.end) for piece in at.shelf.pieces]
        at.saver.end("r")
        at.saver.end("r")

    expected = [(position, 64), (64, 100)] if position < 64 else [(64, 100)]
    assert [(piece.first, piece.end) for piece in at.shelf.pieces] == expected
    assert before == expected[:-1]
    assert at.saver.is_idle


def test_a_preempted_sequence_begins_again(load_runner: LoadRunner) -> None:
    """At the position where it resumes; the pieces overlap and each is right."""
    runner = load_runner("llama")
    with saving(runner) as at:
        again = request(runner, 100, seed=3)
        at.saver.begin("r", 0)
        at.step([("r", again, 50)])
        at.saver.end("r")
        again.computed = 16
        at.saver.begin("r", 16)
        at.step([("r", again, 84)])
        at.saver.end("r")

    assert [(piece.first, piece.end) for piece in at.shelf.pieces] == [(0, 50), (16, 64), (64, 100)]
    first, second, _ = at.shelf.pieces
    np.testing.assert_array_equal(first.layer_rows(0)[16:], second.layer_rows(0)[:34])


def _ring_bytes(runner: ModelRunner, rows: int) -> int:
    return rows * runner.geometry.layers * shape_of(runner).row_bytes


def test_a_full_ring_stops_a_sequence_and_no_step(load_runner: LoadRunner) -> None:
    """The step runs; who had room is saved on; the one that stopped keeps what there was room for, and is counted."""
    runner, later = load_runner("llama"), Later()
    with saving(runner, ring_bytes=_ring_bytes(runner, 50), later=later) as at:
        small, large = request(runner, 60, seed=4), request(runner, 90, seed=5, page=20)
        for name in ("small", "large"):
            at.saver.begin(name, 0)
        at.step([("small", small, 10), ("large", large, 30)])
        at.step([("small", small, 5), ("large", large, 40)])
        later.do_all()
        at.step([("small", small, 40), ("large", large, 20)])
        at.saver.end("small")
        later.do_all()

    assert [(piece.first, piece.end) for piece in at.shelf.of("large")] == [(0, 35)]
    assert [(piece.first, piece.end) for piece in at.shelf.of("small")] == [(0, 55)]
    assert at.saver.counts.stopped_no_room == 1


def test_snapshots_that_wait_are_bounded(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are."""
    monkeypatch.setattr(two_stage, "MAX_SNAPSHOTS", 2)
    runner, later = load_runner("llama"), Later()
    with saving(runner, later=later) as at:
        one = request(runner, 60, seed=6)
        at.saver.begin("r", 0)
        for _ in range(3):
            at.step([("r", one, 1)])
        later.do_all()

    assert at.saver.counts.stopped_no_room == 1
    assert [(piece.first, piece.end) for piece in at.shelf.pieces] == [(0, 2)]


def test_sequences_are_bounded(load_runner: LoadRunner) -> None:
    """A sequence counts until its tail has been handed on."""
    runner, later = load_runner("llama"), Later()
    with saving(runner, later=later, max_sequences=1) as at:
        assert at.saver.begin("a", 0)
        at.saver.end("a")
        assert not at.saver.begin("b", 0)
        later.do_all()
        assert at.saver.begin("b", 0)
        assert not at.saver.begin("b", 0)
        later.do_all()

    assert at.saver.counts.refused == 2


def test_rows_that_do_not_follow_stop_the_sequence(load_runner: LoadRunner) -> None:
    """A gap would put rows at wrong positions."""
    runner = load_runner("llama")
    with saving(runner) as at:
        one = request(runner, 60, seed=7)
        at.saver.begin("r", 0)
        at.step([("r", one, 20)])
        one.computed += 1
        at.step([("r", one, 20)])

    assert [(piece.first, piece.end) for piece in at.shelf.pieces] == [(0, 20)]
    assert at.saver.counts.stopped_gap == 1


def test_a_store_without_room_stops_the_sequence(load_runner: LoadRunner) -> None:
    """Later pieces are not offered: they would be of no use without the one that is missing."""
    runner = load_runner("llama")
    with saving(runner, shelf=Shelf(capacity=1)) as at:
        one = request(runner, 250, seed=8)
        at.saver.begin("r", 0)
        at.step([("r", one, 200)])
        at.shelf.capacity = 10
        at.step([("r", one, 50)])
        at.saver.end("r")

    assert [(piece.first, piece.end) for piece in at.shelf.pieces] == [(0, 64)]
    assert (at.saver.counts.stopped_not_taken, at.saver.counts.pieces) == (1, 1)


def test_a_failed_step_saves_nothing(load_runner: LoadRunner) -> None:
    """Its rows may come again, and then count."""
    runner = load_runner("llama")

    class Broken:
        def wait(self, layer: int) -> None:
            if layer == 1:
                raise TimeoutError("load is late")

    with saving(runner) as at:
        one = request(runner, 60, seed=9)
        at.saver.begin("r", 0)
        at.step([("r", one, 20)])
        with pytest.raises(TimeoutError):
            _broken_step(at, one, Broken())
        at.step([("r", one, 30)])
        at.saver.end("r")
        assert at.saver._ring.room_rows == (4 << 20) // _ring_bytes(runner, 1)

    assert [(piece.first, piece.end) for piece in at.shelf.pieces] == [(0, 50)]
    assert (at.saver.counts.failed_steps, at.saver.counts.rows) == (1, 50)


def _broken_step(at: Saving, one: Request, gate: Any) -> None:
    from tests.engine_driver import run_step

    with at.saver.step() as step, step.around([SavedRows("r", 0, 20, one.computed)], at.inputs):
        run_step(at.runner, [(one, 20)], gate=gate)


def test_a_thread_of_its_own(load_runner: LoadRunner) -> None:
    """By default stage two runs beside the steps; closing hands on everything, tails too, and frees the ring."""
    runner, shelf = load_runner("opt"), Shelf()
    shape = shape_of(runner)
    ring = SnapshotRing(shape, 1 << 20, device=CPU, shm_prefix=shm_prefix("restore"), layers=range(shape.layers))
    assert (SHM_DIRECTORY / ring.name).exists()
    saver = TwoStageSaver(ring, HiddenPieces(shelf, range(shape.layers)), max_sequences=2)
    at = Saving.__new__(Saving)
    at.runner, at.shelf, at.saver = runner, shelf, saver
    at.inputs = AttentionInputs(runner.model, shape.layers)
    one = request(runner, 100, seed=10)
    saver.begin("r", 0)

    for _ in range(100):
        at.step([("r", one, 1)])
    saver.close()
    ring.close()

    assert [(piece.first, piece.end) for piece in shelf.pieces] == [(0, 64), (64, 100)]
    assert not (SHM_DIRECTORY / ring.name).exists()
