"""Groups of real rank processes on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.worker.parallel.group_runner import GroupRunner, load_group
from services.worker.parallel.orders import StartRank
from tests.run_name import shm_prefix

SHM_PREFIX = shm_prefix("group")
PAGE_SIZE = 16


def start_order(model: Path, ranks: int, **changes: Any) -> StartRank:
    """Rank 0's order for a float32 model on the CPU."""
    settings: dict[str, Any] = {
        "dtype": "auto",
        "device": "cpu",
        "threads": 1,
        "page_size": PAGE_SIZE,
        "timeout_ms": 60_000,
    }
    settings |= {"rank": 0, "ranks": ranks, "model_dir": str(model), "shm_prefix": SHM_PREFIX, "store_port": 0}
    return StartRank(**(settings | changes))


@contextmanager
def group_of(model: Path, ranks: int, *, pages: int = 32, **changes: object) -> Iterator[GroupRunner]:
    """A group, ended at the end of the block."""
    group = load_group(start_order(model, ranks, **changes), device_kv_bytes=0, pages=pages)
    try:
        yield group
    finally:
        group.close()
