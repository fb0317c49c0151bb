"""Attention of ordinary steps by FlashInfer, where it is installed and asked for (``--attention flashinfer``).

Its paged prefill kernel takes steps as ours are: segments of any number of rows at the end of their keys, over K and V
pools of ``[pages, page_size, kv_heads, head_dim]`` (its layout NHD). What a step needs is planned once for each kind of
layer, when the first layer of that kind comes. Captured decode steps keep our kernels. It has not run on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.forward_meta import ForwardMeta, pages_for
from services.worker.kv.device_pool import TORCH_DTYPES, DevicePool
from shared.errors import ConfigError

WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer's documentation recommends for partial results; steps follow one another, so all plans share it."""

HEAD_DIMS = (64, 128, 256)
LEAST_CAPABILITY = 8
"""Ampere, the oldest GPUs that it supports."""

_Kind = tuple[float, int | None, float | None]
"""Scaling, window and soft cap of a layer."""


class FlashInferAttention:
    """A backend of :class:`~services.worker.engine.paged_step.PagedStep`."""

    def __init__(self, pool: DevicePool) -> None:
        """Raises ConfigError, with every reason, where FlashInfer cannot attend over ``pool``."""
        faults = unfit(pool)
        if faults:
            raise ConfigError(f"--attention flashinfer: {'; '.join(faults)}; choose --attention triton")
        self._flashinfer: Any = importlib.import_module("flashinfer")
        self._pool = pool
        self._dtype = TORCH_DTYPES[pool.geometry.dtype]
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._wrappers: dict[_Kind, Any] = {}

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        planned: dict[_Kind, Any] = {}

        def attend(call: AttentionCall) -> torch.Tensor:
            kind = call.scaling, call.window, call.softcap
            if kind not in planned:
                planned[kind] = self._plan(meta, kind, call.query.shape[1])
            pools = self._pool.k(call.layer), self._pool.v(call.layer)
            output: torch.Tensor = planned[kind].run(call.query[0].transpose(0, 1).contiguous(), pools)
            return output

        return attend

    def _plan(self, meta: ForwardMeta, kind: _Kind, heads: int) -> Any:
        """The wrapper for layers of this kind, ready for this step."""
        if kind not in self._wrappers:
            self._wrappers[kind] = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        scaling, window, softcap = kind
        geometry, wrapper = self._pool.geometry, self._wrappers[kind]
        size, segments = geometry.page_size, meta.segments
        counts = [pages_for(segment.length, size) for segment in segments]
        pages = np.concatenate([segment.pages[:count] for segment, count in zip(segments, counts, strict=True)])
        # Offsets stay on the processor, where they are planned with: taking them back would wait for the device.
        wrapper.plan(
            _offsets([segment.rows for segment in segments]),
            _offsets(counts),
            torch.from_numpy(pages.astype(np.int32)).to(self._pool.device),
            torch.tensor([(segment.length - 1) % size + 1 for segment in segments], dtype=torch.int32),
            num_qo_heads=heads,
            num_kv_heads=geometry.kv_heads,
            head_dim_qk=geometry.head_dim,
            page_size=size,
            causal=True,
            sm_scale=scaling,
            # Keys before the row's own; ours counts that one, too.
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=softcap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return wrapper


def unfit(pool: DevicePool) -> list[str]:
    """Why FlashInfer cannot attend over this pool; empty where it can."""
    geometry, faults = pool.geometry, []
    if importlib.util.find_spec("flashinfer") is None:
        faults.append("the package flashinfer-python is not installed")
    if geometry.dtype == "float32":
        faults.append("it computes in bfloat16 and float16, not in float32")
    if geometry.head_dim not in HEAD_DIMS:
        faults.append(f"it has heads of {', '.join(map(str, HEAD_DIMS))} dimensions, not of {geometry.head_dim}")
    if pool.device.type == "cuda" and torch.cuda.get_device_capability(pool.device)[0] < LEAST_CAPABILITY:
        faults.append("it needs a GPU of compute capability 8.0 or above")
    return faults


def _offsets(counts: list[int]) -> torch.Tensor:
    """Where each of several parts begins, and the end: int32 [n + 1], on the processor."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
