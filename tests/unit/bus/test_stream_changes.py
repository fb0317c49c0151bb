"""What is changed of streams that exist, when settings are others than those that they were made with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import nats.errors
import pytest

from shared.bus import jetstream
from shared.bus.jetstream import ensure_stream, stream_changes, stream_config
from shared.bus.nats_bus import connect
from shared.bus.protocol import StreamLimits
from shared.errors import ConfigError, PayloadTooLarge, TransportError, Unavailable
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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # A server that took over knows of a first attempt and not yet whether it was stored.
        ({"code": 409, "err_code": 10158, "description": "duplicate message id is in process"}, Unavailable),
        ({"code": 400, "err_code": 10164, "description": "wrong last sequence for subject"}, Unavailable),
        ({"code": 429, "err_code": 10167, "description": "too many requests"}, Unavailable),
        ({"code": 400, "err_code": 10005, "description": "no suitable peers for placement, peer offline"}, Unavailable),
        ({"code": 400, "err_code": 10005, "description": "no suitable peers for placement"}, TransportError),
        ({"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}, Unavailable),
        ({"code": 400, "err_code": 10054, "description": "message size exceeds maximum allowed"}, PayloadTooLarge),
        ({"code": 400, "err_code": 10071, "description": "wrong last sequence: 3"}, TransportError),
    ],
)
def test_what_passes_by_itself_may_be_tried_again(answer: dict[str, Any], expected: type[Exception]) -> None:
    """Callers repeat what was unavailable, with the same message id, and nothing else."""
    with pytest.raises(expected):
        jetstream.raise_api_error(answer, "append")


class SlowBroker:
    """Leaves the first calls without an answer, as one does that reads its streams again after a crash."""

    def __init__(self, unanswered: int) -> None:
        self.asked: list[str] = []
        self._unanswered = unanswered

    async def request(self, subject: str, data: bytes, timeout: float | None, headers: object) -> SimpleNamespace:
        self.asked.append(subject.removeprefix("$JS.API."))
        if len(self.asked) <= self._unanswered:
            raise nats.errors.TimeoutError
        missing = {"error": {"code": 404, "err_code": 10059}}
        return SimpleNamespace(data=msgspec.json.encode(missing if "INFO" in subject else {}))


async def test_a_start_waits_for_a_broker_that_is_slow() -> None:
    """A call that nothing answers is repeated: its loss or its delay ends no process."""
    broker = SlowBroker(unanswered=2)

    await ensure_stream(broker, stream_config("TC_INPUTS", ["tc.in.>"], StreamLimits()), jetstream.SETUP_S)

    assert broker.asked == ["STREAM.INFO.TC_INPUTS"] * 3 + ["STREAM.CREATE.TC_INPUTS"]


async def test_what_a_cell_can_do_without_is_asked_for_once() -> None:
    """A broker without this release's permissions never answers; a start does not wait a minute for that."""
    broker = SlowBroker(unanswered=1)

    with pytest.raises(Unavailable, match=r"does not answer STREAM\.INFO"):
        await ensure_stream(broker, stream_config("TC_INPUTS", ["tc.in.>"], StreamLimits()))

    assert broker.asked == ["STREAM.INFO.TC_INPUTS"]
