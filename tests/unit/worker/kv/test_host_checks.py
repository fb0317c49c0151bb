"""Rows of host pages are checked where they are, by as many threads as it is worth, with xxhash's verdicts."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from services.worker.kv import host_checks
from services.worker.kv.host_checks import failed_rows, gather_checked
from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.kv.row_checks import RowChecks

PAGES, LAYERS = 40, 2


class Rows:
    """Random page-first rows and what their checksums are; ``gap`` bytes lie between K and V."""

    def __init__(self, half_bytes: int, gap: int = 0) -> None:
        random = np.random.default_rng(half_bytes)
        stride = half_bytes + gap
        layout = PageLayout(PAGES, LAYERS, half_bytes, 2 * LAYERS * stride, 2 * stride, stride)
        self.array = random.integers(0, 256, PAGES * 2 * LAYERS * stride, dtype=np.uint8)
        self.memory = PageMemory(layout, array=self.array)
        self.pages = random.permutation(PAGES).astype(np.int32)
        identities = random.integers(0, 256, (PAGES, 16), dtype=np.uint8)
        expected = np.array(
            [
                [
                    xxhash.xxh3_64_intdigest(
                        self.memory.host_rows()[page, layer].tobytes(),
                        seed=int.from_bytes(identity[:8].tobytes(), "little"),
                    )
                    for layer in range(LAYERS)
                ]
                for page, identity in zip(self.pages, identities, strict=True)
            ],
            dtype=np.uint64,
        )
        self.checks = RowChecks(expected, identities, np.ones(PAGES, dtype=bool))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, for whatever little there is to check."""
    monkeypatch.setattr(host_checks, "PART_BYTES", 1)
    monkeypatch.setattr(host_checks, "thread_count", lambda: 3)


@pytest.mark.parametrize(("half_bytes", "gap"), [(512, 0), (512, 64), (60, 0), (1000, 8)])
def test_wrong_rows_are_found_by_every_thread(half_bytes: int, gap: int, threads: None) -> None:
    """The first, some in the middle and the last, in either layer; a page that nobody wants checked is passed over."""
    rows = Rows(half_bytes, gap)
    assert not failed_rows(rows.memory, range(LAYERS), rows.pages, rows.checks).any()
    for index, layer in ((0, 0), (13, 1), (14, 0), (27, 1), (39, 1)):
        rows.checks.expected[index, layer] ^= np.uint64(1)
    rows.checks.wanted[14] = False

    found = failed_rows(rows.memory, range(LAYERS), rows.pages, rows.checks)

    assert np.flatnonzero(found).tolist() == [0, 13, 27, 39]


@pytest.mark.parametrize("half_bytes", [512, 60])
def test_what_is_gathered_was_checked(half_bytes: int, threads: None) -> None:
    """Good rows are in the staging memory in the order of the pages, and wrong ones are named."""
    rows = Rows(half_bytes)
    layout = PageLayout(PAGES, LAYERS, half_bytes, 2 * half_bytes, 0, half_bytes)
    staging = PageMemory(layout, array=np.zeros(PAGES * 2 * half_bytes, dtype=np.uint8))
    rows.checks.expected[[3, 38], 1] ^= np.uint64(4)

    good = gather_checked(rows.memory, staging, 1, rows.pages, rows.checks.part(slice(None), slice(1, 2)))
    checked = staging.host_rows()[good, 0]
    everything = gather_checked(rows.memory, staging, 0, rows.pages, None)

    assert np.flatnonzero(~good).tolist() == [3, 38]
    assert everything.all()
    np.testing.assert_array_equal(checked, rows.memory.host_rows()[rows.pages[good], 1])
    np.testing.assert_array_equal(staging.host_rows()[:, 0], rows.memory.host_rows()[rows.pages, 0])


@pytest.mark.parametrize(("nbytes", "parts"), [(0, 1), (2**20, 1), (2 * 2**20, 2), (64 * 2**20, 3)])
def test_a_thread_is_asked_for_a_megabyte_or_more(nbytes: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no page is left out or checked twice."""
    monkeypatch.setattr(host_checks, "thread_count", lambda: 3)
    seen: list[slice] = []

    def check(part: slice) -> np.ndarray:
        seen.append(part)
        return np.zeros(part.stop - part.start, dtype=bool)

    count = nbytes // 4096

    assert len(host_checks._in_parts(check, count, 4096)) == count
    assert len(seen) == parts
    assert sorted(index for part in seen for index in range(part.start, part.stop)) == list(range(count))
