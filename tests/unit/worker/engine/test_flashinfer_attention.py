"""FlashInfer is asked for what our kernels compute: a stand-in with its API gives the oracle's results."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from services.worker.config import WorkerConfig
from services.worker.engine.attention import AttentionCall
from services.worker.engine.flashinfer_attention import FlashInferAttention
from services.worker.engine.forward_meta import ForwardMeta, Segment, paged_tensors
from services.worker.engine.gpu_attention import gpu_attention
from services.worker.kv.device_pool import DevicePool
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry
from tests.cuda import flashinfer_stand_in
from tests.run_name import shm_prefix
from tests.unit.worker.kernels import oracles

PAGE_SIZE, HEADS = 8, 4


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    geometry = KvGeometry(layers=2, kv_heads=2, head_dim=64, page_size=PAGE_SIZE, dtype="bfloat16")
    made = DevicePool.create(geometry, 40, device="cpu", shm_prefix=shm_prefix("flashinfer"))
    made.tensor.copy_(torch.randn(made.tensor.shape, generator=torch.Generator().manual_seed(0)))
    yield made
    made.close()


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in.module())


def _meta() -> ForwardMeta:
    """Single rows at edges of pages, a prompt, and a chunk behind a context."""
    order = np.random.default_rng(0).permutation(40).astype(np.int32)
    segments = [Segment(1, 0, order[:1]), Segment(1, 7, order[1:4]), Segment(1, 8, order[4:6]),
                Segment(21, 0, order[6:9]), Segment(5, 30, order[9:16])]  # fmt: skip
    return ForwardMeta.build(segments, PAGE_SIZE, "cpu")


def _call(meta: ForwardMeta, layer: int, window: int | None = None, softcap: float | None = None) -> AttentionCall:
    query = torch.randn(1, HEADS, meta.rows, 64, generator=torch.Generator().manual_seed(layer)).bfloat16()
    return AttentionCall(layer, query, query[:, :2], query[:, :2], 0.125, window, softcap, {})


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (9, 5.0)])
def test_it_computes_what_ours_do(pool: DevicePool, window: int | None, softcap: float | None) -> None:
    """Rows, page tables, the last page's entries, windows and soft caps."""
    meta = _meta()
    call = _call(meta, 1, window, softcap)

    found = FlashInferAttention(pool).for_step(meta)(call)

    paged = paged_tensors(meta.segments, PAGE_SIZE, torch.device("cpu"))
    expected = oracles.paged_attention(
        call.query[0].transpose(0, 1), pool.k(1), pool.v(1), paged, scaling=0.125, window=window, softcap=softcap
    )
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("_installed")
def test_a_step_is_planned_once_for_each_kind_of_layer(pool: DevicePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers it has; the next step is planned anew."""
    monkeypatch.setattr(flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper, "planned", 0)
    backend, meta = FlashInferAttention(pool), _meta()

    for _ in range(2):
        attend = backend.for_step(meta)
        for layer, window in ((0, None), (1, None), (0, 4), (1, 4)):
            attend(_call(meta, layer, window))

    assert flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper.planned == 4


def test_what_it_cannot_do_is_refused_with_every_reason() -> None:
    """It is not installed here, and float32 and small heads are not among what it computes."""
    geometry = KvGeometry(layers=1, kv_heads=1, head_dim=16, page_size=PAGE_SIZE, dtype="float32")
    small = DevicePool.create(geometry, 1, device="cpu", shm_prefix=shm_prefix("flashinfer"))
    try:
        with pytest.raises(ConfigError, match=r"not installed; .*not in float32; .*not of 16.*--attention triton"):
            gpu_attention(small, "flashinfer")
    finally:
        small.close()


@pytest.mark.usefixtures("_installed")
def test_backends_have_names(pool: DevicePool) -> None:
    """Without a choice our kernels serve; exact mode has no other."""
    assert isinstance(gpu_attention(pool, "flashinfer"), FlashInferAttention)
    with pytest.raises(ValueError, match="--exact: its attention is ours"):
        WorkerConfig(model="m", exact=True, attention="flashinfer")
