"""Requests whose hidden states are saved while they run, and what is needed to restore them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

import tests.checkpoints
from bench.hidden_pieces import HiddenPieces
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.attention_inputs import AttentionInputs
from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.saving_step import SavedRows
from services.worker.restore.snapshot_ring import SnapshotRing
from services.worker.restore.two_stage import TwoStageSaver
from tests.engine_driver import Request, run_step
from tests.run_name import shm_prefix

FAMILIES = ("llama_mha", *tests.checkpoints.FAMILIES)
CPU = torch.device("cpu")


class Shelf:
    """Takes pieces until it holds ``capacity`` of them."""

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self.pieces: list[HiddenPiece] = []

    def take(self, piece: HiddenPiece) -> bool:
        if len(self.pieces) == self.capacity:
            return False
        self.pieces.append(piece)
        return True

    def of(self, sequence_id: str) -> list[HiddenPiece]:
        return [piece for piece in self.pieces if piece.sequence_id == sequence_id]


class Later:
    """Work for another thread, done when the test says so."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def do_all(self) -> None:
        while self.work:
            self.work.pop(0)()


def shape_of(runner: ModelRunner) -> HiddenShape:
    return HiddenShape(runner.geometry.layers, int(runner.model.config.hidden_size), runner.geometry.dtype)


class Saving:
    """A saver over a runner. Stage two runs at once, or when ``later`` is told to."""

    def __init__(
        self,
        runner: ModelRunner,
        ring: SnapshotRing,
        shelf: Shelf,
        *,
        layers: Sequence[int],
        later: Later | None,
        max_sequences: int,
    ) -> None:
        self.runner, self.shelf = runner, shelf
        self.inputs = AttentionInputs(runner.model, runner.geometry.layers)
        self.saver = TwoStageSaver(
            ring,
            HiddenPieces(shelf, layers),
            max_sequences=max_sequences,
            submit=(lambda work: work()) if later is None else later.submit,
        )

    def step(self, work: list[tuple[str, Request, int]]) -> torch.Tensor:
        """One step of named requests, saved where their sequences are being saved."""
        rows, first = [], 0
        for name, request, count in work:
            rows.append(SavedRows(name, first, count, request.computed))
            first += count
        with self.saver.step() as step, step.around(rows, self.inputs):
            return run_step(self.runner, [(request, count) for _, request, count in work])

    def run(self, name: str, request: Request, chunks: Sequence[int], new_tokens: int) -> None:
        """Prefill in ``chunks`` and decode greedily until ``new_tokens`` are there; all but the last have KV."""
        for count in chunks:
            logits = self.step([(name, request, count)])
        for _ in range(new_tokens):
            request.tokens.append(int(logits[0].argmax()))
            if len(request.output) < new_tokens:
                logits = self.step([(name, request, 1)])


@contextmanager
def saving(
    runner: ModelRunner,
    *,
    layers: Sequence[int] | None = None,
    ring_bytes: int = 4 << 20,
    later: Later | None = None,
    max_sequences: int = 8,
    shelf: Shelf | None = None,
) -> Iterator[Saving]:
    saved = list(range(runner.geometry.layers)) if layers is None else layers
    ring = SnapshotRing(shape_of(runner), ring_bytes, device=CPU, shm_prefix=shm_prefix("restore"), layers=saved)
    try:
        yield Saving(runner, ring, shelf or Shelf(), layers=saved, later=later, max_sequences=max_sequences)
    finally:
        ring.close()


def kv_of(runner: ModelRunner, table: np.ndarray, tokens: int) -> torch.Tensor:
    """KV of a request's first tokens, in order, [layers, 2, tokens, kv_heads, head_dim]."""
    size = runner.geometry.page_size
    slots = torch.tensor([int(table[place // size]) * size + place % size for place in range(tokens)])
    return runner.pool.tensor.flatten(2, 3)[:, :, slots].clone()
