"""Whole models with operators and attention of exact mode, on CPU tensors; run in the interpreter's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from services.worker.engine import exactness
from services.worker.engine.exactness import ObservedOperators, Trial, replaced_operators
from services.worker.engine.forward_meta import ForwardMeta, paged_tensors
from services.worker.engine.gpu_attention import EXACT_KERNELS, KERNELS, GpuAttention
from services.worker.engine.model_loading import expected_windows, load_config, load_model, max_context_tokens
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.paged_step import PagedStep
from services.worker.engine.probe import find_planes
from services.worker.kv.device_pool import DevicePool
from shared.errors import OperatorError

PAGES, PAGE_SIZE, SPLIT_KEYS, LOOKED_AT = 10, 16, 64, 3
"""Room for prompts of 80 tokens, which have two splits of keys."""

Forward = Callable[[torch.Tensor, torch.Tensor, ForwardMeta, torch.Tensor], torch.Tensor]


def try_model(folder: str, dtype: str, shm_prefix: str, mutant: str = "") -> str:
    """Why the model is refused; "" where it is exact."""
    from services.worker.kernels.exact import attention
    from services.worker.kernels.exact.aten import REPLACED

    attention.SPLIT_KEYS, exactness._LOOKED_AT = SPLIT_KEYS, LOOKED_AT
    with _forwards(folder, dtype, shm_prefix, KERNELS if mutant == "default attention" else EXACT_KERNELS) as made:
        forward, runner = made
        # Keeping the operators keeps them replaced.
        operators = None if mutant == "torch's operators" else replaced_operators("CPU")
        try:
            trial = Trial(forward, runner.pool, runner.vocab_size, runner.max_context)
            if operators is not None:
                trial.observe(REPLACED)
            trial.run()
        except OperatorError as error:
            return error.message
        finally:
            del operators
    return ""


def unknown_operators(folder: str, dtype: str, shm_prefix: str) -> list[str]:
    """Operators of which nothing is known where none is replaced."""
    with _forwards(folder, dtype, shm_prefix, EXACT_KERNELS) as (forward, runner):
        trial = Trial(forward, runner.pool, runner.vocab_size, runner.max_context)
        observed = ObservedOperators([])
        with observed:
            trial._step((0, 0, 4))
    return sorted(observed.unknown)


@contextmanager
def _forwards(folder: str, dtype: str, shm_prefix: str, kernels: str) -> Iterator[tuple[Forward, ModelRunner]]:
    """A model as a GPU computes it, over a pool of CPU memory."""
    config: Any = load_config(Path(folder))
    model = load_model(Path(folder), config, dtype=dtype, device="cpu")
    geometry = find_planes(model, expected_windows(config), PAGE_SIZE, max_context_tokens(config)).geometry
    pool = DevicePool.create(geometry, PAGES, device="cpu", shm_prefix=shm_prefix)
    runner = ModelRunner(model, pool, vocab_size=config.vocab_size)
    backend = GpuAttention(pool, kernels)

    @torch.inference_mode()
    def forward(ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, rows: torch.Tensor) -> torch.Tensor:
        given = replace(meta, paged=paged_tensors(meta.segments, PAGE_SIZE, torch.device("cpu")))
        return runner.run(ids, positions, PagedStep(given, pool, backend), rows)

    try:
        yield forward, runner
    finally:
        runner.close()
