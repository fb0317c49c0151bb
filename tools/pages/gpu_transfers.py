"""What the kernels that move and check pages should reach on a GPU, by a model of their memory and instructions.

An estimate: nothing was measured. By Little's law (Strata section 3.1) a kernel moves ``bytes in flight / latency``,
and no more than the link carries. What kernels do is read from their source, what the machine does is assumed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

_KERNELS = Path(__file__).parents[2] / "services" / "worker" / "kernels"

PAGE_SIZES = (1, 16, 32, 64)

CASES = (*((size, 2) for size in PAGE_SIZES), (16, 1), (16, 4))
"""Page sizes and programs that are shown."""

LATENCIES_US = (1.5, 3.0, 6.0, 9.0)

PAGE_NUMBERS_BYTES = 28
"""Of each page in each layer: seed, checksum, and three page numbers (``movers/piece_slots.py``)."""

CHECK_INSTRUCTIONS = 38
"""Of a warp for each 512 bytes that it sums: 600 in the machine code for sm_90 of a tile's 16 reads a thread."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is assumed of an H200 and its link; times in us, rates in GB/s."""

    link_gb_s: float = 55.0  # Of one copy in one piece, in one direction, over PCIe 5.0 x16.
    memory_gb_s: float = 4800.0
    memory_latency_us: float = 0.8
    clock_ghz: float = 1.7
    issued: float = 2.0  # Instructions of warps that a multiprocessor issues in a cycle, of four at most.
    multiprocessors: int = 132


MACHINE = Machine()

PIECE_BYTES = 32 * 2**20
LAYER_BYTES = 8192 * 2 * 8 * 128 * 2
"""K and V of 8,192 tokens in one layer of Llama-3.1-8B, in bfloat16."""

LAYERS = 32


def constant(module: str, name: str) -> int:
    """A whole number that a kernel's module defines. Raises KeyError when it does not."""
    for node in ast.parse((_KERNELS / f"{module}.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return int(ast.literal_eval(node.value))
    raise KeyError(f"{module} defines no {name}")


def copied_gb_s(programs: int, latency_us: float, machine: Machine = MACHINE) -> float:
    """What ``programs`` of the copy kernel read from the host, whose memory answers after ``latency_us`` under load."""
    ahead = constant("page_gather", "MOST_AHEAD") * 4 * constant("page_gather", "TILE_WORDS")
    return min(machine.link_gb_s, programs * ahead / 1e3 / latency_us)


def checked_gb_s(machine: Machine = MACHINE) -> float:
    """What the kernel that sums blocks reads from the device's memory."""
    tile = 1024 * constant("row_checksums", "TILE_BLOCKS")
    busy_us = tile / 512 * CHECK_INSTRUCTIONS / machine.issued / machine.clock_ghz / 1e3
    return constant("row_checksums", "SUM_PROGRAMS") * tile / 1e3 / (machine.memory_latency_us + busy_us)


def piece_check_us(page_size: int, machine: Machine = MACHINE) -> float:
    """The check of one piece: its sums, then a walk over the blocks of its rows, each a read of the second cache."""
    row = page_size * LAYER_BYTES // 8192
    at_once = constant("row_checksums", "TILE_ROWS") * constant("row_checksums", "JOIN_PROGRAMS")
    turns = -(-(PIECE_BYTES // row) // at_once)
    return PIECE_BYTES / 1e3 / checked_gb_s(machine) + turns * (row // 1024) * machine.memory_latency_us / 2


def verified_share(page_size: int, latency_us: float, programs: int = 2, machine: Machine = MACHINE) -> float:
    """A verified load of 8,192 tokens, as a share of the link's peak: the check of the last piece comes on top, and the
    page numbers cross the link too.
    """
    nbytes = LAYER_BYTES * LAYERS
    pages = 8192 // page_size * LAYERS
    speed = copied_gb_s(programs, latency_us, machine)
    copy_us, check_us = (nbytes + pages * PAGE_NUMBERS_BYTES) / 1e3 / speed, piece_check_us(page_size, machine)
    slower = max(1.0, check_us / (PIECE_BYTES / 1e3 / machine.link_gb_s))
    return nbytes / 1e3 / machine.link_gb_s / (copy_us * slower + check_us)


def occupied_share(programs: int = 2, machine: Machine = MACHINE) -> float:
    """Of the multiprocessors' time while a verified load of pages of 16 tokens runs; copies take all of it."""
    piece_us = PIECE_BYTES / 1e3 / machine.link_gb_s
    checking = constant("row_checksums", "SUM_PROGRAMS") * PIECE_BYTES / 1e3 / checked_gb_s(machine) / piece_us
    return (programs + checking) / machine.multiprocessors


def memory_share(machine: Machine = MACHINE) -> float:
    """Of the device memory's bandwidth: every byte is written once and read once for its check."""
    return 2 * machine.link_gb_s / machine.memory_gb_s
