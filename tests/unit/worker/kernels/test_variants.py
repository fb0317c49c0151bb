"""No kernel is compiled while requests wait: every variant that a step can ask for was asked for by the warm-up.

Triton compiles a kernel anew for each combination of compile-time arguments, and of what it notices in the others: that
a number is one or a multiple of 16, or an address aligned. Its own binder says which variant a launch is; nothing is
launched here.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.worker import kernels
from services.worker.engine.attention import AttentionCall
from services.worker.engine.forward_meta import ForwardMeta, Segment, paged_tensors
from services.worker.engine.fused.family import describe
from services.worker.engine.fused_gpu.forward import GpuForward
from services.worker.engine.fused_gpu.weights import GpuModel
from services.worker.engine.model_runner import warm_up
from services.worker.kernels import paged_attention
from services.worker.kernels.decode import decode_join_kernel, decode_shared_kernel, decode_split_kernel
from services.worker.kernels.extend import extend_kernel
from services.worker.kernels.rms_norm import add_rms_norm_kernel
from services.worker.kernels.rope_write import rope_write_kernel
from services.worker.kernels.silu_mul import silu_mul_kernel
from tests.unit.worker.kernels.launches import note_variants

KERNELS = (
    *(decode_join_kernel, decode_shared_kernel, decode_split_kernel, extend_kernel),
    *(add_rms_norm_kernel, rope_write_kernel, silu_mul_kernel),
)
PAGE_SIZE, KV_HEADS, HEADS, HEAD_DIM = 16, 2, 8, 64
LONGEST = 40_000


class Variants:
    """A runner whose attention notes which variants are launched. ``windows`` are those of its layers."""

    def __init__(self, windows: list[int | None], max_context: int) -> None:
        self.max_context = max_context
        self.seen: set[tuple[str, str]] = set()
        self._windows = windows
        self._kv = torch.empty(0).new_empty((4, PAGE_SIZE, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16)
        host: Any = SimpleNamespace(device=torch.device("cpu"), k=lambda layer: self._kv, v=lambda layer: self._kv)
        self._fused = GpuForward(_model(tuple(windows)), kernels, host)
        self.pool: Any = SimpleNamespace(
            device=torch.device("cuda"), pages=LONGEST // PAGE_SIZE, geometry=SimpleNamespace(page_size=PAGE_SIZE)
        )

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor) -> Any:
        # As rotary embeddings leave it: [1, heads, T, head_dim].
        query = torch.empty((1, HEADS, meta.rows, HEAD_DIM), dtype=torch.bfloat16)[0].transpose(0, 1)
        paged = paged_tensors(meta.segments, PAGE_SIZE, torch.device("cpu"))
        for window in self._windows:
            paged_attention(query, self._kv, self._kv, paged, scaling=0.125, window=window)
        self._fused.paged(ids, positions, meta, self, last_rows)

    def for_step(self, meta: ForwardMeta) -> Any:
        paged = paged_tensors(meta.segments, PAGE_SIZE, torch.device("cpu"))

        def attend(call: AttentionCall) -> torch.Tensor:
            query = call.query[0].transpose(0, 1)
            return paged_attention(query, self._kv, self._kv, paged, scaling=call.scaling, window=call.window)

        return attend

    def step(self, *segments: tuple[int, int]) -> None:
        """A step of segments of (rows, context)."""
        table = np.arange(LONGEST // PAGE_SIZE + 1, dtype=np.int32)
        given = [Segment(rows, context, table) for rows, context in segments]
        meta = ForwardMeta.build(given, PAGE_SIZE, "cpu")
        ids = torch.zeros(meta.rows + 1, dtype=torch.int64)[1:]  # Not where memory begins, as a part of a batch is.
        positions = torch.cat([torch.zeros(1), *(torch.arange(at, at + rows) for rows, at in segments)]).long()[1:]
        self.forward(ids, positions, meta, torch.tensor([meta.rows - 1]))


@cache
def _model(windows: tuple[int | None, ...]) -> GpuModel:
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=len(windows), num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    return GpuModel(describe(model, windows), LONGEST)


@pytest.fixture(autouse=True)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Variants:
    made = Variants(*getattr(request, "param", ([None], LONGEST)))
    build = ForwardMeta.build
    # The tables of the warm-up are put where they are read here.
    monkeypatch.setattr(ForwardMeta, "build", lambda segments, size, _: build(segments, size, "cpu"))
    note_variants(monkeypatch, KERNELS, lambda *variant: made.seen.add(variant))
    return made


@pytest.mark.parametrize(
    "runner",
    [([None], LONGEST), ([None, 4096], LONGEST), ([128], LONGEST), ([None], 300)],
    ids=["full", "mixed windows", "short window", "short context"],
    indirect=True,
)
def test_steps_of_all_shapes_ask_for_nothing_new(runner: Variants) -> None:
    """Prompts and decodes of every length, alone and together: page tables of any width, splits of any number."""
    warm_up(runner)
    warmed = set(runner.seen)
    lengths = [length for length in (*range(1, 10), *range(15, 19), 31, 32, 33, 256, 511, 512, 513, 8191, 8192, 39_000)
               if length < runner.max_context]  # fmt: skip

    for length in lengths:
        runner.step((1, length - 1))
        runner.step((length, 0))
        runner.step((1, length - 1), (1, 0), (1, length // 2))
        runner.step((min(length, 100), 0), (1, length - 1))
        runner.step((2, length // 2), (3, 0), (1, length - 1))

    assert warmed
    assert runner.seen - warmed == set()


def test_the_number_of_variants_is_that_of_the_kernels(runner: Variants) -> None:
    """Two of the decode kernel, whose results are joined or are not, and of norms, which add before or do not; one of
    each other.
    """
    warm_up(runner)

    assert sorted(name for name, _ in runner.seen) == [
        "add_rms_norm_kernel", "add_rms_norm_kernel",
        "decode_join_kernel", "decode_shared_kernel", "decode_split_kernel", "decode_split_kernel", "extend_kernel",
        "rope_write_kernel", "silu_mul_kernel",
    ]  # fmt: skip
