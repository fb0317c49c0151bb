"""Attention over the paged pool on a GPU: one Triton kernel for the whole batch, or another way that was proven."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.captured_attention import CapturedAttention
from services.worker.engine.flashinfer_attention import FlashInferAttention
from services.worker.engine.flashinfer_graphs import FlashInferGraphs
from services.worker.engine.forward_meta import ForwardMeta, paged_tensors, pages_for
from services.worker.engine.latent_attention import LatentAttention
from services.worker.engine.paged_step import AttentionBackend
from services.worker.engine.torch_attention import TorchAttention
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import latent_ranks
from services.worker.proving.parts import ATTENTION, FLASHINFER
from services.worker.proving.table import ProofTable
from shared.errors import ConfigError

KERNELS = "services.worker.kernels"
EXACT_KERNELS = "services.worker.kernels.exact"

EXPANDED_BYTES = 256 * 2**20
"""Bytes of K and V that are expanded from latents at once, if one head does not take more: with fewer heads at a time
there would be many launches.
"""


class GpuPages(Protocol):
    """K and V by layer (or part), laid out as in ``DevicePool``, on a GPU."""

    @property
    def device(self) -> torch.device:
        """The device that holds K and V, where a step's tables are sent."""

    def k(self, layer: int, /) -> torch.Tensor:
        """Return K of a layer or part, ``[pages, page_size, kv_heads, head_dim]``."""

    def v(self, layer: int, /) -> torch.Tensor:
        """Return V of a layer or part, shaped like its K."""


class GpuAttention:
    """The backend of :class:`~services.worker.engine.paged_step.PagedStep` for GPUs, by a Triton kernel."""

    def __init__(self, pool: GpuPages, kernels: str = KERNELS) -> None:
        """``kernels`` names a package that has ``paged_attention``."""
        # Imported here because it pulls in Triton, which machines without a GPU need not have.
        package = importlib.import_module(kernels)
        self._pool = pool
        self._kernel = package.paged_attention

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        """Return the attention of one step; its tables are sent to the GPU here unless ``meta`` has them."""
        tensors = meta.paged or paged_tensors(meta.segments, meta.page_size, self._pool.device)

        def attend(call: AttentionCall) -> torch.Tensor:
            output: torch.Tensor = self._kernel(
                call.query[0].transpose(0, 1),
                self._pool.k(call.layer),
                self._pool.v(call.layer),
                tensors,
                **call.scoring,
            )
            return output

        return attend


class GpuLatents:
    """Attention to the latents of ``pool`` by queries that include the expansion of keys.

    It is for absorbed rows of :class:`~services.worker.engine.latent_attention.LatentAttention`.
    """

    def __init__(self, pool: DevicePool, kernels: str = KERNELS) -> None:
        """``kernels`` names a package that has ``latent_attention``."""
        self._pool = pool
        self._kernel = importlib.import_module(kernels).latent_attention
        self._ranks = latent_ranks(pool.planes)

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        """Return the attention of one step, ``[T, heads, rank]``; its tables are sent unless ``meta`` has them."""
        tensors = meta.paged or paged_tensors(meta.segments, meta.page_size, self._pool.device)

        def attend(call: AttentionCall) -> torch.Tensor:
            output: torch.Tensor = self._kernel(
                call.query[0].transpose(0, 1),
                self._pool.k(call.layer),
                tensors,
                rank=self._ranks[call.layer],
                **call.scoring,
            )
            return output

        return attend


def gpu_attention(pool: DevicePool, way: str, kernels: str = KERNELS) -> AttentionBackend:
    """Return the backend of this name: ``triton`` over a package of kernels, ``torch`` or ``flashinfer``.

    Raises ConfigError for one that cannot serve this pool.
    """
    if way == FLASHINFER:
        if not pool.planes.is_identity:
            raise ConfigError(f"--attention flashinfer: it reads no {pool.planes.contents}; choose --attention triton")
        return FlashInferAttention(pool)
    over: Callable[[Any], AttentionBackend] = TorchAttention
    if way == "triton":
        over = partial(GpuAttention, kernels=kernels)
    if not latent_ranks(pool.planes):
        return over(pool)
    absorbed = GpuLatents(pool, kernels) if way == "triton" else TorchAttention(pool)
    return LatentAttention(pool, over(pool), over, absorbed=absorbed, expanded_bytes=EXPANDED_BYTES)


def way_of(asked: str, proofs: ProofTable) -> str:
    """Return the way by which a GPU attends, of those that passed their proof; without proofs ``auto`` is our kernels.

    Raises ConfigError where FlashInfer was asked for by name and did not pass.
    """
    passed = proofs.passed(ATTENTION)
    if passed is None:
        return "triton" if asked == "auto" else asked
    if asked == FLASHINFER and FLASHINFER not in passed:
        reason = next((each.fault for each in proofs.failed(ATTENTION) if each.way == FLASHINFER), "it was not tried")
        raise ConfigError(f"--attention flashinfer: {reason}; choose --attention auto")
    usable = passed if asked != "triton" else [way for way in passed if way != FLASHINFER]
    return next(iter(usable), "triton")


def captured_attention(backend: AttentionBackend, most_rows: int, most_tokens: int) -> CapturedAttention | None:
    """Return the attention of graphs where ordinary steps attend by ``backend``.

    Return None for the kernels of the graphs themselves. ``most_tokens`` is the longest request.
    """
    if not isinstance(backend, FlashInferAttention):
        return None
    pages = pages_for(most_tokens, backend.planner.geometry.page_size)
    return FlashInferGraphs(backend.planner, most_rows, pages)
