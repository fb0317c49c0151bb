"""A driven executor with a prompt that was computed, whose hidden states are in a hidden pool and whose KV is wiped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from services.worker.detokenizer import Vocabulary
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.projection import KvProjection
from shared.memory import HostPoolView
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.requests import SamplingParams
from shared.messages.worker_plans import AdmitRequest, PageLoad, RestoreChunk
from tests.engine_driver import page_tables, random_prompt
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.restore.hidden_pages import Computed
from tests.unit.worker.restore.saved import kv_of

TOKENS, SUFFIX, ANSWER = 128, 9, 12
"""Tokens that are restored, that follow them in the prompt, and of the answer."""


class Cell:
    """A driven executor, a prompt that was computed, and its hidden states in a hidden pool (in reverse order of
    pages).
    """

    def __init__(
        self,
        runner: ModelRunner,
        words: Vocabulary,
        geometry: KvGeometry,
        *,
        chunks: Sequence[int] = (TOKENS, SUFFIX),
        has_projection: bool = True,
        staging_bytes: int = 2**20,
        submit: Callable[[Callable[[], None]], object] | None = None,
        seed: int = 1,
    ) -> None:
        size = runner.geometry.page_size
        projection = KvProjection(runner) if has_projection else None
        self.driven = Driven(runner, words, submit=submit, projection=projection, restore_staging_bytes=staging_bytes)
        self.runner, self.geometry = runner, geometry
        first, self.table, self.other = page_tables(runner, [200, 200, 200], seed=seed)
        self.computed = Computed.of(runner, random_prompt(TOKENS + SUFFIX, seed=seed), first, chunks)
        self.state = list(range(TOKENS // size))[::-1]
        self.pool = self.driven.host_pool(len(self.state), geometry=geometry)
        self.computed.write(self.pool, self.state)
        self.answer = self._ask("whole", first, TOKENS)
        self.wipe()

    def _ask(self, name: str, table: np.ndarray, cached: int) -> list[int]:
        """What the model says to the prompt, given the KV of its first ``cached`` tokens."""
        tokens = self.computed.tokens
        self.driven.give(self.admission(table, request_id=name, cached=cached))
        self.driven.give(batch(chunk(cached, len(tokens), request_id=name)))
        self.driven.run()
        return self.driven.tokens(name)

    def admission(self, table: np.ndarray, *, request_id: str = "r", cached: int = 0, **more: Any) -> AdmitRequest:
        params = SamplingParams(max_tokens=ANSWER, min_tokens=ANSWER, temperature=0)
        return admit(self.computed.tokens, table.tolist(), request_id=request_id, cached=cached, params=params, **more)

    def wipe(self) -> None:
        """Whatever is not restored is not a number."""
        pages = torch.from_numpy(np.concatenate((self.table, self.other))).long()
        self.runner.pool.tensor[:, :, pages] = float("nan")

    def pages(self, start: int, end: int) -> list[int]:
        size = self.runner.geometry.page_size
        return self.state[start // size : end // size]

    def restore(self, start: int, end: int, **more: Any) -> RestoreChunk:
        return self.computed.restore_chunk(start, end, self.pages(start, end), **more)

    def go_on(self, start: int = TOKENS, *, request_id: str = "r") -> list[int]:
        """Compute the rest of the prompt and answer."""
        self.driven.give(batch(chunk(start, len(self.computed.tokens), request_id=request_id)))
        self.driven.run()
        return self.driven.tokens(request_id)

    def found(self, table: np.ndarray | None = None, tokens: int = TOKENS) -> torch.Tensor:
        return kv_of(self.runner, self.table if table is None else table, tokens)

    def expected(self, tokens: int = TOKENS) -> torch.Tensor:
        return self.computed.kv[:, :, :tokens]


MakeCell = Callable[..., Cell]


class Loaded:
    """The first two pages of a cell's prompt in a host pool, and the order to load them."""

    def __init__(self, cell: Cell) -> None:
        geometry = cell.runner.geometry
        self.pool: HostPoolView = cell.driven.host_pool(2, storage_id="kv")
        halves = cell.runner.pool.bytes_view()
        for index, identity in enumerate(cell.computed.identities(2)):
            page = cell.computed.table[index]
            held = np.concatenate((halves[:, 0, page], halves[:, 1, page]), axis=1)
            self.pool.pages[index] = held.reshape(geometry.layers, -1)
            self.pool.seal_page(index, identity)
        self.order = PageLoad(
            request_id="r",
            attempt=1,
            storage_id="kv",
            host_pages=pack_int32([0, 1]),
            device_pages=pack_int32(cell.table[:2].tolist()),
            identities=b"".join(cell.computed.identities(2)),
        )


def flip(cell: Cell) -> None:
    """Alter one bit of the hidden pages."""
    cell.pool.pages[cell.state[5], 1, 77] ^= 8
