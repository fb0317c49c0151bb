"""The estimates of GPU transfers follow from their assumptions, and from constants that the kernels have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.gpu_estimates.copies import (
    MACHINE,
    checked_gb_s,
    copied_gb_s,
    memory_share,
    occupied_share,
    piece_check_us,
    verified_share,
)
from bench.gpu_estimates.pages import PAGE_SIZES
from services.worker.kernels.row_checksums import SUM_PROGRAMS
from services.worker.kv.movers.gpu_assisted import PIECE_BYTES


def test_a_copy_obeys_littles_law() -> None:
    """Twice the latency is half the speed, twice the programs are twice the speed, up to what the link carries."""
    slow_us = 100.0

    assert copied_gb_s(1, slow_us) == pytest.approx(3 * 64 * 1024 / 1e3 / slow_us)
    assert copied_gb_s(2, 2 * slow_us) == pytest.approx(copied_gb_s(1, slow_us))
    assert copied_gb_s(16, 1.5) == MACHINE.link_gb_s


def test_a_multiprocessor_with_less_shared_memory_has_fewer_tiles_on_their_way() -> None:
    """And never more than the kernel asks for."""
    slow_us = 100.0

    assert copied_gb_s(1, slow_us, replace(MACHINE, tiles_ahead=1)) == pytest.approx(copied_gb_s(1, slow_us) / 3)
    assert copied_gb_s(1, slow_us, replace(MACHINE, tiles_ahead=9)) == copied_gb_s(1, slow_us)


def test_a_check_that_is_slower_than_the_link_slows_the_load() -> None:
    """One that is faster costs only its last piece."""
    slow = replace(MACHINE, issued=0.1)

    assert checked_gb_s() > MACHINE.link_gb_s > checked_gb_s(slow)
    assert verified_share(16, 1.5, machine=slow) < 0.5 * verified_share(16, 1.5)


def test_a_check_holds_no_more_multiprocessors_than_it_has_programs() -> None:
    """However slow it is."""
    slow = replace(MACHINE, issued=0.1)

    assert occupied_share(2, slow) == (2 + SUM_PROGRAMS) / MACHINE.multiprocessors


def test_shares_are_shares() -> None:
    """Small pages cost a little more, for their numbers."""
    assert all(0 < verified_share(size, 2.0) < 1 for size in PAGE_SIZES)
    assert verified_share(1, 2.0) < verified_share(32, 2.0)
    assert 2 / MACHINE.multiprocessors < occupied_share() < 6 / MACHINE.multiprocessors
    assert memory_share() == 110 / 4800
    assert piece_check_us(16) > PIECE_BYTES / 1e3 / checked_gb_s()
