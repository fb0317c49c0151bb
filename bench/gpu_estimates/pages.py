"""Figures of the page on transfers, of an H200."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.gpu_estimates import copies
from services.worker.kernels import row_checksums
from services.worker.kernels.page_gather import MOST_AHEAD
from services.worker.kv.movers.gpu_assisted import LOAD_PROGRAMS, PIECE_BYTES

PAGE_SIZES = (1, 16, 32, 64)

CASES = (*((size, LOAD_PROGRAMS) for size in PAGE_SIZES), (16, 1), (16, 4))
"""Page sizes and programs that are shown."""

LATENCIES_US = (1.5, 3.0, 6.0, 9.0)


def transfers() -> dict[str, Any]:
    """Verified loads by page size, programs and latency; what they take beside; and what is assumed and read."""
    machine = copies.MACHINE
    return {
        "machine": asdict(machine),
        "most_ahead": MOST_AHEAD,
        "tile_bytes": copies.TILE_BYTES,
        "check_programs": row_checksums.SUM_PROGRAMS,
        "check_tile_bytes": copies.CHECK_TILE_BYTES,
        "piece_bytes": PIECE_BYTES,
        "piece_copy_us": PIECE_BYTES / 1e3 / machine.link_gb_s,
        "checked_gb_s": copies.checked_gb_s(),
        "latencies_us": LATENCIES_US,
        "loads": [
            {
                "page_size": size,
                "programs": programs,
                "shares": [copies.verified_share(size, latency, programs) for latency in LATENCIES_US],
                "piece_check_us": copies.piece_check_us(size),
            }
            for size, programs in CASES
        ],
        "occupied_share": copies.occupied_share(),
        "memory_share": copies.memory_share(),
    }
