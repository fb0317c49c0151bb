"""What a step has taken counts as a whole, in part or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.attention_inputs import AttentionInputs
from services.worker.restore.pieces import PieceRows
from services.worker.restore.saving_step import SavedRows, SavingStep
from services.worker.restore.snapshot_ring import SnapshotRing
from services.worker.restore.two_stage import TwoStageSaver
from tests.engine_driver import page_tables, random_prompt
from tests.run_name import shm_prefix
from tests.unit.worker.restore.saved import CPU, kv_of, shape_of

LoadRunner = Callable[..., ModelRunner]


class Copies:
    """Keeps a copy of every piece, and who has ended."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[PieceRows]] = {}
        self.ended: list[str] = []

    def take(self, piece: PieceRows) -> bool:
        kept = PieceRows(piece.sequence_id, piece.first, piece.rows.copy())
        self.pieces.setdefault(piece.sequence_id, []).append(kept)
        return True

    def end(self, sequence_id: str) -> None:
        self.ended.append(sequence_id)

    def spans(self, name: str) -> list[tuple[int, int]]:
        return [(piece.first, piece.first + piece.tokens) for piece in self.pieces.get(name, [])]


class Stepped:
    """A saver of K and V of all layers but the first, and of hidden states of the second."""

    def __init__(self, runner: ModelRunner, names: Sequence[str]) -> None:
        self.runner, self.copies = runner, Copies()
        self.inputs = AttentionInputs(runner.model, runner.geometry.layers)
        self.ring = SnapshotRing(
            shape_of(runner), 4 << 20, device=CPU, shm_prefix=shm_prefix("restore"), layers=[1], kv_layers=[1, 2]
        )
        self.saver = TwoStageSaver(self.ring, self.copies, max_sequences=8, submit=lambda work: work())
        self.tables = dict(zip(names, page_tables(runner, [200] * len(names), seed=1), strict=True))
        self.tokens = {name: random_prompt(200, seed=number) for number, name in enumerate(names)}
        self.hidden: list[torch.Tensor] = []

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        self.hidden.append(hidden.clone())

    def forward(self, step: SavingStep, *spans: tuple[str, int, int]) -> None:
        """One pass over tokens ``[start, end)`` of sequences."""
        segments = [Segment(end - start, start, self.tables[name]) for name, start, end in spans]
        rows, first = [], 0
        for name, start, end in spans:
            rows.append(SavedRows(name, first, end - start, start))
            first += end - start
        meta = ForwardMeta.build(segments, self.runner.geometry.page_size, "cpu")
        ids = torch.tensor([token for name, start, end in spans for token in self.tokens[name][start:end]])
        positions = torch.tensor([place for _, start, end in spans for place in range(start, end)])
        around = step.around(rows, self.inputs, self.runner.pool, meta.slots)
        with around, self.inputs.given_to(self, [1]):
            self.runner.forward(ids, positions, meta, torch.tensor([first - 1]))

    def close(self) -> None:
        self.saver.close()
        self.ring.close()


def test_hidden_states_and_kv_are_those_of_the_pass(load_runner: LoadRunner) -> None:
    """Bit by bit, each in its unit, of sequences that lie apart in the batch."""
    at = Stepped(load_runner("llama_mha"), "abc")
    at.saver.begin("a", 0)
    at.saver.begin("c", 0)

    with at.saver.step() as step:
        at.forward(step, ("a", 0, 64), ("b", 0, 30), ("c", 0, 80))
    at.close()

    assert (at.copies.spans("a"), at.copies.spans("b")) == ([(0, 64)], [])
    assert at.copies.spans("c") == [(0, 64), (64, 80)]
    for name, rows in (("a", slice(0, 64)), ("c", slice(94, 174))):
        units = torch.from_numpy(np.concatenate([piece.rows for piece in at.copies.pieces[name]], axis=1))
        kv = kv_of(at.runner, at.tables[name], units.shape[1])
        expected = [at.hidden[0][rows], *(kv[layer, half].flatten(1) for layer in (1, 2) for half in (0, 1))]
        assert torch.equal(units.view(torch.float32), torch.stack(expected))


def test_passes_of_a_step_follow_one_another(load_runner: LoadRunner) -> None:
    """One sequence over several passes, of which nothing is handed on before the step has ended."""
    at = Stepped(load_runner("llama_mha"), "a")
    at.saver.begin("a", 0)

    with at.saver.step() as step:
        at.forward(step, ("a", 0, 50))
        at.forward(step, ("a", 50, 100))
        assert at.copies.pieces == {}
    at.close()

    assert at.copies.spans("a") == [(0, 64), (64, 100)]
    assert at.saver.counts.rows == 100


def test_a_void_step_leaves_no_trace(load_runner: LoadRunner) -> None:
    """Not even where all of its passes went well; the same rows may come again."""
    at = Stepped(load_runner("llama_mha"), "a")
    at.saver.begin("a", 0)
    with at.saver.step() as step:
        at.forward(step, ("a", 0, 50))
        at.forward(step, ("a", 50, 100))
        step.void()
    free = at.ring.room_rows

    with at.saver.step() as step:
        at.forward(step, ("a", 0, 70))
    at.close()

    assert at.copies.spans("a") == [(0, 64), (64, 70)]
    assert (at.saver.counts.rows, at.saver.counts.failed_steps) == (70, 1)
    assert free == (4 << 20) // (5 * at.ring.row_bytes)


def test_one_sequence_may_be_dropped(load_runner: LoadRunner) -> None:
    """The others of the step are saved; a pass that broke off in the dropped one alone voids nothing else."""
    at = Stepped(load_runner("llama_mha"), "ab")
    at.saver.begin("a", 0)
    at.saver.begin("b", 0)

    with at.saver.step() as step:
        at.forward(step, ("a", 0, 70), ("b", 0, 70))
        step.drop(["b"])
    with at.saver.step() as step:
        at.forward(step, ("a", 70, 80))
        with step.around([SavedRows("b", 0, 70, 0)], at.inputs):
            pass  # Ends before any layer has given anything.
        step.drop(["b"])
    with at.saver.step() as step:
        at.forward(step, ("b", 0, 65))
    at.close()

    assert (at.copies.spans("a"), at.copies.spans("b")) == ([(0, 64), (64, 80)], [(0, 64), (64, 65)])
    assert at.saver.counts.failed_steps == 0


def test_a_pass_that_gave_too_little_voids_its_step(load_runner: LoadRunner) -> None:
    """A model that does not call its modules once each would leave what was in the ring before."""
    at = Stepped(load_runner("llama_mha"), "a")
    at.saver.begin("a", 0)

    with at.saver.step() as step, step.around([SavedRows("a", 0, 70, 0)], at.inputs):
        pass
    at.close()

    assert at.copies.spans("a") == []
    assert at.saver.counts.failed_steps == 1


def test_rows_that_are_known_are_left_out(load_runner: LoadRunner) -> None:
    """Those before the sequence's beginning, and those that are computed once more."""
    at = Stepped(load_runner("llama_mha"), "a")
    at.saver.begin("a", 64)

    for start, end in ((0, 40), (40, 100), (90, 95), (80, 130)):
        with at.saver.step() as step:
            at.forward(step, ("a", start, end))
    at.close()

    assert at.copies.spans("a") == [(64, 128), (128, 130)]
    assert at.saver.counts.rows == 130 - 64
    (whole, _) = at.copies.pieces["a"]
    kv = kv_of(at.runner, at.tables["a"], 128)[:, :, 64:]
    # What was computed again lies in the pool as other shapes have rounded it.
    torch.testing.assert_close(torch.from_numpy(whole.rows[1]).view(torch.float32), kv[1, 0].flatten(1))


def test_who_stops_in_a_step_ends_behind_its_rows(load_runner: LoadRunner) -> None:
    """A gap in a later pass does not lose what an earlier one has taken."""
    at = Stepped(load_runner("llama_mha"), "a")
    at.saver.begin("a", 0)

    with at.saver.step() as step:
        at.forward(step, ("a", 0, 70))
        at.forward(step, ("a", 80, 90))
        assert at.copies.ended == []
    at.saver.end("a")

    assert at.copies.spans("a") == [(0, 64), (64, 70)]
    assert at.copies.ended == ["a"]
    at.close()
