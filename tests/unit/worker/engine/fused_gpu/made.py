"""Runners whose steps the GPU's forward computes, over CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.forward_meta import ForwardMeta, paged_tensors
from services.worker.engine.fused.family import describe
from services.worker.engine.fused_gpu.forward import GpuForward, StepKernels
from services.worker.engine.fused_gpu.weights import GpuModel
from services.worker.engine.model_loading import expected_windows, load_config, load_model, max_context_tokens
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.probe import find_planes
from services.worker.kv.device_pool import DevicePool
from tests.run_name import shm_prefix
from tests.unit.worker.kernels import oracles

PAGE_SIZE = 16


@contextmanager
def runner_of(directory: Path, kernels: StepKernels | None, dtype: str, *, tokens: int = 1024) -> Iterator[ModelRunner]:
    """A runner of a checkpoint, portable without ``kernels``."""
    config = load_config(directory)
    model = load_model(directory, config, dtype=dtype, device="cpu")
    windows, context = expected_windows(config), max_context_tokens(config)
    geometry = find_planes(model, windows, PAGE_SIZE, context).geometry
    merged = None if kernels is None else GpuModel(describe(model, windows, multiple=2), context)
    pool = DevicePool.create(geometry, tokens // PAGE_SIZE, device="cpu", shm_prefix=shm_prefix("engine"))
    fused = None if merged is None or kernels is None else GpuForward(merged, kernels, pool)
    runner = ModelRunner(model, pool, vocab_size=model.config.vocab_size, fused=fused)
    try:
        yield runner
    finally:
        runner.close()


class KernelAttention:
    """Attention by ``services.worker.kernels`` over a pool of CPU tensors, for the interpreter. In bfloat16, of which
    the interpreter makes no products, by their oracle.
    """

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        from services.worker.kernels import paged_attention

        tensors = paged_tensors(meta.segments, meta.page_size, torch.device("cpu"))
        compute = oracles.paged_attention if self._pool.tensor.dtype == torch.bfloat16 else paged_attention

        def attend(call: AttentionCall) -> torch.Tensor:
            attended = compute(
                call.query[0].transpose(0, 1), self._pool.k(call.layer), self._pool.v(call.layer), tensors,
                scaling=call.scaling, window=call.window,
            )  # fmt: skip
            return attended.to(call.query.dtype)

        return attend
