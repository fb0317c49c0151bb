"""Attention over the paged pool on a GPU: one Triton kernel for the whole batch, or what was proven in its place."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.paged_step import AttentionBackend
from services.worker.engine.torch_attention import TorchAttention
from services.worker.kv.device_pool import DevicePool
from shared.errors import InvariantViolated


class GpuAttention:
    """A backend of :class:`~services.worker.engine.paged_step.PagedStep`."""

    def __init__(self, pool: DevicePool) -> None:
        # Imported here because it pulls in Triton, which machines without a GPU need not have.
        kernels = importlib.import_module("services.worker.kernels")
        self._pool = pool
        self._kernel = kernels.paged_attention

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


def gpu_attention(pool: DevicePool, way: str) -> AttentionBackend:
    """The backend of this name among the ways of ``services.worker.proving.parts.ATTENTION``."""
    backends: dict[str, Callable[[DevicePool], AttentionBackend]] = {"triton": GpuAttention, "torch": TorchAttention}
    return backends[way](pool)
