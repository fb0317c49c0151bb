"""Whether a model is computed by a fused forward, and why not if it is not."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from services.worker.engine.attention import AttentionStep
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.fused.family import NotOfTheFamily, describe
from services.worker.engine.fused.forward import FusedForward
from services.worker.engine.fused.model import FusedModel
from services.worker.engine.fused_gpu.forward import GpuForward
from services.worker.engine.fused_gpu.weights import GpuModel
from services.worker.engine.paged_step import AttentionBackend
from services.worker.engine.quantised.codes import codes_of
from services.worker.kv.device_pool import DevicePool
from services.worker.native.fused import FusedKernels, KernelsUnavailable
from shared.errors import ConfigError
from shared.logs import get_logger

ForwardPath = Literal["auto", "fused", "portable"]
"""``fused``: by a fused forward. ``portable``: by Hugging Face's modules. ``auto``: fused where that can be done and,
on a CPU, the processor is of a kind on which it was measured to be faster.
"""

_log = get_logger("worker.engine")


class StepForward(Protocol):
    """A forward that computes steps in place of a model's own modules; see ``ModelRunner``."""

    def paged(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: ForwardMeta,
        attention: AttentionBackend,
        last_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step over the pool of ``attention``; return the logits of ``last_rows``, float32 [R, vocab]."""

    def stepped(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a step with the attention of ``step``; return the logits of ``last_rows``, float32 [R, vocab]."""


def merge(model: Any, windows: Sequence[int | None], context: int, path: ForwardPath) -> GpuModel | None:
    """Merge the weights of a ``model`` on a GPU, and make its own modules views of them.

    Return None where it is on a CPU or, with a line in the log, where the portable path computes. ``context`` is the
    longest that is served.

    Called before memory of the device is given to anything else. Raises ConfigError, with the reason, when ``path``
    asks for what cannot be had.
    """
    if path == "portable" or model.device.type != "cuda":
        return None
    try:
        family = describe(model, windows, multiple=2)
    except NotOfTheFamily as error:
        _refuse(error, path)
        return None
    return GpuModel(family, context)


def fuse(
    model: Any, windows: Sequence[int | None], pool: DevicePool, path: ForwardPath, merged: GpuModel | None = None
) -> StepForward | None:
    """Return the fused forward of ``model``; None, with a line in the log, where the portable path computes.

    On a CPU it takes the weights over, on a GPU it computes with ``merged``. Raises ConfigError, with the reason, when
    ``path`` asks for what cannot be had.
    """
    if merged is not None:
        _log.info("forward_is_fused", model=type(model).__name__, dtype=str(merged.dtype))
        # Imported here because it pulls in Triton, which machines without a GPU need not have.
        kernels: Any = importlib.import_module("services.worker.kernels")
        return GpuForward(merged, kernels, pool)
    if path == "portable" or pool.device.type != "cpu":
        return None
    try:
        family = describe(model, windows)
        has_codes = any(codes_of(module) is not None for module in model.modules())
        kernels = FusedKernels(family.dtype, has_codes=has_codes, is_rounded=pool.geometry.is_rounded)
        if path == "auto" and not kernels.are_tuned:
            raise KernelsUnavailable("fused kernels were not measured on processors with these instructions")
    except (NotOfTheFamily, KernelsUnavailable) as error:
        _refuse(error, path)
        return None
    fused = FusedModel(model, family, kernels)
    element_bytes = fused.weight_numbers * family.dtype.itemsize
    _log.info(
        "forward_is_fused",
        model=type(model).__name__,
        dtype=str(family.dtype),
        element_bytes=element_bytes,
        code_bytes=fused.code_bytes,
    )
    return FusedForward(fused, kernels, pool)


def _refuse(error: Exception, path: ForwardPath) -> None:
    if path == "fused":
        raise ConfigError(f"--forward fused: {error}") from error
    _log.info("forward_is_portable", reason=str(error))
