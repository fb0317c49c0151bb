"""A prefix that was computed and saved, wiped off the device, and restored by any mix of means."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.host_pages import HostPages
from services.worker.engine.forward_meta import Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.restore.hidden_source import HiddenSource, PieceSource
from services.worker.restore.layer_mix import LayerMix
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.projection import KvProjection
from services.worker.restore.restoration import Restoration, Sources
from services.worker.restore.staging import StagingMemory
from shared.memory.host_pool import layer_checksum
from tests.engine_driver import Request, page_tables, random_prompt
from tests.unit.worker.restore.saved import CPU, kv_of, saving, shape_of


@dataclass
class Prefix:
    """``kv`` is what was computed, ``host`` its pages page-first, ``answer`` the greedy tokens after it."""

    runner: ModelRunner
    tokens: list[int]
    length: int
    table: np.ndarray
    pieces: list[HiddenPiece]
    kv: torch.Tensor
    host: np.ndarray

    @classmethod
    def computed(
        cls, runner: ModelRunner, length: int, *, chunks: list[int], decoded: int = 0, seed: int = 1
    ) -> Prefix:
        """``length`` tokens, the last ``decoded`` of them by decoding; saved whole."""
        (table,) = page_tables(runner, [length + 60], seed=seed)
        request = Request(random_prompt(length - decoded, seed=seed), table)
        with saving(runner, ring_bytes=16 << 20) as at:
            at.saver.begin("r", 0)
            at.run("r", request, chunks, decoded + 1)
            at.saver.end("r")
        halves = runner.pool.bytes_view()[:, :, table]
        host = np.ascontiguousarray(halves.transpose(2, 0, 1, 3))
        return cls(runner, request.tokens[:length], length, table, at.shelf.pieces, kv_of(runner, table, length), host)

    def wipe(self, first: int = 0) -> None:
        """Forget the KV of every token from ``first`` on."""
        size = self.runner.geometry.page_size
        for place in range(first, len(self.table) * size):
            self.runner.pool.tensor[:, :, int(self.table[place // size]), place % size] = float("nan")

    def kv_pages(self, first: int) -> HostPages:
        """The host copy of the pages from ``first`` on, with checksums."""
        size = self.runner.geometry.page_size
        pages = np.arange(first // size, -(-self.length // size), dtype=np.int32)
        identities = np.random.default_rng(0).integers(1, 255, (len(pages), 16), dtype=np.uint8)
        checksums = np.array(
            [
                [layer_checksum(layer.reshape(-1), identity.tobytes()) for layer in self.host[page]]
                for page, identity in zip(pages, identities, strict=True)
            ],
            dtype=np.uint64,
        )
        layout = PageLayout.page_first(self.runner.geometry, len(self.host))
        memory = PageMemory(layout, array=self.host.reshape(-1))
        return HostPages(BatchedMover(self.runner.pool), memory, pages, self.table[pages], checksums, identities)

    def source(self, first: int, end: int | None = None) -> PieceSource:
        layers = range(self.runner.geometry.layers)
        return PieceSource(shape_of(self.runner), self.pieces, first, end or self.length, layers)

    def restoration(
        self,
        mix: LayerMix,
        *,
        first: int = 0,
        hidden: HiddenSource | None = None,
        depth: int = 2,
        timeout_s: float = 30.0,
    ) -> Restoration:
        """Of tokens ``[first, length)``."""
        sources = Sources(
            hidden=hidden or self.source(first),
            kv=self.kv_pages(first),
            ids=torch.tensor(self.tokens[first:]),
        )
        segment = Segment(self.length - first, first, self.table)
        projection = KvProjection(self.runner)
        staging = StagingMemory(depth * segment.rows * projection.shape.row_bytes, CPU)
        return Restoration(self.runner, projection, segment, mix, sources, staging=staging, timeout_s=timeout_s)


def beside(work: Callable[[], Any]) -> threading.Thread:
    """Do it on a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
