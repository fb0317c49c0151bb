"""Reads of one layer: each is timed, and counted by what it is for."""

from __future__ import annotations

import itertools

import torch

from bench.stored_prefix import StoredPrefix
from services.worker.importance.bytes_read import BytesRead
from services.worker.importance.layer_load import LayerLoad, LayerOutcome
from shared.messages.sparse_reads import code_bytes

HEADS, TOKENS, HEAD_DIM, START = 3, 12, 4, 100
VECTOR = HEAD_DIM * 4


def test_reads_are_counted_and_timed() -> None:
    """Keys for choosing are no bytes that the layer attends over; each read here takes a second."""
    kv = torch.randn(2, 2, TOKENS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    source, counts, clock = StoredPrefix(kv, (0, 2), START), BytesRead(), itertools.count()
    load = LayerLoad(source, 1, counts, lambda: float(next(clock)))
    chosen, by_head = torch.tensor([101, 104]), torch.tensor([[100, 103], [101, 103], [109, 110]])

    probes, keys = load.probe_keys((0, 2), 103), load.keys(103)
    found, values = load.kv(chosen), load.values(by_head)

    assert torch.equal(probes, source.probe_keys(1, (0, 2), 103)[0])
    assert torch.equal(keys, source.keys(1, 103))
    assert torch.equal(found, source.gather(1, chosen))
    assert torch.equal(values, source.values_by_head(1, by_head))
    assert counts.by_kind() == {
        "probe_keys": 2 * 9 * code_bytes(HEAD_DIM),
        "chosen": 2 * 2 * HEADS * VECTOR,
        "fallback_keys": HEADS * 9 * VECTOR,
        "fallback_values": 2 * HEADS * VECTOR,
    }
    assert load.outcome() == LayerOutcome(layer=1, needed_bytes=6 * HEADS * VECTOR, keys_s=2.0, chosen_s=2.0)
    assert load.outcome().stall_s == 4.0
