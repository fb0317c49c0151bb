"""Hidden pages made by hand: a prompt computed in chunks, its attention inputs captured, its KV read from the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.attention_inputs import AttentionInputs
from shared.ids import chain_pages, chain_root, namespace_digest, split_digests
from shared.memory import HostPoolView
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.worker_plans import RestoreChunk
from tests.engine_driver import Request, run_step
from tests.unit.worker.restore.saved import kv_of


def hidden_geometry(kv: KvGeometry, absent: int, from_hidden: int, hidden: int) -> KvGeometry:
    """Of hidden pages that restore pages of ``kv``."""
    return KvGeometry(
        layers=kv.layers,
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        page_size=kv.page_size,
        dtype=kv.dtype,
        hidden=hidden if from_hidden else 0,
        absent=absent,
        from_hidden=from_hidden,
    )


class _Rows:
    """What went into attention of each layer, over several steps."""

    def __init__(self) -> None:
        self.parts: dict[int, list[torch.Tensor]] = {}

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        self.parts.setdefault(layer, []).append(hidden.detach().clone())


@dataclass
class Computed:
    """A prompt whose KV was computed. ``hidden`` [layers, tokens, hidden], ``kv`` as :func:`kv_of` has it."""

    runner: ModelRunner
    tokens: list[int]
    table: np.ndarray
    hidden: torch.Tensor
    kv: torch.Tensor

    @classmethod
    def of(cls, runner: ModelRunner, tokens: Sequence[int], table: np.ndarray, chunks: Sequence[int]) -> Computed:
        """Compute ``tokens`` in these ``chunks``; the last of them need no KV."""
        request, rows = Request(list(tokens), table), _Rows()
        with AttentionInputs(runner.model, runner.geometry.layers).given_to(rows):
            for count in chunks:
                run_step(runner, [(request, count)])
        hidden = torch.stack([torch.cat(rows.parts[layer]) for layer in range(runner.geometry.layers)]).cpu()
        return cls(runner, list(tokens), table, hidden, kv_of(runner, table, request.computed))

    def identities(self, pages: int) -> list[bytes]:
        """Of the first pages."""
        size = self.runner.geometry.page_size
        packed = pack_int32(self.tokens[: pages * size])
        return split_digests(chain_pages(chain_root(namespace_digest("model")), packed, 4 * size))

    def write(self, pool: HostPoolView, pages: Sequence[int]) -> None:
        """Fill ``pages`` of a hidden pool with this prompt's first pages, and seal them."""
        write_pages(pool, pages, self.identities(len(pages)), self.hidden, self.kv)

    def restore_chunk(
        self,
        start: int,
        end: int,
        pages: Sequence[int],
        *,
        recomputed: int = 0,
        request_id: str = "r",
        attempt: int = 1,
        storage_id: str = "s",
    ) -> RestoreChunk:
        """An order to restore tokens ``[start, end)`` from hidden ``pages``, which are those of these tokens."""
        size = self.runner.geometry.page_size
        return RestoreChunk(
            request_id=request_id,
            attempt=attempt,
            start=start,
            end=end,
            storage_id=storage_id,
            hidden_pages=pack_int32(pages),
            identities=b"".join(self.identities(end // size)[start // size :]),
            recomputed=recomputed,
        )


def write_pages(
    pool: HostPoolView,
    pages: Sequence[int],
    identities: Sequence[bytes],
    hidden: Mapping[int, torch.Tensor] | torch.Tensor,
    kv: torch.Tensor,
) -> None:
    """Fill ``pages`` of a hidden pool with a prompt's first pages, and seal them. By layer, ``hidden`` has
    [tokens, hidden] and ``kv`` [2, tokens, ...].
    """
    size = pool.geometry.page_size
    for index, (page, identity) in enumerate(zip(pages, identities, strict=True)):
        rows = slice(index * size, (index + 1) * size)
        units = [hidden[layer][rows] for layer in hidden_layers(pool.geometry)]
        units += [kv[layer, half, rows] for layer in loaded_layers(pool.geometry) for half in (0, 1)]
        for unit, held in enumerate(units):
            pool.pages[page, unit] = bytes_of(held)
        pool.seal_page(page, identity)


def hidden_layers(geometry: KvGeometry) -> range:
    return range(geometry.absent, geometry.absent + geometry.from_hidden)


def loaded_layers(geometry: KvGeometry) -> range:
    return range(geometry.absent + geometry.from_hidden, geometry.layers)


def bytes_of(rows: torch.Tensor) -> np.ndarray:
    return rows.contiguous().view(-1).view(torch.uint8).cpu().numpy()
