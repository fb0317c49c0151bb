"""The ordered consumer: anything that may have been missed ends it, so that a new one starts behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared import subjects
from shared.bus.jetstream import API_TIMEOUT_S
from shared.bus.tail import GIVE_UP_S, Tail, Tails
from shared.errors import Unavailable
from tests.virtual_loop import run_virtually


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
        made._received(message)

    assert await sequences(made) == [1, 3]


async def test_heartbeat_that_agrees_changes_nothing() -> None:
    """An idle stream keeps its consumer."""
    made = tail()

    for message in (stored(1, 1), heartbeat(1), stored(2, 2)):
        made._received(message)
    made.break_off("the test is over")

    assert await sequences(made) == [1, 2]


async def test_delivery_subject_with_domain_and_account_is_read() -> None:
    """Newer servers put a domain and an account hash in front and a random token behind."""
    made = tail()

    made._received(Incoming(reply="$JS.ACK.hub.acc.TC_INPUTS.c.1.7.1.1234567890123456789.3.rnd", data=b"x"))
    item = await made.next()

    assert (item.message.seq, item.message.time_ns, item.pending) == (7, 1234567890123456789, 3)


async def test_idle_bounded_read_counts_again() -> None:
    """Messages that expired before their delivery do not let a bounded read wait for ever."""
    made = tail(live=False)

    made._received(heartbeat(0))

    assert await sequences(made) == []


class Electing:
    """A client of servers that drop what they are asked before ``elected_s``, and then answer within ``answer_s``."""

    is_connected = True

    def __init__(self, elected_s: float, answer_s: float) -> None:
        self.asked_s: list[float] = []
        self._elected_s = elected_s
        self._answer_s = answer_s

    def new_inbox(self) -> str:
        return "_INBOX.one"

    async def hear(self, subject: str, hearer: Any) -> Any:
        return self

    async def unsubscribe(self) -> None:
        return None

    async def publish(self, subject: str, data: bytes) -> None:
        assert subject.startswith("$JS.API.CONSUMER.DELETE.")

    async def request(self, subject: str, data: bytes, **_: Any) -> Any:
        now_s = asyncio.get_running_loop().time()
        self.asked_s.append(now_s)
        await asyncio.sleep(self._answer_s if now_s >= self._elected_s else 3600.0)
        return Incoming(data=json.dumps({"name": "consumer", "num_pending": 0}).encode())


def read_while_electing(client: Electing) -> float:
    """When a bounded read of the stream, which is empty, has ended."""

    async def read() -> float:
        async for message in Tails().follow(lambda: client, subjects.INPUTS_STREAM, 1, ">", live=False):
            raise AssertionError(message)
        return asyncio.get_running_loop().time()

    return run_virtually(read())


@pytest.mark.parametrize("elected_s", [0.0, 4.0, 9.0, 18.0])
def test_a_read_outlives_an_election_and_goes_on_soon(elected_s: float) -> None:
    """Two elections after one another take 18 s at most; what is asked of servers without a leader is lost."""
    client = Electing(elected_s, answer_s=0.01)

    ended_s = read_while_electing(client)

    assert elected_s < ended_s <= elected_s + 1.2 + 0.3 * elected_s


def test_servers_that_answer_late_are_given_more_time() -> None:
    """An answer that takes four seconds comes in one of the later tries."""
    assert read_while_electing(Electing(0.0, answer_s=4.0)) < GIVE_UP_S


def test_a_read_that_nobody_answers_ends() -> None:
    """No later than one call's time behind the bound."""
    client = Electing(3600.0, answer_s=0.01)

    with pytest.raises(Unavailable, match="no progress"):
        read_while_electing(client)

    assert GIVE_UP_S - API_TIMEOUT_S <= client.asked_s[-1] <= GIVE_UP_S + 1.0
