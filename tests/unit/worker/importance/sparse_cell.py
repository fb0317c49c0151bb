"""An executor on a real model, whose requests may have a sparse prefix of a document that it has computed once.

What is on the disk is a copy of that KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from bench.stored_prefix import StoredPrefix
from services.worker.detokenizer import Vocabulary
from services.worker.engine.model_runner import ModelRunner
from services.worker.importance.prefix_source import token_slots
from services.worker.kv.movers.batched import BatchedMover
from services.worker.parallel.group_pool import GroupPool
from services.worker.parallel.group_runner import GroupRunner
from services.worker.parallel.parts_mover import PartsMover
from services.worker.sparse_prefixes import ImportanceSettings
from shared.chunks import chunk_tokens
from shared.errors import SparsePrefixLost
from shared.ids import DIGEST_BYTES, chain_page, chain_root, namespace_digest
from shared.memory import HostPoolView
from shared.messages.base import pack_int32
from shared.messages.requests import Importance, SamplingParams
from shared.messages.worker_plans import AdmitRequest, PageLoad, SparsePrefix
from tests.engine_driver import random_prompt
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.importance.sparse_wire import names_of

ANSWER = 12
GREEDY = SamplingParams(max_tokens=ANSWER, min_tokens=ANSWER, temperature=0, ignore_eos=True)


class OnDisk(StoredPrefix):
    """Reads of layers from ``lost_from`` on fail, while that is not None."""

    def __init__(self, kv: torch.Tensor, start: int) -> None:
        super().__init__(kv, (), start)
        self.disk_bytes = 0
        self.reads = 0
        self.lost_from: int | None = None
        self.error: type[Exception] = SparsePrefixLost
        self.on_read: Callable[[], None] = lambda: None

    def probe_keys(self, layer: int, heads: Sequence[int], start: int, layers: int = 1) -> tuple[torch.Tensor, int]:
        keys, nbytes = super().probe_keys(layer, heads, start, layers)
        return self._read(layer, keys), nbytes

    def keys(self, layer: int, start: int) -> torch.Tensor:
        return self._read(layer, super().keys(layer, start))

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        return self._read(layer, super().gather(layer, tokens))

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        return self._read(layer, super().values_by_head(layer, tokens))

    def _read(self, layer: int, tensor: torch.Tensor) -> torch.Tensor:
        self.reads += 1
        self.on_read()
        if self.lost_from is not None and layer >= self.lost_from:
            raise self.error("the disk is gone")
        self.disk_bytes += tensor.nbytes
        return tensor


class SparseCell:
    """``document`` is 192 tokens, whose KV is in ``pages``; ``take`` hands out pages that nobody has."""

    def __init__(
        self,
        runner: ModelRunner | GroupRunner,
        words: Vocabulary,
        importance: ImportanceSettings | None = None,
        *,
        tokens: int = 192,
        submit: Callable[[Callable[[], None]], object] | None = lambda work: work(),
    ) -> None:
        """``submit`` runs transfers."""
        self.runner = runner
        self.size = runner.geometry.page_size
        self._free = np.random.default_rng(7).permutation(runner.pool.pages).tolist()
        self.sources: list[OnDisk] = []
        mover = None
        if isinstance(runner, GroupRunner):
            mover = PartsMover(runner.geometry, runner.parts.parts, BatchedMover)
        self.driven = Driven(runner, words, submit=submit, open_source=self.open, importance=importance, mover=mover)
        self.document = random_prompt(tokens, seed=11)
        self.pages = self.take(tokens)
        self.driven.give(admit(self.document, self.pages, request_id="document", max_tokens=1))
        self.driven.give(batch(chunk(0, tokens, request_id="document")))
        self.driven.run()
        slots = torch.from_numpy(token_slots(np.array(self.pages, dtype=np.int32), self.size, 0, tokens))
        layers = range(runner.geometry.layers)
        rows = [torch.stack([runner.pool.rows(layer, half, slots) for half in (0, 1)]) for layer in layers]
        self.kv = torch.stack(rows).view(len(rows), 2, tokens, runner.geometry.kv_heads, -1)

    def take(self, tokens: int) -> list[int]:
        """Pages for so many tokens."""
        count = -(-tokens // self.size)
        taken: list[int] = self._free[:count]
        self._free = self._free[count:]
        assert len(taken) == count
        return taken

    def prompt(self, question: int, seed: int) -> list[int]:
        """The document and a question of so many tokens."""
        return self.document + random_prompt(question, seed)

    def exact(self, prompt: Sequence[int], request_id: str) -> AdmitRequest:
        """The document is cached on the device."""
        return admit(prompt, [*self.pages, *self.take_own(prompt)], request_id=request_id, cached=192, params=GREEDY)

    def take_own(self, prompt: Sequence[int]) -> list[int]:
        """Pages for what follows the document, with room for the answer."""
        return self.take(len(prompt) - len(self.document) + ANSWER)

    def sparse(
        self,
        prompt: Sequence[int],
        request_id: str,
        *,
        start: int = 64,
        ratio: float = 1.0,
        metric: str = "h2o",
        attempt: int = 1,
        prompt_tokens: int | None = None,
        before: Sequence[int] | None = None,
    ) -> AdmitRequest:
        """The document is on the disk from token ``start`` on; pages ``before`` hold what it begins with, by default
        its own.
        """
        end = len(self.document)
        prefix = self.prefix(start, ratio=ratio, metric=metric)
        exact = self.pages[: start // self.size] if before is None else before
        table = [*exact, *[-1] * ((end - start) // self.size), *self.take_own(prompt)]
        return admit(
            prompt,
            table,
            request_id=request_id,
            cached=end,
            params=GREEDY,
            sparse=prefix,
            attempt=attempt,
            prompt_tokens=prompt_tokens,
        )

    def prefix(self, start: int, *, ratio: float, metric: str = "h2o") -> SparsePrefix:
        end, size = len(self.document), chunk_tokens(self.size)
        depth = start // size * size
        return SparsePrefix(
            storage_id="s",
            namespace="n",
            start=start,
            end=end,
            depth=depth,
            chunks=names_of(end // size)[depth // size * DIGEST_BYTES :],
            pages=pack_int32(self.take(int(np.ceil(ratio * (end - start))))),
            importance=Importance(ratio=ratio, metric=metric),
        )

    def back_up(self, tokens: int) -> tuple[HostPoolView, PageLoad]:
        """The document's first ``tokens`` tokens in a host pool, and what loads them for "r" to new device pages."""
        count = tokens // self.size
        host = self.driven.host_pool(count)
        rows = self.kv.view(torch.uint8).numpy()
        identity, identities = chain_root(namespace_digest("model")), []
        for index in range(count):
            identity = chain_page(identity, pack_int32(self.document[index * self.size : (index + 1) * self.size]))
            identities.append(identity)
            page = rows[:, :, index * self.size : (index + 1) * self.size]
            host.pages[index] = page.reshape(host.pages[index].shape)
            host.seal_page(index, identity)
        load = PageLoad(
            request_id="r",
            attempt=1,
            storage_id="s",
            host_pages=pack_int32(range(count)),
            device_pages=pack_int32(self.take(tokens)),
            identities=b"".join(identities),
        )
        return host, load

    def forget(self, start: int) -> None:
        """The document's pages from token ``start`` on poison whoever reads them."""
        pool = self.runner.pool
        for part in [each.pool for each in pool.parts] if isinstance(pool, GroupPool) else [pool]:
            part.tensor[:, :, self.pages[start // self.size :]] = float("nan")

    def open(self, sparse: SparsePrefix) -> OnDisk:
        self.sources.append(OnDisk(self.kv[:, :, sparse.start : sparse.end], sparse.start))
        self.prepare(self.sources[-1])
        return self.sources[-1]

    def prepare(self, source: OnDisk) -> None:
        """Called with each source that is opened; tests replace it."""


MakeCell = Callable[..., SparseCell]
"""A cell of a family, by default with pages of 16 tokens, and whatever else :class:`SparseCell` takes."""
