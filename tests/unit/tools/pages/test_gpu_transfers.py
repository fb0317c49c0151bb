"""The estimates of GPU transfers follow from their assumptions, and from constants that the kernels have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.worker.kernels import page_gather, row_checksums
from services.worker.kv.movers import gpu_assisted
from tools.pages.gpu_transfers import (
    MACHINE,
    PAGE_SIZES,
    PIECE_BYTES,
    checked_gb_s,
    constant,
    copied_gb_s,
    occupied_share,
    piece_check_us,
    verified_share,
)


def test_constants_are_those_of_the_kernels() -> None:
    """Read without importing them, because that takes Triton."""
    assert constant("page_gather", "TILE_WORDS") == page_gather.TILE_WORDS
    assert constant("row_checksums", "SUM_PROGRAMS") == row_checksums.SUM_PROGRAMS
    assert gpu_assisted.PIECE_BYTES == PIECE_BYTES
    with pytest.raises(KeyError, match="NONE"):
        constant("row_checksums", "NONE")


def test_a_copy_obeys_littles_law() -> None:
    """Twice the latency is half the speed, twice the programs are twice the speed, up to what the link carries."""
    slow_us = 100.0

    assert copied_gb_s(1, slow_us) == pytest.approx(3 * 64 * 1024 / 1e3 / slow_us)
    assert copied_gb_s(2, 2 * slow_us) == pytest.approx(copied_gb_s(1, slow_us))
    assert copied_gb_s(16, 1.5) == MACHINE.link_gb_s


def test_a_check_that_is_slower_than_the_link_slows_the_load() -> None:
    """One that is faster costs only its last piece."""
    slow = replace(MACHINE, issued=0.1)

    assert checked_gb_s() > MACHINE.link_gb_s > checked_gb_s(slow)
    assert verified_share(16, 1.5, machine=slow) < 0.5 * verified_share(16, 1.5)


def test_shares_are_shares() -> None:
    """Small pages cost a little more, for their numbers."""
    assert all(0 < verified_share(size, 2.0) < 1 for size in PAGE_SIZES)
    assert verified_share(1, 2.0) < verified_share(32, 2.0)
    assert 2 / MACHINE.multiprocessors < occupied_share() < 6 / MACHINE.multiprocessors
    assert piece_check_us(16) > PIECE_BYTES / 1e3 / checked_gb_s()
