"""The pages that each request of a step reads, as FlashInfer takes them: one list, and where each request begins. Pure.

A step whose requests share a document is cut in two: the pages that a tile of requests shares
(:mod:`~services.worker.engine.shared_prefixes`), and each request's own. Both results are merged by their log-sum-exp
(cascade attention, Ye et al., arXiv 2501.01005, section 3.1.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.engine.forward_meta import Segment, pages_for
from services.worker.engine.shared_prefixes import SharedTiles

Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageLists:
    """Page lists of ``n`` requests.

    ``rows`` [n + 1] and ``starts`` [n + 1] say where each one's query rows and pages begin, ``pages`` [p] are numbers
    of pages, ``last`` [n] is how many keys of a request's last page are its own, from 1 to the page's size.
    """

    rows: Integers
    starts: Integers
    pages: Integers
    last: Integers

    def lengths(self, page_size: int) -> Integers:
        """Return the number of keys of each request, int32 [n]."""
        return (np.diff(self.starts) - 1) * np.int32(page_size) + self.last


@dataclass(frozen=True, slots=True)
class Cascade:
    """A step in two parts, with shared pages and without them.

    ``shared`` has a request for each tile; its rows are those of the step in the order of ``order``, int64. ``own`` are
    the requests of the step without the pages that they share.
    """

    own: PageLists
    shared: PageLists
    order: npt.NDArray[np.int64]


def step_lists(
    segments: Sequence[Segment], page_size: int, *, padded: int = 0, skipped: npt.NDArray[np.int64] | None = None
) -> PageLists:
    """Return the page lists of a step, each request without the first ``skipped`` of its pages.

    Padding follows, up to ``padded`` requests in all: one row each, which reads one key of page 0.
    """
    padding = max(0, padded - len(segments))
    firsts = [0] * len(segments) if skipped is None else skipped.tolist()
    lists = [
        segment.pages[first : pages_for(segment.length, page_size)]
        for first, segment in zip(firsts, segments, strict=True)
    ]
    return _lists(
        [*(segment.rows for segment in segments), *[1] * padding],
        [*lists, *[_PAGE_0] * padding],
        [*((segment.length - 1) % page_size + 1 for segment in segments), *[1] * padding],
    )


def cascade(
    segments: Sequence[Segment], tiles: SharedTiles, page_size: int, *, padded: int = 0, most_tiles: int = 0
) -> Cascade:
    """Cut a step in two parts. Shared keys that do not fill a page are left to each request.

    For a captured step, which has ``padded`` rows, ``order`` has them all, and ``shared`` has ``most_tiles`` requests
    and one more, of the rows that share nothing; what it reads is not used. Else ``order`` has rows of tiles alone.
    """
    edges = np.cumsum([0, *(segment.rows for segment in segments)])
    skipped = np.zeros(len(segments), dtype=np.int64)
    members: list[npt.NDArray[np.int64]] = []
    lists: list[Integers] = []
    for numbers, keys in zip(tiles.tile_rows, tiles.tile_keys, strict=True):
        some, shared = numbers[numbers >= 0], int(keys) // page_size
        if shared and len(some):
            skipped[some] = shared
            members.append(edges[some])
            lists.append(segments[int(some[0])].pages[:shared])
    last = [page_size] * len(lists)
    if padded:
        unused = most_tiles - len(lists)
        others = np.setdiff1d(np.arange(padded), np.concatenate([_NO_ROWS, *members]))
        members += [*[_NO_ROWS] * unused, others]
        lists += [_PAGE_0] * (unused + 1)
        last += [1] * (unused + 1)
    return Cascade(
        own=step_lists(segments, page_size, padded=padded, skipped=skipped),
        shared=_lists([len(each) for each in members], lists, last),
        order=np.concatenate([_NO_ROWS, *members]).astype(np.int64),
    )


_PAGE_0 = np.zeros(1, dtype=np.int32)
_NO_ROWS = np.zeros(0, dtype=np.int64)


def _lists(rows: Sequence[int], lists: Sequence[Integers], last: Sequence[int]) -> PageLists:
    return PageLists(
        rows=_edges(rows),
        starts=_edges([len(each) for each in lists]),
        pages=np.concatenate([_PAGE_0[:0], *lists]).astype(np.int32),
        last=np.array(last, dtype=np.int32),
    )


def _edges(counts: Sequence[int]) -> Integers:
    """Return where each of several parts begins, and the end: int32 [n + 1]."""
    edges = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=edges[1:])
    return edges
