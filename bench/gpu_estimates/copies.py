"""What the kernels that move and check pages should reach on a GPU, by a model of their memory and instructions.

An estimate: nothing was measured. By Little's law (Strata section 3.1) a kernel moves ``bytes in flight / latency``,
and no more than the link carries. What kernels do is read from their source, what the machine does is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu_estimates.llama import LLAMA_8B, token_bytes
from services.worker.kernels import page_gather, row_checksums
from services.worker.kv.movers.gpu_assisted import LOAD_PROGRAMS, PIECE_BYTES

TILE_BYTES = 4 * page_gather.TILE_WORDS
CHECK_TILE_BYTES = row_checksums.BLOCK_BYTES * row_checksums.TILE_BLOCKS

PAGE_NUMBERS_BYTES = 28
"""Of each page in each layer: seed, checksum, and three page numbers (``movers/piece_slots.py``)."""

CHECK_INSTRUCTIONS = 38
"""Of a warp for each 512 bytes that it sums: 600 in the machine code for sm_90 of a tile's 16 reads a thread."""

PREFIX = 8192
"""Tokens of a load."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is assumed of a GPU and its link, of an H200 by default; times in us, rates in GB/s."""

    link_gb_s: float = 55.0  # Of one copy in one piece, in one direction, over PCIe 5.0 x16.
    memory_gb_s: float = 4800.0
    memory_latency_us: float = 0.8
    clock_ghz: float = 1.7
    issued: float = 2.0  # Instructions of warps that a multiprocessor issues in a cycle, of four at most.
    multiprocessors: int = 132
    tiles_ahead: int = 3  # Of each program of the copy: as many as its shared memory holds, at most MOST_AHEAD.


MACHINE = Machine()


def copied_gb_s(programs: int, latency_us: float, machine: Machine = MACHINE) -> float:
    """What ``programs`` of the copy kernel read from memory that answers after ``latency_us`` under load."""
    ahead = min(machine.tiles_ahead, page_gather.MOST_AHEAD) * TILE_BYTES
    return min(machine.link_gb_s, programs * ahead / 1e3 / latency_us)


def checked_gb_s(machine: Machine = MACHINE) -> float:
    """What the kernel that sums blocks reads from the device's memory."""
    busy_us = CHECK_TILE_BYTES / 512 * CHECK_INSTRUCTIONS / machine.issued / machine.clock_ghz / 1e3
    return row_checksums.SUM_PROGRAMS * CHECK_TILE_BYTES / 1e3 / (machine.memory_latency_us + busy_us)


def piece_check_us(page_size: int, machine: Machine = MACHINE) -> float:
    """The check of one piece: its sums, then a walk over the blocks of its rows, each a read of the second cache."""
    row = page_size * token_bytes() // LLAMA_8B.layers
    at_once = row_checksums.TILE_ROWS * row_checksums.JOIN_PROGRAMS
    turns = -(-(PIECE_BYTES // row) // at_once)
    return PIECE_BYTES / 1e3 / checked_gb_s(machine) + turns * (row // 1024) * machine.memory_latency_us / 2


def verified_share(
    page_size: int, latency_us: float, programs: int = LOAD_PROGRAMS, machine: Machine = MACHINE
) -> float:
    """A verified load of ``PREFIX`` tokens, as a share of the link's peak: the check of the last piece comes on top,
    and the page numbers cross the link too.
    """
    nbytes = PREFIX * token_bytes()
    pages = PREFIX // page_size * LLAMA_8B.layers
    speed = copied_gb_s(programs, latency_us, machine)
    copy_us, check_us = (nbytes + pages * PAGE_NUMBERS_BYTES) / 1e3 / speed, piece_check_us(page_size, machine)
    slower = max(1.0, check_us / (PIECE_BYTES / 1e3 / machine.link_gb_s))
    return nbytes / 1e3 / machine.link_gb_s / (copy_us * slower + check_us)


def checking_share(machine: Machine = MACHINE) -> float:
    """Of the time of a verified load in which its rows are summed."""
    return min(1.0, machine.link_gb_s / checked_gb_s(machine))


def occupied_share(programs: int = LOAD_PROGRAMS, machine: Machine = MACHINE) -> float:
    """Of the multiprocessors' time while a verified load runs; copies take all of it."""
    return (programs + row_checksums.SUM_PROGRAMS * checking_share(machine)) / machine.multiprocessors


def memory_share(machine: Machine = MACHINE) -> float:
    """Of the device memory's bandwidth: every byte is written once and read once for its check."""
    return 2 * machine.link_gb_s / machine.memory_gb_s
