"""What every bus guarantees (``shared/bus/protocol.py``), checked over NATS and over its in-process twin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus.protocol import Bus
from tests.conformance.brokers import LIMITS, MemoryWorld, NatsWorld, World


@pytest.fixture(params=["nats", "memory"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Each kind of broker in turn, empty."""
    made: World = NatsWorld(tmp_path) if request.param == "nats" else MemoryWorld()
    yield made
    await made.close()


@pytest.fixture
async def bus(world: World) -> Bus:
    """A client of a broker whose streams and bucket exist."""
    connected = await world.connect("first")
    await connected.ensure_streams(LIMITS)
    return connected
