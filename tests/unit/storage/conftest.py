"""Pools of both sides, a broker in this process, and nothing left in /dev/shm."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.bus.protocol import StreamLimits
from shared.memory import SharedSegment, unlink_all
from shared.messages.pools import KvGeometry, PoolHandle
from tests.memory_bus import MemoryBroker
from tests.run_name import RUN


@pytest.fixture
def shm_prefix() -> Iterator[str]:
    prefix = f"{RUN}-{secrets.token_hex(4)}"
    yield prefix
    unlink_all(prefix)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Two empty directories."""
    made = [tmp_path / f"disk-{number}" for number in range(2)]
    for path in made:
        path.mkdir()
    return [str(path) for path in made]


@pytest.fixture
def geometry() -> KvGeometry:
    return KvGeometry(layers=3, kv_heads=2, head_dim=8, page_size=4, dtype="float16")


@pytest.fixture
def make_device_pool(shm_prefix: str) -> Callable[[KvGeometry, int], PoolHandle]:
    """Make a worker's pool of random bytes."""

    def make(geometry: KvGeometry, pages: int) -> PoolHandle:
        segment = SharedSegment.create(shm_prefix, "device", pages * geometry.page_bytes)
        segment.array[:] = np.random.default_rng(pages).integers(0, 256, segment.nbytes, dtype=np.uint8)
        return PoolHandle(
            kind="shm",
            layout="layer_first",
            name=segment.name,
            nbytes=segment.nbytes,
            pages=pages,
            geometry=geometry,
        )

    return make


@pytest.fixture
async def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.ensure_streams(StreamLimits())
    return made
