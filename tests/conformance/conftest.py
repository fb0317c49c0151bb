"""What every bus guarantees (``shared/bus/protocol.py``), over NATS, in the clear and behind TLS, and over its twin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus.protocol import Bus
from tests.conformance.brokers import LIMITS, MemoryWorld, NatsWorld, World, secured_world


@pytest.fixture(params=["nats", "tls", "memory"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Each kind of broker in turn, empty."""
    made: World
    match request.param:
        case "nats":
            made = NatsWorld(tmp_path)
        case "tls":
            made = secured_world(tmp_path)
        case _:
            made = MemoryWorld()
    yield made
    await made.close()


@pytest.fixture
async def bus(world: World) -> Bus:
    """A client of a broker whose streams and bucket exist."""
    connected = await world.connect("first")
    await connected.ensure_streams(LIMITS)
    return connected
