"""Attention of captured decode steps by FlashInfer: its decode wrapper in CUDA graph mode, planned before each replay.

A wrapper is made for a number of rows and a kind of layer. Its offsets, page numbers and last pages stay where they
were, and a plan divides the work otherwise within one launch, so a graph serves steps of any length. Requests that
share a document have graphs of their own, where layers without a window attend in two launches whose results are
merged. Nothing in a captured step plans, and nothing reads the device. It has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from services.worker.engine.captured_attention import PagedAttend
from services.worker.engine.decode_shapes import DecodeShape, row_counts
from services.worker.engine.flashinfer_lists import Cascade, cascade, step_lists
from services.worker.engine.flashinfer_plans import (
    LAYOUT,
    Kind,
    Planner,
    SentLists,
    kind_of,
    plan_decode,
    plan_prefill,
)
from services.worker.engine.forward_meta import Segment
from services.worker.engine.key_splits import SPLIT_KEYS
from services.worker.engine.shared_prefixes import MEMBERS, SharedTiles, most_tiles
from services.worker.engine.uploads import upload
from shared.errors import InvariantViolated

# torch leaves these functions without types.
_cuda: Any = torch.cuda

PLAN_BYTES = 2**20
"""Device memory, and as much that is pinned, for one plan: some integers for each program and row. FlashInfer takes 8
MiB, and would need one for each number of rows and kind of layer.
"""


class FlashInferGraphs:
    """A :class:`~services.worker.engine.captured_attention.CapturedAttention` by FlashInfer."""

    def __init__(self, planner: Planner, most_rows: int, most_pages: int) -> None:
        """Serve steps of up to ``most_rows`` requests of up to ``most_pages`` pages each."""
        self._planner = planner
        tiles = most_tiles(most_rows)
        self._whole = _Lists(most_rows, most_rows * most_pages, planner.device)
        self._own = _Lists(most_rows, most_rows * most_pages, planner.device)
        self._shared = _Lists(tiles + 1, tiles * (most_pages + 1) + 1, planner.device)
        self._order, self._inverse = (torch.zeros(most_rows, dtype=torch.int64, device=planner.device) for _ in "12")
        self._is_member = torch.zeros(most_rows, dtype=torch.uint8, device=planner.device)
        self._plain: dict[tuple[int, Kind], _Planned] = {}
        self._cut: dict[tuple[int, Kind], tuple[_Planned, _Planned]] = {}

    def shapes(self, most_rows: int, longest: int) -> list[DecodeShape]:
        """Return one shape for each number of rows, and one more where rows may share more than a split of keys."""
        shapes = []
        for rows in reversed(row_counts(most_rows)):
            if rows > 1 and longest > SPLIT_KEYS:
                shapes.append(DecodeShape(rows, longest, shares=True))
            shapes.append(DecodeShape(rows, longest))
        return shapes

    def of_shape(self, shape: DecodeShape) -> PagedAttend:
        """Return the function that a graph of this shape calls in each layer.

        It raises InvariantViolated where its first call for a kind of layer is captured.
        """

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
            self._see(shape, kind, q.shape[1])
            if not _is_cut(shape, kind):
                output: torch.Tensor = self._plain[shape.rows, kind].wrapper.run(q.contiguous(), (k, v))
                return output
            own, shared = self._cut[shape.rows, kind]
            return self._merged(own.wrapper, shared.wrapper, q.contiguous(), (k, v))

        return attend

    @torch.inference_mode()
    def plan(self, segments: Sequence[Segment], tiles: SharedTiles | None, shape: DecodeShape) -> None:
        """Plan the next replay. Raises InvariantViolated where the shape does not fit the step."""
        if not shape.fits(len(segments), max((each.length for each in segments), default=0)):
            raise InvariantViolated(f"a graph of {shape.rows} rows cannot compute {len(segments)} requests")
        self._plan_kinds(shape, segments, tiles, None)

    def _plan_kinds(
        self, shape: DecodeShape, segments: Sequence[Segment], tiles: SharedTiles | None, only: Kind | None
    ) -> None:
        """Plan all wrappers of this shape, or those of one kind of layer."""
        rows, size = shape.rows, self._planner.geometry.page_size
        plain = [
            each
            for (count, kind), each in self._plain.items()
            if count == rows and only in (None, kind) and not _is_cut(shape, kind)
        ]
        if plain:
            sent = self._planner.send(step_lists(segments, size, padded=rows))
            for each in plain:
                plan_decode(self._planner, each.wrapper, sent, each.kind, each.heads)
        cut = [each for (count, kind), each in self._cut.items() if count == rows and only in (None, kind)]
        if shape.shares and cut:
            own, shared = self._send(cascade(
                segments, tiles or _NO_TILES, size, padded=rows, most_tiles=most_tiles(rows)
            ))  # fmt: skip
            for one, other in cut:
                plan_decode(self._planner, one.wrapper, own, one.kind, one.heads)
                plan_prefill(self._planner, other.wrapper, shared, other.kind, other.heads, is_causal=False)

    def _send(self, parts: Cascade) -> tuple[SentLists, SentLists]:
        """Send both parts, and write the rows' order by tiles and its inverse into the memory that graphs read."""
        rows = len(parts.order)
        inverse = np.empty_like(parts.order)
        inverse[parts.order] = np.arange(rows)
        is_member = np.zeros(rows, dtype=np.uint8)
        is_member[parts.order[: parts.shared.rows[-2]]] = 1
        sent = upload([parts.order, inverse, is_member], self._planner.device)
        for kept, new in zip((self._order, self._inverse, self._is_member), sent, strict=True):
            kept[:rows].copy_(new)
        return self._planner.send(parts.own), self._planner.send(parts.shared)

    def _see(self, shape: DecodeShape, kind: Kind, heads: int) -> None:
        """Make the wrappers of a kind of layer, planned for padding. Raises InvariantViolated within a capture."""
        known = self._cut if _is_cut(shape, kind) else self._plain
        if (shape.rows, kind) in known:
            return
        if self._planner.device.type == "cuda" and _cuda.is_current_stream_capturing():
            raise InvariantViolated("a layer of a kind that was not met before the capture")
        rows = shape.rows
        if _is_cut(shape, kind):
            own = _Planned(self._decode_wrapper(self._own, rows), kind, heads)
            self._cut[rows, kind] = own, _Planned(self._shared_wrapper(most_tiles(rows) + 1), kind, heads)
        else:
            self._plain[rows, kind] = _Planned(self._decode_wrapper(self._whole, rows), kind, heads)
        self._plan_kinds(shape, (), None, kind)

    def _decode_wrapper(self, lists: _Lists, rows: int) -> Any:
        return self._with_small_plan(self._planner.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._planner.workspace,
            LAYOUT,
            use_cuda_graph=True,
            # Its other kernels know few numbers of query heads to a KV head.
            use_tensor_cores=True,
            paged_kv_indptr_buffer=lists.starts[: rows + 1],
            paged_kv_indices_buffer=lists.pages,
            paged_kv_last_page_len_buffer=lists.last[:rows],
        ))  # fmt: skip

    def _shared_wrapper(self, requests: int) -> Any:
        lists = self._shared
        return self._with_small_plan(self._planner.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._planner.workspace,
            LAYOUT,
            use_cuda_graph=True,
            qo_indptr_buf=lists.rows[: requests + 1],
            paged_kv_indptr_buf=lists.starts[: requests + 1],
            paged_kv_indices_buf=lists.pages,
            paged_kv_last_page_len_buf=lists.last[:requests],
            # Its launch depends on nothing but the numbers of rows and requests.
            backend="fa2",
        ))  # fmt: skip

    def _with_small_plan(self, wrapper: Any) -> Any:
        plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._planner.device)
        wrapper.reset_workspace_buffer(self._planner.workspace, plan)
        return wrapper

    def _merged(
        self, own: Any, shared: Any, query: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return the attention of all rows.

        All go through the second launch, in the order of tiles; its result is merged only for rows that share keys.
        """
        rows = len(query)
        order, inverse = self._order[:rows], self._inverse[:rows]
        output: torch.Tensor
        output, sums = own.run(query, pools, return_lse=True)
        others, other_sums = shared.run(query.index_select(0, order), pools, return_lse=True)
        self._planner.flashinfer.merge_state_in_place(
            output,
            sums,
            others.index_select(0, inverse),
            other_sums.index_select(0, inverse),
            self._is_member[:rows],
        )
        return output


class _Planned(NamedTuple):
    """One of FlashInfer's wrappers, and what it is planned for."""

    wrapper: Any
    kind: Kind
    heads: int


class _Lists:
    """Device memory for the page lists of up to ``requests`` requests and ``pages`` pages, which all graphs share."""

    def __init__(self, requests: int, pages: int, device: torch.device) -> None:
        self.rows, self.starts = (torch.zeros(requests + 1, dtype=torch.int32, device=device) for _ in "12")
        self.pages = torch.zeros(pages, dtype=torch.int32, device=device)
        self.last = torch.zeros(requests, dtype=torch.int32, device=device)


_NO_TILES = SharedTiles(np.full((0, MEMBERS), -1, dtype=np.int32), np.zeros(0, dtype=np.int32))


def _is_cut(shape: DecodeShape, kind: Kind) -> bool:
    """Return whether layers of this kind attend in two parts, which they do not with a window: it hides shared keys."""
    return shape.shares and kind.window is None
