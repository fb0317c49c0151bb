"""What leased pages must hold, seen without the saver: attention inputs of every pass, and the KV on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.attention_inputs import AttentionInputs
from shared.chunks import chunk_pages, chunk_tokens
from shared.ids import chain_pages, chain_root, namespace_digest, split_digests
from shared.memory import HostPoolView
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.worker_events import HiddenSaved
from shared.messages.worker_plans import HiddenLease
from tests.unit.worker.restore.hidden_pages import bytes_of, hidden_layers, loaded_layers
from tests.unit.worker.restore.saved import kv_of

ROOT = chain_root(namespace_digest("model"))


def identities_of(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Of the whole pages of a sequence, from the root."""
    whole = len(tokens) // page_size * page_size
    return split_digests(chain_pages(ROOT, pack_int32(tokens[:whole]), page_size * 4))


def hidden_lease(
    tokens: Sequence[int],
    pages: Sequence[int],
    page_size: int,
    *,
    depth: int = 0,
    lease_id: int = 1,
    storage_id: str = "s",
) -> HiddenLease:
    """Hidden ``pages`` for a sequence that begins with ``tokens``, from ``depth`` on."""
    before = depth // page_size
    return HiddenLease(
        lease_id=lease_id,
        storage_id=storage_id,
        depth=depth,
        pages=pack_int32(pages),
        parent=identities_of(tokens, page_size)[before - 1] if before else ROOT,
    )


class Witness:
    """Sees every forward pass of a runner that ends well. ``hidden`` is of the last pass in which a token was computed:
    [layers, hidden] by the first page of its request and its position.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.hidden: dict[tuple[int, int], torch.Tensor] = {}
        self._forward = runner.forward
        self._inputs = AttentionInputs(runner.model, runner.geometry.layers)
        self._parts: list[torch.Tensor] = []
        runner.forward = self._see  # type: ignore[method-assign]

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        self._parts.append(hidden.detach().clone())

    def _see(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        self._parts = []
        with self._inputs.given_to(self):
            logits = self._forward(ids, positions, meta, last_rows)
        hidden, row = torch.stack(self._parts), 0
        for segment in meta.segments:
            for position in range(segment.context, segment.length):
                self.hidden[int(segment.pages[0]), position] = hidden[:, row]
                row += 1
        return logits

    def rows(self, page: int, first: int, end: int) -> torch.Tensor:
        """Attention inputs of tokens ``[first, end)``, [layers, end - first, hidden]."""
        return torch.stack([self.hidden[page, position] for position in range(first, end)], dim=1)


def assert_saved(
    host: HostPoolView,
    saved: HiddenSaved,
    lease: HiddenLease,
    pages: Sequence[int],
    tokens: Sequence[int],
    table: Sequence[int],
    runner: Any,
    witness: Witness | None = None,
) -> None:
    """Every saved page verifies in each unit, and holds what was computed bit by bit. ``pages`` are all of the lease,
    ``table`` the request's page table; without a ``witness`` only KV is compared.
    """
    geometry = host.geometry
    size, count = geometry.page_size, saved.chunks * chunk_tokens(geometry.page_size)
    identities = identities_of(tokens, size)[lease.depth // size :]
    kv = kv_of(runner, np.array(table), lease.depth + count)
    end = lease.depth + count
    hidden = witness.rows(table[0], lease.depth, end) if witness is not None and count else None

    assert saved.lease_id == lease.lease_id
    assert unpack_int32(saved.tokens) == list(tokens[lease.depth : end])
    for number in range(saved.chunks * chunk_pages(size)):
        rows = slice(number * size, (number + 1) * size)
        page = pages[number]
        for unit in range(geometry.units):
            host.verify_layer(page, unit, identities[number])
        held = [bytes_of(hidden[layer, rows]) for layer in hidden_layers(geometry)] if hidden is not None else []
        at = slice(lease.depth + rows.start, lease.depth + rows.stop)
        held += [bytes_of(kv[layer, half, at]) for layer in loaded_layers(geometry) for half in (0, 1)]
        units = host.pages[page][geometry.units - len(held) :]
        np.testing.assert_array_equal(units, np.stack(held))
