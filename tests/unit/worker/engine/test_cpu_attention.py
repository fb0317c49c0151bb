"""Attention on a CPU, by compiled kernels and by the portable path, for every kind of layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.kv.device_pool import DevicePool
from shared.messages.pools import KvGeometry
from tests.cases import case
from tests.run_name import shm_prefix
from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.paged_batches import Batch, Shape, make_batch
from tests.unit.worker.native.pages import segments_of

SEGMENTS = ((1, 0), (5, 0), (1, 70), (40, 30), (300, 0), (270, 100))
"""The last two are longer than a block of the portable path."""

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 24},
    "chunk": {"chunk": 24},
    "long chunk": {"chunk": 290},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([-30.0, 0.0, 4.0, 90.0])},
    "sinks, window": {"sinks": torch.tensor([1.0, 0.0, 4.0, -1.0]), "window": 24},
    "sinks, chunk, softcap": {"sinks": torch.tensor([1.0, 0.0, 4.0, -1.0]), "chunk": 24, "softcap": 2.0},
}


@pytest.fixture(params=[1, 16], ids=["page 1", "page 16"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[Batch, DevicePool]]:
    """A batch, and a pool of one layer that has its keys and values."""
    batch = make_batch(Shape(SEGMENTS, page_size=request.param))
    pages, page_size, kv_heads, head_dim = batch.k_pool.shape
    geometry = KvGeometry(layers=1, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype="float32")
    pool = DevicePool.create(geometry, pages, device="cpu", shm_prefix=shm_prefix("kinds"))
    pool.k(0).copy_(batch.k_pool)
    pool.v(0).copy_(batch.v_pool)
    yield batch, pool
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_equals_the_oracle(
    made: tuple[Batch, DevicePool], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single rows, prompts and chunks of prompts, by compiled kernels and by the portable path."""
    batch, pool = made
    compiled, portable = CpuAttention(pool), CpuAttention(pool)
    monkeypatch.setattr(portable, "_kernels", lambda shape: (None, None))
    segments = segments_of(batch)
    query = batch.q.transpose(0, 1)[None]
    new = _new_rows(batch, segments)
    settings = {"window": None, "softcap": None, **KINDS[kind]}
    call = AttentionCall(layer=0, query=query, key=new[0], value=new[1], scaling=0.25, extras={}, **settings)
    meta = ForwardMeta.build(segments, pool.geometry.page_size, "cpu")

    found = [backend.for_step(meta)(call).clone() for backend in (compiled, portable)]

    expected = oracles.paged_attention(batch.q, batch.k_pool, batch.v_pool, batch.paged, scaling=0.25, **KINDS[kind])
    for path, each in zip(("compiled", "portable"), found, strict=True):
        with case(path=path):
            torch.testing.assert_close(each, expected, atol=2e-5, rtol=2e-5)


def _new_rows(batch: Batch, segments: list[Segment]) -> list[torch.Tensor]:
    """K and V of the step's rows, ``[1, kv_heads, T, head_dim]``, as the model hands them over."""
    size = batch.k_pool.shape[1]
    halves = []
    for pool in (batch.k_pool, batch.v_pool):
        rows = []
        for segment in segments:
            at = np.arange(segment.context, segment.length)
            rows.append(pool[torch.from_numpy(segment.pages[at // size]).long(), torch.from_numpy(at % size)])
        halves.append(torch.cat(rows).transpose(0, 1)[None])
    return halves
