"""Attention of ordinary steps by FlashInfer: its paged prefill kernels, and its merging where requests share pages.

They take steps in the form of ours: segments of any number of rows at the end of their keys, over K and V pools of
``[pages, page_size, kv_heads, head_dim]``. Which of its kernels compute is FlashInfer's own choice (``backend="auto"``:
those of FlashAttention-3 on Hopper). What a step needs is planned once for each kind of layer, when the first layer of
that kind comes. Captured steps are :mod:`~services.worker.engine.flashinfer_graphs`'s. It has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from services.worker.engine.captured_attention import PagedAttend
from services.worker.engine.flashinfer_lists import cascade, step_lists
from services.worker.engine.flashinfer_plans import LAYOUT, Kind, Planner, SentLists, kind_of, plan_prefill, unfit
from services.worker.engine.forward_meta import ForwardMeta, Segment, host_tiles
from services.worker.engine.shared_prefixes import SharedTiles
from services.worker.engine.uploads import upload
from shared.errors import ConfigError

if TYPE_CHECKING:  # It pulls in Transformers, which proofs of this module do not wait for.
    from services.worker.engine.attention import AttentionCall
    from services.worker.kv.device_pool import DevicePool


class FlashInferAttention:
    """The backend of :class:`~services.worker.engine.paged_step.PagedStep` by FlashInfer."""

    def __init__(self, pool: DevicePool) -> None:
        """Attend over ``pool``. Raises ConfigError, with every reason, where FlashInfer cannot."""
        faults = unfit(pool.geometry, pool.device)
        if faults:
            raise ConfigError(f"--attention flashinfer: {'; '.join(faults)}; choose --attention triton")
        self._pool = pool
        self._steps = FlashInferSteps(Planner(pool.geometry, pool.device))

    @property
    def planner(self) -> Planner:
        """The planner of ordinary steps, which captured steps use too because its workspace serves both."""
        return self._steps.planner

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        """Return the attention of one step, which plans each kind of layer at the first layer of it."""
        attend = self._steps.for_step(meta.segments, host_tiles(meta))

        def attend_call(call: AttentionCall) -> torch.Tensor:
            return attend(
                call.query[0].transpose(0, 1),
                self._pool.k(call.layer),
                self._pool.v(call.layer),
                **call.scoring,
            )

        return attend_call


class FlashInferSteps:
    """Ordinary steps over pools of one geometry. Layers of two steps may take turns; each turn is then planned."""

    def __init__(self, planner: Planner) -> None:
        """Plan by ``planner``, whose workspace captured steps may share."""
        self.planner = planner
        self._whole: dict[Kind, Any] = {}  # Wrappers of whole steps, or of requests' own keys,
        self._shared: dict[Kind, Any] = {}  # and of keys that tiles share.
        self._planned: dict[Kind, _Step] = {}

    def for_step(self, segments: Sequence[Segment], tiles: SharedTiles | None) -> PagedAttend:
        """Return the attention of one step.

        ``tiles`` are keys that its single rows share, see ``forward_meta.tiles_of``.
        """
        step = _Step(self.planner, segments, tiles)

        @torch.inference_mode()  # Wrappers have tensors of their own, which are made and changed in one mode.
        def attend(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            /,
            *,
            scaling: float,
            window: int | None = None,
            softcap: float | None = None,
            chunk: int | None = None,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            kind = kind_of(scaling, window, softcap, chunk, sinks)
            # A window hides what is shared.
            is_cut = tiles is not None and window is None and len(step.members) > 0
            if self._planned.get(kind) is not step:
                self._plan(step, kind, q.shape[1], is_cut=is_cut)
            query = q.contiguous()
            if is_cut:
                return self._merged(kind, step.members, query, (k, v))
            output: torch.Tensor = self._whole[kind].run(query, (k, v))
            return output

        return attend

    def _plan(self, step: _Step, kind: Kind, heads: int, *, is_cut: bool) -> None:
        make, workspace = self.planner.flashinfer.BatchPrefillWithPagedKVCacheWrapper, self.planner.workspace
        if kind not in self._whole:
            self._whole[kind] = make(workspace, LAYOUT)
        plan_prefill(self.planner, self._whole[kind], step.own if is_cut else step.whole, kind, heads)
        if is_cut:
            if kind not in self._shared:
                # Few rows over many keys, for which FlashAttention-3's kernels are not made.
                self._shared[kind] = make(workspace, LAYOUT, backend="fa2")
            plan_prefill(self.planner, self._shared[kind], step.shared, kind, heads, is_causal=False)
        self._planned[kind] = step

    def _merged(
        self, kind: Kind, members: torch.Tensor, query: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return the attention of all rows. Rows that share keys have two partial results, which are merged."""
        output: torch.Tensor
        output, sums = self._whole[kind].run(query, pools, return_lse=True)
        shared, shared_sums = self._shared[kind].run(query.index_select(0, members), pools, return_lse=True)
        merged, _ = self.planner.flashinfer.merge_state(output[members], sums[members], shared, shared_sums)
        return output.index_copy_(0, members, merged)


class _Step:
    """A step's page lists, each sent to the device when the first kind of layer needs it."""

    def __init__(self, planner: Planner, segments: Sequence[Segment], tiles: SharedTiles | None) -> None:
        self.planner, self._segments, self._tiles = planner, segments, tiles

    @cached_property
    def whole(self) -> SentLists:
        return self.planner.send(step_lists(self._segments, self.planner.geometry.page_size))

    @cached_property
    def _cut(self) -> tuple[SentLists, SentLists, torch.Tensor]:
        assert self._tiles is not None
        parts = cascade(self._segments, self._tiles, self.planner.geometry.page_size)
        members = upload([parts.order], self.planner.device)[0]
        return self.planner.send(parts.own), self.planner.send(parts.shared), members

    @property
    def own(self) -> SentLists:
        return self._cut[0]

    @property
    def shared(self) -> SentLists:
        return self._cut[1]

    @property
    def members(self) -> torch.Tensor:
        """Rows of the step that share keys, tile by tile, int64 on the device."""
        return self._cut[2]
