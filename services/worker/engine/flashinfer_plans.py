"""Plans for FlashInfer, by layer and by step, ordinary or captured; and the reasons why it cannot serve.

A kind of layer is planned on the host once a step, before its first layer computes: FlashInfer divides the step among
the GPU's processors, and copies the division to the device from pinned memory that the next plan overwrites. Written
against flashinfer-python 0.5.3 and 0.7.2.post1. It has not run on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from services.worker.engine.flashinfer_lists import PageLists
from services.worker.engine.uploads import pinned, upload
from services.worker.kv.device_pool import TORCH_DTYPES
from shared.errors import InvariantViolated
from shared.messages.pools import KvGeometry

# torch leaves these functions without types.
_cuda: Any = torch.cuda

WORKSPACE_BYTES = 256 * 2**20
"""Workspace for partial results. Steps follow one another, so all plans share it. FlashInfer's documentation recommends
half of this, which captured steps of models with two KV heads may outgrow: there every plan reserves what the largest
takes.
"""

LAYOUT = "NHD"
"""K and V of a layer are ``[pages, page_size, kv_heads, head_dim]``."""

HEAD_DIMS = (64, 128, 256)
LEAST_CAPABILITY = 8
"""Ampere, the oldest GPUs that it supports."""


class Kind(NamedTuple):
    """The properties of a layer that change its plan."""

    scaling: float
    window: int | None
    softcap: float | None


def kind_of(
    scaling: float, window: int | None, softcap: float | None, chunk: int | None, sinks: torch.Tensor | None
) -> Kind:
    """Return the kind of a layer. Raises InvariantViolated for one that :func:`unfit_layers` rules out."""
    if chunk is not None or sinks is not None:
        raise InvariantViolated("FlashInfer was chosen for a model with attention in chunks or with sinks")
    return Kind(scaling, window, softcap)


class Fence(Protocol):
    """A point in a stream's work, such as ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Return when the stream has done all work before this point."""


class Planner:
    """Planning for pools of one geometry on one device, with one workspace."""

    def __init__(
        self, geometry: KvGeometry, device: torch.device, fence: Callable[[], Fence | None] | None = None
    ) -> None:
        """``fence`` makes a point behind everything launched so far; by default on the current stream of a GPU."""
        self.flashinfer: Any = importlib.import_module("flashinfer")
        self.geometry, self.device = geometry, device
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._dtype = TORCH_DTYPES[geometry.dtype]
        self._make_fence = fence or (lambda: _recorded(device))
        self._fences: dict[Any, Fence | None] = {}

    def plan(self, wrapper: Any, lists: Sequence[torch.Tensor], kind: Kind, heads: int, **settings: Any) -> None:
        """Plan ``lists`` by one of FlashInfer's wrappers for layers of a kind.

        It does so once the device has copied the plan before. It does not wait where tokens were read in between.
        """
        before = self._fences.get(wrapper)
        if before is not None:
            before.synchronize()
        geometry = self.geometry
        wrapper.plan(
            *lists,
            heads,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.page_size,
            sm_scale=kind.scaling,
            # Keys before the row's own; ours counts that one, too.
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            **settings,
        )
        self._fences[wrapper] = self._make_fence()

    def send(self, lists: PageLists) -> SentLists:
        """Send page numbers to the device; offsets stay on the host, where FlashInfer plans with them."""
        size = self.geometry.page_size
        rows, starts, last, lengths = pinned(
            [lists.rows, lists.starts, lists.last, lists.lengths(size)], self.device
        )  # fmt: skip
        return SentLists(rows, starts, upload([lists.pages], self.device)[0], last, lengths)


class SentLists(NamedTuple):
    """The tensors of PageLists: pages on the device, the rest on the host, all int32."""

    rows: torch.Tensor
    starts: torch.Tensor
    pages: torch.Tensor
    last: torch.Tensor
    lengths: torch.Tensor


def plan_prefill(
    planner: Planner, wrapper: Any, lists: SentLists, kind: Kind, heads: int, *, is_causal: bool = True
) -> None:
    """Plan a ``BatchPrefillWithPagedKVCacheWrapper``, whose requests have any number of rows at the end of their keys.

    Without ``is_causal`` every row sees all keys of its request.
    """
    parts = lists.rows, lists.starts, lists.pages, lists.last
    # Without lengths it makes them itself, in memory that is not pinned, and waits for the device to copy them.
    planner.plan(wrapper, parts, kind, heads, causal=is_causal, seq_lens=lists.lengths)


def plan_decode(planner: Planner, wrapper: Any, lists: SentLists, kind: Kind, heads: int) -> None:
    """Plan a ``BatchDecodeWithPagedKVCacheWrapper``, whose requests have one row each."""
    planner.plan(wrapper, (lists.starts, lists.pages, lists.last), kind, heads, seq_lens=lists.lengths)


def unfit(geometry: KvGeometry, device: torch.device) -> list[str]:
    """Return why FlashInfer cannot attend over such pools; empty where it can."""
    faults = []
    if importlib.util.find_spec("flashinfer") is None:
        faults.append("the package flashinfer-python is not installed")
    if geometry.dtype == "float32":
        faults.append("it computes in bfloat16 and float16, not in float32")
    if geometry.is_rounded:
        faults.append("it knows no scales of single tokens, with which K and V are rounded")
    if geometry.head_dim not in HEAD_DIMS:
        faults.append(f"it has heads of {', '.join(map(str, HEAD_DIMS))} dimensions, not of {geometry.head_dim}")
    if device.type == "cuda" and _cuda.get_device_capability(device)[0] < LEAST_CAPABILITY:
        faults.append("it needs a GPU of compute capability 8.0 or above")
    return faults


def unfit_layers(*, has_sinks: bool, has_chunks: bool) -> list[str]:
    """Return why FlashInfer cannot attend for such layers; empty where it can."""
    faults = []
    if has_sinks:
        faults.append("the model has attention sinks, which its paged kernels do not know")
    if has_chunks:
        faults.append("the model attends in chunks, which its paged kernels do not know")
    return faults


def _recorded(device: torch.device) -> Fence | None:
    if device.type != "cuda":
        return None
    fence: Fence = _cuda.current_stream(device).record_event()
    return fence
