"""Decode rows that share pages are found, and attended to together where that saves much."""

from __future__ import annotations

from itertools import count

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.key_splits import SPLIT_KEYS
from services.worker.engine.shared_prefixes import LEAST_SAVED_KEYS, MEMBERS, DecodeRow, SharedTiles, shared_tiles
from services.worker.engine.static_batch import StaticBatch

PAGE_SIZE = 16


def _rows(*prompts: tuple[tuple[int, int], ...]) -> list[DecodeRow]:
    """A row for each prompt: (name, tokens) of its parts. Parts of one name have the same pages, others own ones."""
    fresh, known = count(), dict[tuple[int, int], int]()
    rows = []
    for number, parts in enumerate(prompts):
        pages: list[int] = []
        for name, tokens in parts:
            for page in range(tokens // PAGE_SIZE):
                key = (name, page) if name >= 0 else (-1 - number, page)
                pages.append(known.setdefault(key, next(fresh)))
        pages.append(next(fresh))
        rows.append(DecodeRow(number, len(pages) * PAGE_SIZE - 3, np.array(pages, dtype=np.int32)))
    return rows


def _found(tiles: SharedTiles | None) -> list[tuple[list[int], int]]:
    assert tiles is not None
    pairs = zip(tiles.tile_rows.tolist(), tiles.tile_keys.tolist(), strict=True)
    return [([each for each in rows if each >= 0], keys) for rows, keys in pairs]


def test_one_document_under_many_questions() -> None:
    """Its whole splits are one tile's, whatever comes behind it."""
    rows = _rows(((0, 2000), (-1, 160)), ((0, 2000),), ((0, 2000), (-1, 800)), ((1, 2000),), ((0, 2000), (-1, 16)))

    tiles = shared_tiles(rows, PAGE_SIZE, most=1)

    assert _found(tiles) == [([0, 1, 2, 4], 3 * SPLIT_KEYS)]
    assert tiles is not None
    assert tiles.row_keys(5).tolist() == [1536, 1536, 1536, 0, 1536]


def test_documents_behind_one_system_prompt() -> None:
    """Where documents are longer than what is before them, each is shared by its own questions; else that is by all."""
    deep = _rows(*(((9, 512), (document, 4096)) for document in (0, 0, 0, 1, 1, 1)))
    flat = _rows(*(((9, 4096), (document, 512)) for document in (0, 0, 1, 1, 2, 2)))

    assert _found(shared_tiles(deep, PAGE_SIZE, most=2)) == [([0, 1, 2], 4608), ([3, 4, 5], 4608)]
    assert _found(shared_tiles(flat, PAGE_SIZE, most=2)) == [([0, 1, 2, 3, 4, 5], 4096)]


def test_little_is_not_worth_a_kernel() -> None:
    """Neither few keys nor none; the edge is LEAST_SAVED_KEYS."""
    keys = LEAST_SAVED_KEYS // 2

    assert shared_tiles(_rows(((0, keys),), ((0, keys),)), PAGE_SIZE, most=1) is None
    assert shared_tiles(_rows(((0, 9000),), ((1, 9000),)), PAGE_SIZE, most=1) is None
    assert shared_tiles([], PAGE_SIZE, most=1) is None
    assert _found(shared_tiles(_rows(*[((0, keys),)] * 3), PAGE_SIZE, most=1)) == [([0, 1, 2], keys)]


def test_the_page_that_is_written_is_nobody_else_s() -> None:
    """A row's last page is not shared, even where others have it, too."""
    pages = np.arange(SPLIT_KEYS * 4 // PAGE_SIZE, dtype=np.int32)
    rows = [DecodeRow(number, SPLIT_KEYS * 4, pages) for number in range(9)]

    assert _found(shared_tiles(rows, PAGE_SIZE, most=1)) == [(list(range(9)), 3 * SPLIT_KEYS)]


def test_rows_that_are_cut_otherwise_are_not_joined() -> None:
    """Beyond the most splits they grow, and a split must be the same for all rows of a tile."""
    rows = _rows(*[((0, 16_000),)] * 3, *[((0, 16_000), (-1, 1600))] * 3)

    assert _found(shared_tiles(rows, PAGE_SIZE, most=2)) == [([0, 1, 2], 31 * 512), ([3, 4, 5], 15 * 1024)]


def test_tiles_are_bounded() -> None:
    """A large group has several; of groups that do not all fit, those that save the most go first."""
    many = _rows(*[((0, 1024),)] * (MEMBERS + 3))
    several = _rows(*[((0, 2048),)] * 4, *[((1, 8192),)] * 4, *[((2, 4096),)] * 4)

    assert [len(rows) for rows, _ in _found(shared_tiles(many, PAGE_SIZE, most=2))] == [MEMBERS, 3]
    assert [rows[0] for rows, _ in _found(shared_tiles(several, PAGE_SIZE, most=2))] == [4, 8]


def test_graphs_take_over_what_a_step_shares() -> None:
    """And what the step before it shared is gone, also behind the rows and tiles of this one."""
    batch = StaticBatch(16, 200, 8, torch.device("cpu"))
    pages = np.arange(200, dtype=np.int32)
    alike = [Segment(1, 2000 + number, np.append(pages[:125], 130 + number)) for number in range(8)]
    shared = ForwardMeta.build([*alike, Segment(1, 3, pages)], PAGE_SIZE, "cpu")
    plain = ForwardMeta.build([Segment(1, 3, pages)], PAGE_SIZE, "cpu")
    ids = torch.zeros(9, dtype=torch.int64)

    batch.fill(ids, ids, shared, 16)
    first = batch.row_keys.tolist(), batch.tile_rows[0].tolist(), batch.tile_keys.tolist()
    batch.fill(ids[:1], ids[:1], plain, 16)

    assert first == ([1536] * 8 + [0] * 8, [*range(8), *[-1] * 8], [1536, 0, 0, 0])
    assert batch.row_keys.tolist() == [0] * 16
    assert batch.tile_keys.tolist() == [0] * 4
