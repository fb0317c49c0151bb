"""The decode rows of a step that read the same keys, so that attention reads those once. Pure.

Requests over one document have its pages at the start of their page tables. The decode kernel cuts a row's keys into
splits; a split that lies in pages which several rows share is computed for all of them by one program, and joined like
any other: no row is cut otherwise than it would be alone. Cascade attention (FlashInfer, Ye et al., arXiv 2501.01005,
section 3.1.2) merges a shared and an own part in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.engine.key_splits import keys_per_split

MEMBERS = 16
"""Rows of a tile; a larger group has several tiles."""

LEAST_SAVED_KEYS = 4096
"""Keys that need not be read again, over all rows, below which one more kernel is not worth its launch. With the KV
heads of Llama-3.1-8B those are 16 MiB a layer, which memory at 3.35 TB/s reads in 5 us.
"""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A segment of one row: its number in the step, the keys that it sees, and its pages, int32."""

    segment: int
    visible: int
    pages: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedTiles:
    """Rows that share their first ``tile_keys`` keys, whole splits.

    ``tile_rows`` int32 [tiles, MEMBERS] are numbers of segments, -1 where there are fewer; ``tile_keys`` is int32
    [tiles].
    """

    tile_rows: npt.NDArray[np.int32]
    tile_keys: npt.NDArray[np.int32]

    def row_keys(self, segments: int) -> npt.NDArray[np.int32]:
        """Return the keys that each segment of the step shares, int32 [segments]."""
        keys = np.zeros(segments, dtype=np.int32)
        for rows, shared in zip(self.tile_rows, self.tile_keys, strict=True):
            keys[rows[rows >= 0]] = shared
        return keys


@dataclass(frozen=True, slots=True)
class _Group:
    rows: tuple[DecodeRow, ...]
    keys: int

    @property
    def tiles(self) -> int:
        return -(-len(self.rows) // MEMBERS)

    @property
    def saved_keys(self) -> int:
        return (len(self.rows) - self.tiles) * self.keys


def most_tiles(segments: int) -> int:
    """Return the most tiles of a step of so many segments: a captured step has a grid of them, used or not."""
    return max(1, segments // 4)


def shared_tiles(rows: Sequence[DecodeRow], page_size: int, most: int) -> SharedTiles | None:
    """Return at most ``most`` tiles, those that save the most; None where too little is saved."""
    alike: dict[tuple[int, int], list[DecodeRow]] = {}
    for row in rows:
        per_split = keys_per_split(row.visible)
        if row.visible > per_split:
            alike.setdefault((per_split, int(row.pages[0])), []).append(row)
    groups: list[_Group] = []
    for (per_split, _), some in alike.items():
        groups += _divided(some, page_size, per_split)
    groups.sort(key=lambda group: (-group.saved_keys // group.tiles, group.rows[0].segment))
    chosen: list[_Group] = []
    for group in groups:
        if sum(each.tiles for each in chosen) + group.tiles <= most:
            chosen.append(group)
    if sum(group.saved_keys for group in chosen) < LEAST_SAVED_KEYS:
        return None
    tiles = [
        (group.rows[at : at + MEMBERS], group.keys) for group in chosen for at in range(0, len(group.rows), MEMBERS)
    ]
    members = np.full((len(tiles), MEMBERS), -1, dtype=np.int32)
    for number, (some_rows, _) in enumerate(tiles):
        members[number, : len(some_rows)] = [row.segment for row in some_rows]
    return SharedTiles(members, np.array([keys for _, keys in tiles], dtype=np.int32))


def _divided(rows: list[DecodeRow], page_size: int, per_split: int) -> list[_Group]:
    """Return ``rows``, which begin alike, as one group, or as the groups of those that have more in common.

    The choice is the one that saves more.
    """
    if len(rows) < 2:
        return []
    # The last page is written, so it is the row's own.
    shortest = min((row.visible - 1) // page_size for row in rows)
    first = rows[0].pages[:shortest]
    for row in rows[1:]:
        differing = np.flatnonzero(first != row.pages[: len(first)])
        first = first if not len(differing) else first[: differing[0]]
    common = len(first)
    together = _Group(tuple(rows), common * page_size // per_split * per_split)
    parts: dict[int, list[DecodeRow]] = {}
    for row in rows:
        if (row.visible - 1) // page_size > common:
            parts.setdefault(int(row.pages[common]), []).append(row)
    apart = [group for some in parts.values() for group in _divided(some, page_size, per_split)]
    if sum(group.saved_keys for group in apart) > together.saved_keys:
        return apart
    return [together] if together.saved_keys else []
