"""The ordered consumer: anything that may have been missed ends it, so that a new one starts behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.bus.tail import Tail


@dataclass
class Incoming:
    """A message as the client hands it over."""

    reply: str = ""
    data: bytes = b""
    subject: str = "tc.in.cell"
    headers: Mapping[str, str] | None = field(default=None)


def stored(seq: int, consumer_seq: int, pending: int = 0) -> Incoming:
    return Incoming(reply=f"$JS.ACK.TC_INPUTS.c.1.{seq}.{consumer_seq}.99.{pending}", data=b"x")


def heartbeat(last: int) -> Incoming:
    headers = {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Consumer": str(last)}
    return Incoming(headers=headers)


def tail(*, live: bool = True) -> Any:
    return Tail(None, "TC_INPUTS", 1, ">", live=live)


async def sequences(made: Any) -> list[int]:
    """What a broken tail still yields."""
    seen = []
    while (item := await made.next()) is not None:
        seen.append(item.message.seq)
    return seen


@pytest.mark.parametrize(
    "last",
    [
        stored(5, 4),  # consumer sequence 3 is missing
        stored(4, 2),  # repeated
        heartbeat(3),  # the server has sent more than we have
        Incoming(headers={"Status": "409", "Description": "Consumer Deleted"}),
        Incoming(reply="nonsense", data=b"x"),
    ],
)
async def test_what_was_missed_ends_the_consumer(last: Incoming) -> None:
    """Everything before the hole is yielded, nothing behind it."""
    made = tail()

    for message in (stored(1, 1), stored(3, 2), last, stored(9, 5)):
        await made._received(message)

    assert await sequences(made) == [1, 3]


async def test_heartbeat_that_agrees_changes_nothing() -> None:
    """An idle stream keeps its consumer."""
    made = tail()

    for message in (stored(1, 1), heartbeat(1), stored(2, 2)):
        await made._received(message)
    made.break_off("the test is over")

    assert await sequences(made) == [1, 2]


async def test_delivery_subject_with_domain_and_account_is_read() -> None:
    """Newer servers put a domain and an account hash in front and a random token behind."""
    made = tail()

    await made._received(Incoming(reply="$JS.ACK.hub.acc.TC_INPUTS.c.1.7.1.1234567890123456789.3.rnd", data=b"x"))
    item = await made.next()

    assert (item.message.seq, item.message.time_ns, item.pending) == (7, 1234567890123456789, 3)


async def test_idle_bounded_read_counts_again() -> None:
    """Messages that expired before their delivery do not let a bounded read wait for ever."""
    made = tail(live=False)

    await made._received(heartbeat(0))

    assert await sequences(made) == []
