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


@pytest.mark.parametrize(
    "reply", ["tc.in.cell", "$KV.TC_LEASES.scheduler", "$JS.FC.TC_OUTPUTS.c.1", "_INBOX.gateway.1"]
)
@pytest.mark.parametrize("header", ["", "Nats-Consumer-Stalled"])
async def test_flow_control_of_another_subject_ends_the_consumer(reply: str, header: str) -> None:
    """The reader publishes nowhere for a message that the server did not send."""
    made = tail()
    headers = {"Status": "100", "Description": "FlowControl Request", **({header: reply} if header else {})}

    made._received(stored(1, 1))
    made._received(Incoming(reply="" if header else reply, headers=headers))

    assert await sequences(made) == [1]


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


class Client:
    """A client that hears whatever it wants to, and sends nothing but that a consumer is not needed any more."""

    is_connected = True
    is_clustered = False

    def __init__(self) -> None:
        self.hearer: Any = None

    def new_inbox(self) -> str:
        return "_INBOX.one"

    async def hear(self, subject: str, hearer: Any) -> Any:
        self.hearer = hearer
        return self

    async def unsubscribe(self) -> None:
        return None

    async def publish(self, subject: str, data: bytes) -> None:
        assert subject.startswith("$JS.API.CONSUMER.DELETE.")


class Cluster(Client):
    """A client of three servers, of which each new consumer is on the next; all but the leader lack the message."""

    is_clustered = True
    servers: tuple[str, ...] = ("n1", "n2", "n3")

    def __init__(self, leader: str, *, may_ask: bool = True) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.denied: set[tuple[str, str]] = set()
        self._leader, self._may_ask = leader, may_ask

    async def request(self, subject: str, data: bytes, **_: Any) -> Any:
        verb = subject.removeprefix("$JS.API.").split(".TC_INPUTS")[0]
        self.asked.append(verb)
        if verb == "STREAM.INFO":
            if self._may_ask:
                return Incoming(data=json.dumps({"cluster": {"leader": self._leader}}).encode())
            self.denied.add(("publish", subject.lower()))
            await asyncio.sleep(3600.0)
        server = self.servers[(self.asked.count("CONSUMER.CREATE") - 1) % 3]
        has_it = server == self._leader
        if has_it:
            asyncio.get_running_loop().call_soon(self.hearer, stored(1, 1))
        answer = {"name": "consumer", "num_pending": int(has_it), "cluster": {"leader": server}}
        return Incoming(data=json.dumps(answer).encode())


def read_of(client: Cluster) -> list[int]:
    """The sequences that a bounded read yields."""

    async def read() -> list[int]:
        follow = Tails(client.denied).follow(lambda: client, subjects.INPUTS_STREAM, 1, ">", live=False)
        return [message.seq async for message in follow]

    return run_virtually(read())


@pytest.mark.parametrize("leader", Cluster.servers)
def test_a_bounded_read_ends_where_the_leader_s_stream_does(leader: str) -> None:
    """A server that catches up would end it without what it lacks, such as the newest snapshot."""
    client = Cluster(leader)

    assert read_of(client) == [1]
    assert client.asked.count("CONSUMER.CREATE") == Cluster.servers.index(leader) + 1


def test_whoever_may_not_ask_for_the_leader_reads_what_any_server_has() -> None:
    """As users had it whose permissions are of an earlier release; they are not asked for again."""
    client = Cluster("n2", may_ask=False)

    assert read_of(client) == []
    assert client.asked == ["STREAM.INFO", "CONSUMER.CREATE"]


def test_a_connection_that_ends_behind_a_consumer_elsewhere_is_waited_for() -> None:
    """With a pause: others have the loop meanwhile, such as what connects again."""

    class Dropped(Cluster):
        """Loses its connection with the first consumer, and is connected again half a second later."""

        is_connected = True

        async def unsubscribe(self) -> None:
            if self.asked.count("CONSUMER.CREATE") == 1 and self.is_connected:
                self.is_connected = False
                asyncio.get_running_loop().call_later(0.5, setattr, self, "is_connected", True)

    assert read_of(Dropped("n2")) == [1]


def test_a_leaf_of_a_cluster_has_its_streams_alone() -> None:
    """Its answers name a leader of a stream, and say nothing of where a consumer is."""

    class Leaf(Cluster):
        servers = ("leaf",)

        async def request(self, subject: str, data: bytes, **_: Any) -> Any:
            answer = json.loads((await super().request(subject, data)).data)
            if "num_pending" in answer:
                del answer["cluster"]
            return Incoming(data=json.dumps(answer).encode())

    assert read_of(Leaf("leaf")) == [1]


def test_a_stream_without_a_leader_is_asked_for_again() -> None:
    """Any server's consumer would do otherwise."""

    class Leaderless(Cluster):
        """Elects a leader after the first question for it."""

        async def request(self, subject: str, data: bytes, **_: Any) -> Any:
            answer = await super().request(subject, data)
            if self.asked == ["STREAM.INFO"]:
                return Incoming(data=json.dumps({"cluster": {"name": "test"}}).encode())
            return answer

    client = Leaderless("n1")

    assert read_of(client) == [1]
    assert client.asked == ["STREAM.INFO"] * 2 + ["CONSUMER.CREATE"]


def test_a_leader_that_never_gets_a_consumer_is_given_up() -> None:
    """In bounded time, with pauses."""
    client = Cluster("n4")

    with pytest.raises(Unavailable, match="no progress"):
        read_of(client)

    assert len(client.asked) < 10 * 2 * GIVE_UP_S / 0.1


class Electing(Client):
    """A client of servers that drop what they are asked before ``elected_s``, and then answer within ``answer_s``."""

    def __init__(self, elected_s: float, answer_s: float) -> None:
        super().__init__()
        self.asked_s: list[float] = []
        self._elected_s = elected_s
        self._answer_s = answer_s

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
