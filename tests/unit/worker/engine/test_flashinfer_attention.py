"""FlashInfer is asked for what our kernels compute: a stand-in with its rules gives the oracle's results."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from services.worker.config import WorkerConfig
from services.worker.engine.attention import AttentionCall
from services.worker.engine.flashinfer_attention import FlashInferAttention, FlashInferSteps
from services.worker.engine.flashinfer_plans import Planner
from services.worker.engine.forward_meta import ForwardMeta, Segment, paged_tensors, tiles_of
from services.worker.engine.gpu_attention import gpu_attention
from services.worker.kv.device_pool import DevicePool
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry
from tests.cuda import flashinfer_stand_in
from tests.cuda.flashinfer_stand_in import VERSIONS, Machine
from tests.cuda.late_device import LateStream
from tests.cuda.record_flashinfer import DECODE, PREFILL
from tests.run_name import shm_prefix
from tests.unit.worker.kernels import oracles

PAGE_SIZE, HEADS, PAGES = 8, 4, 400


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    geometry = KvGeometry(layers=2, kv_heads=2, head_dim=64, page_size=PAGE_SIZE, dtype="bfloat16")
    made = DevicePool.create(geometry, PAGES, device="cpu", shm_prefix=shm_prefix("flashinfer"))
    made.tensor.copy_(torch.randn(made.tensor.shape, generator=torch.Generator().manual_seed(0)))
    yield made
    made.close()


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With the latest version of FlashInfer whose signatures are recorded, unless a test names others."""
    made = Machine(version=getattr(request, "param", VERSIONS[-1]))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in.module(made))
    return made


ORDER = np.random.default_rng(0).permutation(PAGES).astype(np.int32)


def _meta() -> ForwardMeta:
    """Single rows at edges of pages, a prompt, and a chunk behind a context."""
    segments = [Segment(1, 0, ORDER[:1]), Segment(1, 7, ORDER[1:4]), Segment(1, 8, ORDER[4:6]),
                Segment(21, 0, ORDER[6:9]), Segment(5, 30, ORDER[9:16])]  # fmt: skip
    return ForwardMeta.build(segments, PAGE_SIZE, "cpu")


def _shared_meta() -> ForwardMeta:
    """Ten rows over one document of 1,024 tokens, a prompt between them, and a row of something else."""
    document = ORDER[: 1024 // PAGE_SIZE]
    rows = [
        Segment(1, 1024 + 3 * number, np.concatenate([document, ORDER[200 + 8 * number : 208 + 8 * number]]))
        for number in range(10)
    ]
    return ForwardMeta.build(
        [*rows[:4], Segment(21, 0, ORDER[300:303]), *rows[4:], Segment(1, 40, ORDER[310:316])], PAGE_SIZE, "cpu"
    )


def _call(meta: ForwardMeta, layer: int, window: int | None = None, softcap: float | None = None) -> AttentionCall:
    query = torch.randn(1, HEADS, meta.rows, 64, generator=torch.Generator().manual_seed(layer)).bfloat16()
    return AttentionCall(layer, query, query[:, :2], query[:, :2], 0.125, window, softcap, {})


def _expected(pool: DevicePool, meta: ForwardMeta, call: AttentionCall) -> torch.Tensor:
    paged = paged_tensors(meta.segments, PAGE_SIZE, torch.device("cpu"))
    return oracles.paged_attention(
        call.query[0].transpose(0, 1), pool.k(call.layer), pool.v(call.layer), paged,
        scaling=0.125, window=call.window, softcap=call.softcap,
    )  # fmt: skip


def _check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", VERSIONS, indirect=True)
@pytest.mark.parametrize("meta", [_meta(), _shared_meta()], ids=["apart", "shared"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (9, 5.0)])
def test_it_computes_what_ours_do(
    pool: DevicePool, meta: ForwardMeta, window: int | None, softcap: float | None
) -> None:
    """Rows, page tables, the last page's entries, windows and soft caps; a document that requests share."""
    call = _call(meta, 1, window, softcap)

    found = FlashInferAttention(pool).for_step(meta)(call)

    _check(found, _expected(pool, meta, call))


def test_a_step_is_planned_once_for_each_kind_of_layer(pool: DevicePool, machine: Machine) -> None:
    """However many layers it has; the next step is planned anew."""
    backend, meta = FlashInferAttention(pool), _meta()

    for _ in range(2):
        attend = backend.for_step(meta)
        for layer, window in ((0, None), (1, None), (0, 4), (1, 4)):
            attend(_call(meta, layer, window))

    assert machine.planned == [PREFILL] * 4


def test_shared_pages_are_read_by_a_launch_of_their_own(pool: DevicePool, machine: Machine) -> None:
    """In layers without a window, whose two results are merged; a window hides what is shared."""
    meta = _shared_meta()
    attend = FlashInferAttention(pool).for_step(meta)

    attend(_call(meta, 0))
    attend(_call(meta, 1, window=9))

    assert machine.ran == [PREFILL, PREFILL, "merge_state", PREFILL]


def test_plans_are_not_overwritten_before_the_device_has_them(pool: DevicePool, machine: Machine) -> None:
    """Two steps, of which nobody reads a result before both are launched."""
    machine.stream = stream = LateStream()
    steps = FlashInferSteps(Planner(pool.geometry, pool.device, fence=stream.record))
    metas = [_meta(), ForwardMeta.build([Segment(3, 9, ORDER[20:23]), Segment(1, 2, ORDER[3:4])], PAGE_SIZE, "cpu")]
    calls = [_call(meta, 0) for meta in metas]

    found = [
        steps.for_step(meta.segments, tiles_of(meta.segments, PAGE_SIZE))(
            call.query[0].transpose(0, 1), pool.k(0), pool.v(0), scaling=0.125
        )
        for meta, call in zip(metas, calls, strict=True)
    ]
    stream.synchronize()

    for meta, call, each in zip(metas, calls, found, strict=True):
        _check(each, _expected(pool, meta, call))


@pytest.mark.usefixtures("machine")
def test_two_steps_take_turns(pool: DevicePool) -> None:
    """A step in whose layers another one attends, too, is planned anew, and neither gets the other's pages."""
    metas = [_meta(), ForwardMeta.build([Segment(3, 9, ORDER[20:23]), Segment(1, 2, ORDER[3:4])], PAGE_SIZE, "cpu")]
    backend = FlashInferAttention(pool)
    steps = [backend.for_step(meta) for meta in metas]

    for layer in range(2):
        for meta, attend in zip(metas, steps, strict=True):
            call = _call(meta, layer)
            _check(attend(call), _expected(pool, meta, call))


def test_what_it_cannot_do_is_refused_with_every_reason() -> None:
    """It is not installed here, and float32 and small heads are not among what it computes."""
    geometry = KvGeometry(layers=1, kv_heads=1, head_dim=16, page_size=PAGE_SIZE, dtype="float32")
    small = DevicePool.create(geometry, 1, device="cpu", shm_prefix=shm_prefix("flashinfer"))
    try:
        with pytest.raises(ConfigError, match=r"not installed; .*not in float32; .*not of 16.*--attention triton"):
            gpu_attention(small, "flashinfer")
    finally:
        small.close()


@pytest.mark.usefixtures("machine")
def test_backends_have_names(pool: DevicePool) -> None:
    """Without a choice our kernels serve; exact mode has no other."""
    assert isinstance(gpu_attention(pool, "flashinfer"), FlashInferAttention)
    with pytest.raises(ValueError, match="--exact: its attention is ours"):
        WorkerConfig(model="m", exact=True, attention="flashinfer")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_in_takes_what_the_real_one_takes(version: str, pool: DevicePool) -> None:
    """An argument that a version does not have is refused, as is a run that nothing was planned for."""
    wrapper = flashinfer_stand_in.module(Machine(version=version)).BatchDecodeWithPagedKVCacheWrapper
    made = wrapper(torch.zeros(16, dtype=torch.uint8), "NHD")

    with pytest.raises(TypeError, match="kv_page_table"):
        wrapper(torch.zeros(16, dtype=torch.uint8), "NHD", kv_page_table=None)
    with pytest.raises(AssertionError, match="run before plan"):
        made.run(torch.zeros(1, HEADS, 64).bfloat16(), (pool.k(0), pool.v(0)))
    assert made.name == DECODE
