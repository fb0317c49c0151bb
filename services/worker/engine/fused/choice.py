"""Whether a model is computed by the fused forward, and why not if it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from services.worker.engine.fused.family import NotOfTheFamily, describe
from services.worker.engine.fused.forward import FusedForward
from services.worker.engine.fused.model import FusedModel
from services.worker.kv.device_pool import DevicePool
from services.worker.native.fused import FusedKernels, KernelsUnavailable
from shared.errors import ConfigError
from shared.logs import get_logger

ForwardPath = Literal["auto", "fused", "portable"]
"""``fused``: by the fused forward. ``portable``: by Hugging Face's modules. ``auto``: fused where that can be done and
the processor is of a kind on which it was measured to be faster.
"""


def fuse(model: Any, windows: Sequence[int | None], pool: DevicePool, path: ForwardPath) -> FusedForward | None:
    """The fused forward of ``model``, whose weights it takes over; None, with a line in the log, where the portable
    path computes it.

    Raises ConfigError, with the reason, when ``path`` asks for what cannot be had.
    """
    if path == "portable":
        return None
    try:
        if pool.device.type != "cpu":
            raise KernelsUnavailable(f"fused kernels are for CPUs, not {pool.device.type}")
        family = describe(model, windows)
        kernels = FusedKernels(family.dtype)
        if path == "auto" and not kernels.are_tuned:
            raise KernelsUnavailable("fused kernels were not measured on processors with these instructions")
    except (NotOfTheFamily, KernelsUnavailable) as error:
        if path == "fused":
            raise ConfigError(f"--forward fused: {error}") from error
        get_logger("worker.engine").info("forward_is_portable", reason=str(error))
        return None
    get_logger("worker.engine").info("forward_is_fused", model=type(model).__name__, dtype=str(family.dtype))
    return FusedForward(FusedModel(model, family, kernels), kernels, pool)
