"""Attention over the paged pool on a GPU: one Triton kernel for the whole batch, or what was proven in its place."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.flashinfer_attention import FlashInferAttention
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.paged_step import AttentionBackend
from services.worker.engine.torch_attention import TorchAttention
from services.worker.kv.device_pool import DevicePool
from shared.errors import InvariantViolated

KERNELS = "services.worker.kernels"
EXACT_KERNELS = "services.worker.kernels.exact"


class GpuAttention:
    """A backend of :class:`~services.worker.engine.paged_step.PagedStep`."""

    def __init__(self, pool: DevicePool, kernels: str = KERNELS) -> None:
        """``kernels`` names a package that has ``paged_attention``."""
        # Imported here because it pulls in Triton, which machines without a GPU need not have.
        package = importlib.import_module(kernels)
        self._pool = pool
        self._kernel = package.paged_attention

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        tensors = meta.paged
        if tensors is None:
            raise InvariantViolated("the step was built for a CPU")

        def attend(call: AttentionCall) -> torch.Tensor:
            output: torch.Tensor = self._kernel(
                call.query[0].transpose(0, 1),
                self._pool.k(call.layer),
                self._pool.v(call.layer),
                tensors,
                scaling=call.scaling,
                window=call.window,
                softcap=call.softcap,
            )
            return output

        return attend


def gpu_attention(pool: DevicePool, way: str, kernels: str = KERNELS) -> AttentionBackend:
    """The backend of this name: ``triton`` over a package of kernels, ``torch`` or ``flashinfer``.

    Raises ConfigError for one that cannot serve this pool.
    """
    if way == "triton":
        return GpuAttention(pool, kernels)
    return TorchAttention(pool) if way == "torch" else FlashInferAttention(pool)
