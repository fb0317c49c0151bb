"""What is changed of streams that exist, when settings are others than those that they were made with."""

from __future__ import annotations

from typing import Any

import pytest

from shared.bus.jetstream import ensure_stream, stream_changes, stream_config
from shared.bus.nats_bus import connect
from shared.bus.protocol import StreamLimits
from shared.errors import ConfigError
from tests.nats_server import NatsServer

DAY_NS = 24 * 3600 * 10**9


def found(nbytes: int = 0, **config: Any) -> dict[str, Any]:
    """A stream as STREAM.INFO tells of it."""
    present = {"num_replicas": 1, "max_bytes": 1000, "max_age": DAY_NS, "duplicate_window": 120 * 10**9}
    return {"config": present | config, "state": {"bytes": nbytes}}


@pytest.mark.parametrize(
    ("nbytes", "wanted", "changes", "kept"),
    [
        (900, {"max_bytes": 1000, "num_replicas": 1}, {}, {}),
        (900, {"max_bytes": 2000, "num_replicas": 3}, {"max_bytes": 2000, "num_replicas": 3}, {}),
        (900, {"max_bytes": 950}, {"max_bytes": 950}, {}),
        (900, {"max_bytes": 800}, {}, {"max_bytes": 800}),
        (900, {"max_bytes": -1}, {"max_bytes": -1}, {}),
        (900, {"max_age": DAY_NS // 2}, {}, {"max_age": DAY_NS // 2}),
        (0, {"max_age": DAY_NS // 2}, {"max_age": DAY_NS // 2}, {}),
        (900, {"max_age": 2 * DAY_NS}, {"max_age": 2 * DAY_NS}, {}),
        (900, {"max_age": 0}, {"max_age": 0}, {}),
    ],
)
def test_bounds_change_unless_messages_would_be_dropped(
    nbytes: int, wanted: dict[str, int], changes: dict[str, int], kept: dict[str, int]
) -> None:
    """What a cell recovers from is not thrown away because of a setting."""
    assert stream_changes(found(nbytes), wanted) == (changes, kept)


async def test_a_stream_that_is_not_as_ours_must_be_is_refused(nats_server: NatsServer) -> None:
    """One in memory would lose what was acknowledged; the operator is told what is wrong with it."""
    bus = await connect([nats_server.url], "test")
    limits = StreamLimits(max_bytes=2**20)
    client = bus._client  # type: ignore[attr-defined]
    await ensure_stream(client, stream_config("TC_INPUTS", ["tc.in.>"], limits) | {"storage": "memory"})

    with pytest.raises(ConfigError, match="TC_INPUTS is not ours: storage is 'memory' and not 'file'"):
        await bus.ensure_streams(limits)
    await bus.close()
