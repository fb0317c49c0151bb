"""A new cell knows its settings before it decides anything."""

from __future__ import annotations

import pytest

from services.scheduler.bootstrap import _configure_new_cell
from services.scheduler.config import SchedulerConfig
from shared import subjects
from shared.bus.nats_bus import connect
from shared.codec import encode
from shared.messages.storage_events import StorageJoined
from tests.nats_server import NatsServer

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 2), (2, 2)])
async def test_settings_are_said_before_a_worker_can_have_joined(
    before: int, after: int, nats_server: NatsServer
) -> None:
    """A storage may have come between; a cell that is under way has its settings, and a standby says none."""
    config = SchedulerConfig(nats=(nats_server.url,))
    bus = await connect((nats_server.url,), "test")
    try:
        await bus.ensure_streams(config.stream_limits())
        for number in range(before):
            joined = StorageJoined(storage_id=f"storage-{number}", incarnation="one", node="a", host_bytes=1)
            await bus.append(subjects.storage_input(joined.storage_id), encode(joined), message_id=str(number))

        await _configure_new_cell(bus, config)
        await _configure_new_cell(bus, config)

        assert (await bus.stream_info(subjects.INPUTS_STREAM)).last_seq == after
    finally:
        await bus.close()
