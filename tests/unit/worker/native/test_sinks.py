"""Sinks and chunks in the compiled kernels, against softmax attention in double precision."""

from __future__ import annotations

import shutil

import pytest
import torch

from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.native_work import find_decode_work, find_extend_work
from services.worker.native.decode import compile_decode
from services.worker.native.extend import compile_extend
from shared.messages.pools import KvGeometry
from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.paged_batches import Shape, make_batch
from tests.unit.worker.native.pages import segments_of

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

MIXED = ((1, 0), (5, 0), (1, 299), (40, 30), (1, 700), (70, 255))
SINKS = (-30.0, 0.0, 4.0, 90.0)
"""Next to nothing, as much as a key, more than most, and all there is of a row."""


def _attend(shape: Shape, chunk: int | None, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What both kernels write together, and what they must."""
    batch = make_batch(shape)
    group = shape.heads // shape.kv_heads
    meta = ForwardMeta.build(segments_of(batch), shape.page_size, "cpu")
    geometry = KvGeometry(
        layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, page_size=shape.page_size,
        dtype=str(shape.dtype).removeprefix("torch."),
    )  # fmt: skip
    decode, extend = compile_decode(geometry, shape.heads), compile_extend(shape.head_dim, group, shape.dtype)
    short = find_decode_work(meta, None, chunk)
    long = find_extend_work(meta, None, group, shape.kv_heads, chunk)
    assert decode is not None
    assert extend is not None
    assert short is not None
    assert long is not None
    output = torch.empty_like(batch.q, memory_format=torch.contiguous_format)
    query, scaling = batch.q.transpose(0, 1), shape.head_dim**-0.5
    decode.attend(short, query, batch.k_pool, batch.v_pool, output, scaling, sinks)
    extend.attend(long, query, batch.k_pool, batch.v_pool, output, scaling, sinks)
    expected = oracles.paged_attention(
        batch.q, batch.k_pool, batch.v_pool, batch.paged, scaling=scaling, chunk=chunk, sinks=sinks
    )
    return output, expected


@pytest.mark.parametrize("chunk", [None, 1, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_take_their_part_of_every_row(dtype: torch.dtype, chunk: int | None) -> None:
    """Of single rows and of prompts, in chunks and without, whether a sink is small, large or all there is."""
    shape = Shape(MIXED, heads=4, kv_heads=2, head_dim=20, page_size=16, dtype=dtype)

    found, expected = _attend(shape, chunk, torch.tensor(SINKS).to(dtype))

    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    assert found[:, 3].abs().max() < 1e-30


@pytest.mark.parametrize("chunk", [1, 24, 300])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_sees_its_own_chunk(page_size: int, chunk: int) -> None:
    """Chunks shorter and longer than a block of keys, a page and a prompt."""
    shape = Shape(MIXED, heads=6, kv_heads=2, head_dim=32, page_size=page_size)

    found, expected = _attend(shape, chunk, None)

    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_a_sink_that_is_nothing_changes_no_bit() -> None:
    """Without sinks the kernels compute what they did: a sink of no weight gives the same bits."""
    shape = Shape(MIXED, heads=6, kv_heads=2, head_dim=32)

    without, _ = _attend(shape, None, None)
    nothing, _ = _attend(shape, None, torch.full((6,), -1e30))

    assert torch.equal(without, nothing)
