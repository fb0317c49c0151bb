"""What the user of one process may do at the broker and what not, over a real server that checks it."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import nats
import nats.errors
import pytest
from structlog.testing import capture_logs

from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus, Delivery, StreamLimits
from shared.errors import ConfigError, Unavailable
from shared.metrics import REGISTRY
from tests.nats_server import NatsServer
from tests.waiting import until
from thermocline.broker.permissions import Permissions
from thermocline.broker.quoting import nats_quoted
from thermocline.broker.users import User, authorization_text, cell_users

pytestmark = pytest.mark.integration

USERS = cell_users(["worker-0", "worker-1"], ["storage-0"])
LIMITS = StreamLimits(max_bytes=2**20)
GATEWAY = "gateway-0-ab12"
ANSWER_S = 60.0
"""Longest wait for a word of the server, which is certain to come."""
_DENIED = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)
PLANS = "$JS.API.CONSUMER.CREATE.TC_OUTPUTS.mine"


def url(server: NatsServer, user: str) -> str:
    """The server's address with this user; everybody's password is their name, backwards."""
    return server.url.replace("://", f"://{user}:{user[::-1]}@")


def served_with(folder: Path, users: tuple[User, ...]) -> NatsServer:
    passwords = {user.name: nats_quoted(user.name[::-1]) for user in users}
    return NatsServer(folder, config=authorization_text(users, passwords))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with served_with(tmp_path, USERS) as made:
        yield made


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server for tests in which nothing is to happen."""
    with served_with(tmp_path_factory.mktemp("refusing"), USERS) as made:
        yield made


@asynccontextmanager
async def connected(server: NatsServer, *users: str) -> AsyncIterator[list[Bus]]:
    made: list[Bus] = []
    try:
        for user in users:
            made.append(await connect([url(server, user)], user))
        yield made
    finally:
        for bus in made:
            await bus.close()


async def stored(bus: Bus, stream: str, subject: str) -> list[bytes]:
    return [message.data async for message in bus.follow(stream, subject=subject, live=False)]


async def ignore(delivery: Delivery) -> None: ...


async def round_trip(client: Any) -> None:
    """The server has taken everything that was asked of it: nats-py's first PING may overtake what it still buffers."""
    await client.flush()
    await client.flush()


async def echo(data: bytes) -> bytes:
    return data


async def test_a_scheduler_may_do_all_that_it_does(server: NatsServer) -> None:
    """Streams, snapshots in several chunks, the lead, plans, and answers to calls; and it is denied nothing."""
    with capture_logs() as logged:
        async with connected(server, "scheduler", "gateway") as (scheduler, gateway):
            await scheduler.ensure_streams(LIMITS)
            await scheduler.ensure_streams(StreamLimits(max_bytes=2**21))
            for data in (b"x" * 300_000, b"y" * 300_000):
                await scheduler.put_object("core-1", data)
            kept = await scheduler.get_object("core-1"), await scheduler.list_objects()
            await scheduler.delete_object("core-1")
            gone = await scheduler.get_object("core-1")
            revision = await scheduler.write_record("scheduler", b"mine", revision=0)
            lead = await scheduler.read_record("scheduler")
            await scheduler.append(subjects.cell_input(), b"ticked")
            await scheduler.publish(subjects.worker_output("worker-0"), b"plan")
            await scheduler.publish(subjects.STATUS, b"status")
            await scheduler.publish(subjects.heartbeat("scheduler", "scheduler-1"), b"beat")
            await scheduler.subscribe(subjects.HEARTBEATS, ignore)
            await scheduler.flush()
            inputs = await stored(scheduler, subjects.INPUTS_STREAM, ">")
            outputs = await stored(scheduler, subjects.OUTPUTS_STREAM, ">")
            for verb in ("status", "cache", "admissions", "divergences", "request"):
                await scheduler.serve(subjects.rpc("scheduler", verb), echo)
                assert await gateway.call(subjects.rpc("scheduler", verb), b"?") == b"?"

    assert kept == (b"y" * 300_000, ["core-1"])
    assert gone is None
    assert lead is not None
    assert lead.revision == revision
    assert (inputs, outputs) == ([b"ticked"], [b"plan"])
    assert denied(logged) == []


async def test_a_gateway_may_do_all_that_it_does(server: NatsServer) -> None:
    """Whatever suffix its name has got: requests in, notices, tokens, answers, and calls of everybody it asks."""
    with capture_logs() as logged:
        async with connected(server, "scheduler", "gateway", "worker-0", "storage-0") as (scheduler, gateway, *members):
            await scheduler.ensure_streams(LIMITS)
            await scheduler.publish(subjects.gateway_output(GATEWAY), b"notice")
            await scheduler.flush()
            for subject in (subjects.tokens(GATEWAY), subjects.gateway_output(GATEWAY), subjects.STATUS):
                await gateway.subscribe(subject, ignore)
            await gateway.append(subjects.request_input(GATEWAY), b"request", message_id="r1")
            await gateway.append(subjects.cell_input(), b"flush")
            await gateway.publish(subjects.heartbeat("gateway", GATEWAY), b"beat")
            await gateway.write_answer("0" * 32, b"sealed")
            answers = await gateway.read_answers(["0" * 32, "f" * 32], timeout_s=ANSWER_S)
            notices = await stored(gateway, subjects.OUTPUTS_STREAM, subjects.gateway_output(GATEWAY))
            calls = [
                (members[0], subjects.rpc("worker", "outputs", "worker-0")),
                (members[1], subjects.rpc("storage", "inventory", "storage-0")),
                (members[1], subjects.rpc("storage", "verify", "storage-0")),
            ]
            for member, subject in calls:
                await member.serve(subject, echo)
                assert await gateway.call(subject, b"?") == b"?"

    assert notices == [b"notice"]
    assert answers == {"0" * 32: b"sealed", "f" * 32: None}
    assert denied(logged) == []


@pytest.mark.parametrize(
    ("user", "own_input", "own_output"),
    [
        ("worker-0", subjects.worker_input("worker-0"), subjects.worker_output("worker-0")),
        ("storage-0", subjects.storage_input("storage-0"), subjects.storage_output("storage-0")),
    ],
)
async def test_a_member_may_do_all_that_it_does(server: NatsServer, user: str, own_input: str, own_output: str) -> None:
    """Wait for the streams, take its plans, report events and find them again, send tokens and beats, ask."""
    kind = user.partition("-")[0]
    with capture_logs() as logged:
        async with connected(server, "scheduler", user, "storage-0") as (scheduler, member, storage):
            await scheduler.ensure_streams(LIMITS)
            await scheduler.publish(own_output, b"plan")
            await scheduler.flush()
            await member.stream_info(subjects.INPUTS_STREAM)
            await member.stream_info(subjects.OUTPUTS_STREAM)
            await member.subscribe(own_output, ignore)
            await member.subscribe(subjects.STATUS, ignore)
            await member.append(own_input, b"event")
            await member.publish(subjects.heartbeat(kind, user), b"beat")
            plans = await stored(member, subjects.OUTPUTS_STREAM, own_output)
            events = await stored(member, subjects.INPUTS_STREAM, own_input)
            asked = scheduler, subjects.rpc("scheduler", "standing")
            if kind == "worker":
                await member.publish(subjects.tokens(GATEWAY), b"tokens")
                asked = storage, subjects.rpc("storage", "sparse", "storage-0")
            await asked[0].serve(asked[1], echo)
            assert await member.call(asked[1], b"?") == b"?"

    assert (plans, events) == ([b"plan"], [b"event"])
    assert denied(logged) == []


@pytest.mark.parametrize(
    "subject",
    [
        subjects.worker_output("worker-1"),
        subjects.OUTPUTS,
        subjects.INPUTS,
        subjects.tokens(GATEWAY),
        subjects.HEARTBEATS,
        subjects.rpc("worker", "outputs", "worker-1"),
        subjects.rpc("scheduler", "status"),
        "_INBOX.gateway.>",
        "_INBOX.worker-1.>",
        "_INBOX.>",
        "$JS.>",
        ">",
    ],
)
async def test_a_worker_hears_nothing_that_is_not_meant_for_it(refusing: NatsServer, subject: str) -> None:
    """Others' plans, requests, tokens and replies."""
    async with connected(refusing, "worker-0") as (worker,):
        with pytest.raises(ConfigError, match="does not let us subscribe"):
            await worker.subscribe(subject, ignore)


@pytest.mark.parametrize(
    "subject",
    [
        subjects.request_input(GATEWAY),
        subjects.worker_input("worker-1"),
        subjects.storage_input("storage-0"),
        subjects.cell_input(),
        subjects.worker_output("worker-1"),
        subjects.gateway_output(GATEWAY),
        f"$KV.{subjects.RECORD_BUCKET}.scheduler",
        f"$KV.{subjects.ANSWER_BUCKET}.{'0' * 32}",
        f"$O.{subjects.SNAPSHOT_BUCKET}.M.core",
    ],
)
async def test_a_worker_cannot_speak_for_others(refusing: NatsServer, subject: str) -> None:
    """No request, no event of another, no plan, no lead: nothing of it is stored."""
    streams = (subjects.INPUTS_STREAM, subjects.OUTPUTS_STREAM)
    async with connected(refusing, "scheduler", "worker-0") as (scheduler, worker):
        await scheduler.ensure_streams(LIMITS)
        before = [await scheduler.stream_info(stream) for stream in streams]
        async with asyncio.timeout(ANSWER_S):
            with pytest.raises(Unavailable, match="does not let us publish"):
                await worker.append(subject, b"forged", timeout_s=600.0)
        assert [await scheduler.stream_info(stream) for stream in streams] == before


async def test_kept_answers_are_the_gateways_alone(refusing: NatsServer) -> None:
    """Gateways write, read and erase them; a worker does nothing of it."""
    async with connected(refusing, "scheduler", "gateway", "worker-0") as (scheduler, gateway, worker):
        await scheduler.ensure_streams(LIMITS)
        await gateway.keep("a.b.c", b"kept")
        assert await gateway.kept("a.b.c") == b"kept"
        for denied_call in (worker.keep("a.b.c", b"forged"), worker.kept("a.b.c"), worker.forget(">")):
            with pytest.raises(Unavailable):
                await denied_call
        assert await gateway.kept("a.b.c") == b"kept"
        assert await gateway.forget("a.>") == 1


async def test_a_scheduler_starts_without_leave_to_keep_answers(tmp_path: Path) -> None:
    """Its broker may have the permissions of an earlier release: then it says so, and all else is there."""
    users = tuple(
        User(
            user.name,
            Permissions(
                tuple(subject for subject in user.permissions.publish if subjects.KEPT_BUCKET not in subject),
                user.permissions.subscribe,
                user.permissions.answers,
            ),
        )
        for user in USERS
    )
    with served_with(tmp_path, users) as server, capture_logs() as logged:
        async with connected(server, "scheduler", "gateway") as (scheduler, gateway):
            await scheduler.ensure_streams(LIMITS)
            await scheduler.append(subjects.cell_input(), b"ticked")
            with pytest.raises(Unavailable):
                await gateway.keep("a.b.c", b"kept", timeout_s=0.2)

    assert "answers_are_not_kept" in [entry["event"] for entry in logged]


class Caller:
    """A user who calls JetStream, and hears what the server denies."""

    def __init__(self) -> None:
        self.client: Any = None
        self._denied: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    @classmethod
    @asynccontextmanager
    async def connected(cls, server: NatsServer, user: str) -> AsyncIterator[Caller]:
        caller = cls()
        caller.client = await nats.connect(url(server, user), inbox_prefix=f"_INBOX.{user}", error_cb=caller._hear)
        try:
            yield caller
        finally:
            await caller.client.close()

    async def _hear(self, error: Exception) -> None:
        if denied := _DENIED.search(str(error)):
            self._denied[denied[1]].set()

    async def ask(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """JetStream's answer, or None where the server says that it does not let the call through.

        A server that says neither fails the test with TimeoutError.
        """
        data = msgspec.json.encode(body) if body else b""
        answering = asyncio.create_task(self.client.request(subject, data, timeout=ANSWER_S))
        denied = asyncio.create_task(self._denied[subject.lower()].wait())
        try:
            await asyncio.wait({answering, denied}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return None
            answer: dict[str, Any] = msgspec.json.decode(answering.result().data)
            return answer
        finally:
            for task in (answering, denied):
                task.cancel()
            await asyncio.wait({answering, denied})


def reading(subject: str | list[str] | None, **more: Any) -> dict[str, Any]:
    """The body of a call that makes a consumer of TC_OUTPUTS."""
    key = "filter_subjects" if isinstance(subject, list) else "filter_subject"
    config = {"name": "mine", "deliver_policy": "all", "ack_policy": "none", "deliver_subject": "_INBOX.worker-0.x"}
    return {"stream_name": "TC_OUTPUTS", "config": config | ({key: subject} if subject else {}) | more}


OTHERS = subjects.worker_output("worker-1")
OWN = subjects.worker_output("worker-0")


@pytest.mark.parametrize(
    ("subject", "body"),
    [
        (f"{PLANS}.{OWN}", reading(OTHERS)),
        (f"{PLANS}.{OWN}", reading([OWN, OTHERS])),
        (f"{PLANS}.{OWN}", reading(None)),
        (f"{PLANS}.{OTHERS}", reading(OTHERS)),
        (f"{PLANS}.tc.out.worker.*", reading("tc.out.worker.*")),
        (f"{PLANS}.>", reading(">")),
        (PLANS, reading(None)),
        (PLANS, reading(OTHERS)),
        ("$JS.API.CONSUMER.CREATE.TC_OUTPUTS", reading(OTHERS)),
        ("$JS.API.CONSUMER.DURABLE.CREATE.TC_OUTPUTS.mine", reading(OTHERS, durable_name="mine")),
        ("$JS.API.CONSUMER.LIST.TC_OUTPUTS", None),
        ("$JS.API.CONSUMER.NAMES.TC_OUTPUTS", None),
        ("$JS.API.STREAM.MSG.GET.TC_OUTPUTS", {"last_by_subj": OTHERS}),
        ("$JS.API.STREAM.MSG.GET.TC_INPUTS", {"seq": 1}),
        ("$JS.API.DIRECT.GET.TC_OUTPUTS", {"seq": 1}),
        (f"$JS.API.DIRECT.GET.TC_OUTPUTS.{OTHERS}", None),
        ("$JS.API.STREAM.PURGE.TC_INPUTS", None),
        ("$JS.API.STREAM.DELETE.TC_INPUTS", None),
        ("$JS.API.STREAM.MSG.DELETE.TC_INPUTS", {"seq": 1}),
        ("$JS.API.STREAM.SNAPSHOT.TC_OUTPUTS", {"deliver_subject": "_INBOX.worker-0.x"}),
        ("$JS.API.STREAM.CREATE.COPY", {"name": "COPY", "sources": [{"name": "TC_OUTPUTS"}]}),
    ],
)
async def test_a_worker_reads_nothing_of_others_out_of_a_stream(
    refusing: NatsServer, subject: str, body: dict[str, Any] | None
) -> None:
    """However it asks JetStream: what the subject lets through, the server holds against the body."""
    async with connected(refusing, "scheduler") as (scheduler,):
        await scheduler.ensure_streams(LIMITS)
        await scheduler.append(subjects.cell_input(), b"input")
        for output in (OTHERS, OWN):
            await scheduler.publish(output, b"plan")
        await scheduler.flush()
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    async with Caller.connected(refusing, "worker-0") as caller:
        await caller.client.subscribe("_INBOX.worker-0.x", cb=hear)
        answer = await caller.ask(subject, body)
        # What a consumer would deliver comes before the answer to a later call.
        control = await caller.ask(f"$JS.API.CONSUMER.CREATE.TC_OUTPUTS.own.{OWN}", reading(OWN, name="own"))
        await round_trip(caller.client)

    assert answer is None or "error" in answer
    assert control is not None
    assert "error" not in control
    assert set(heard) <= {OWN}


async def test_what_a_worker_has_delivered_elsewhere_is_not_taken_for_that(server: NatsServer) -> None:
    """JetStream delivers to any subject that a reader of a stream names, past its permissions: who listens there sees
    under which subject a message was stored, and neither subscribers nor readers of a stream take it.
    """
    own_input = subjects.worker_input("worker-0")
    plans: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(delivery: Delivery) -> None:
        plans.put_nowait(delivery.data)

    async with connected(server, "scheduler", "worker-1", "worker-0") as (scheduler, victim, worker):
        await scheduler.ensure_streams(LIMITS)
        await victim.subscribe(OTHERS, hear)
        await worker.append(own_input, b"forged plan")
        await scheduler.publish(OWN, b"plan")
        await scheduler.flush()
        body = reading(own_input, deliver_subject=OTHERS) | {"stream_name": "TC_INPUTS"}
        async with Caller.connected(server, "worker-0") as caller:
            made = await caller.ask(f"$JS.API.CONSUMER.CREATE.TC_INPUTS.mine.{own_input}", body)
            async with asyncio.timeout(ANSWER_S):
                while (await scheduler.stream_info(subjects.OUTPUTS_STREAM)).last_seq < 2:
                    await asyncio.sleep(0.01)
        await scheduler.publish(OTHERS, b"true plan")
        first = await asyncio.wait_for(plans.get(), ANSWER_S)
        await scheduler.flush()
        outputs = await stored(scheduler, subjects.OUTPUTS_STREAM, ">")

    assert made is not None
    assert "error" not in made
    assert first == b"true plan"
    assert outputs == [b"plan", b"true plan"]


CALLED = {
    "worker-0": subjects.rpc("worker", "outputs", "worker-0"),
    "storage-0": subjects.rpc("storage", "verify", "storage-0"),
    "scheduler": subjects.rpc("scheduler", "status"),
}
LEAD = f"$KV.{subjects.RECORD_BUCKET}.scheduler"
TARGETS = [
    f"$KV.{subjects.KEPT_BUCKET}.a.b.c",
    LEAD,
    subjects.gateway_output(GATEWAY),
    subjects.worker_output("worker-1"),
    subjects.cell_input(),
]


@asynccontextmanager
async def obliging(server: NatsServer, user: str) -> AsyncIterator[tuple[Any, list[str]]]:
    """A process that answers calls to any reply subject, as Thermocline did before 0.3.0; and what it is denied."""
    errors: list[str] = []

    async def errored(error: Exception) -> None:
        errors.append(str(error).lower())

    async def answer(message: Any) -> None:
        await message.respond(b"answer")

    client = await nats.connect(url(server, user), inbox_prefix=f"_INBOX.{user}", error_cb=errored)
    try:
        await client.subscribe(CALLED[user], cb=answer)
        await round_trip(client)
        yield client, errors
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("caller", "called", "subject"),
    [
        ("storage-0", "worker-0", subjects.rpc("worker", "store", "worker-0")),
        ("storage-0", "storage-0", subjects.rpc("storage", "pool", "storage-0")),
        ("storage-0", "scheduler", subjects.rpc("scheduler", "standing")),
        ("worker-1", "storage-0", subjects.rpc("storage", "sparse", "storage-0")),
        ("operator", "scheduler", subjects.rpc("scheduler", "status")),
        ("operator", "worker-0", subjects.rpc("worker", "inventory", "worker-0")),
        ("operator", "storage-0", subjects.rpc("storage", "inventory", "storage-0")),
    ],
)
async def test_who_may_call_is_answered(refusing: NatsServer, caller: str, called: str, subject: str) -> None:
    """The inboxes of all that call a kind are open to it."""
    with capture_logs() as logged:
        async with connected(refusing, caller, called) as (asking, answering):
            serving = await answering.serve(subject, echo)
            assert await asking.call(subject, b"?", timeout_s=ANSWER_S) == b"?"
            await serving.close()

    assert denied(logged) == []


@pytest.mark.parametrize(
    ("user", "others"),
    [
        ("worker-0", ["_INBOX.scheduler.guessed", "_INBOX.worker-1.guessed", "_INBOX.guessed"]),
        ("storage-0", ["_INBOX.scheduler.guessed", "_INBOX.guessed"]),
        ("scheduler", ["_INBOX.worker-0.guessed", "_INBOX.guessed"]),
    ],
)
async def test_answers_go_into_the_inboxes_of_callers(refusing: NatsServer, user: str, others: list[str]) -> None:
    """A process may publish into no inbox of a user that does not call it."""
    async with connected(refusing, "gateway") as (gateway,), obliging(refusing, user) as (client, errors):
        answer = await gateway.call(CALLED[user], b"")
        for subject in others:
            await client.publish(subject, b"forged")
        await until(lambda: len(errors) == len(others))  # The client tells of them in a task of its own.

    assert answer == b"answer"
    assert all("permissions violation" in text for text in errors)


@pytest.mark.parametrize(
    ("deputy", "targets"), [("worker-0", TARGETS), ("storage-0", TARGETS), ("scheduler", TARGETS[:1])]
)
async def test_no_process_writes_for_a_caller_into_a_stream(
    refusing: NatsServer, deputy: str, targets: list[str]
) -> None:
    """The server takes no answer to a reply subject of a stream, not even of a process that would give it."""
    async with (
        connected(refusing, "scheduler", "operator", "gateway") as (scheduler, caller, gateway),
        obliging(refusing, deputy) as (_, errors),
    ):
        await scheduler.ensure_streams(LIMITS)
        streams = subjects.INPUTS_STREAM, subjects.OUTPUTS_STREAM
        before = [await scheduler.stream_info(stream) for stream in streams], await scheduler.read_record("scheduler")
        for target in targets:
            await caller._client.publish(CALLED[deputy], b"?", reply=target)  # type: ignore[attr-defined]
        await caller.call(CALLED[deputy], b"?")
        after = [await scheduler.stream_info(stream) for stream in streams], await scheduler.read_record("scheduler")
        kept = await gateway.kept("a.b.c")
        await until(lambda: len(errors) == len(targets))

    assert after == before
    assert kept is None


async def test_a_call_with_a_reply_subject_that_is_no_inbox_is_dropped(server: NatsServer) -> None:
    """A storage neither handles nor answers it, whatever its user may publish; it counts it, and answers the next."""
    handled: list[bytes] = []
    counted = partial(REGISTRY.get_sample_value, "thermocline_bus_calls_misdirected_total")
    before = counted()

    async def handle(data: bytes) -> bytes:
        handled.append(data)
        return data

    async with connected(server, "scheduler", "operator") as (scheduler, operator):
        await scheduler.ensure_streams(LIMITS)
        await operator.serve(CALLED["storage-0"], handle)
        for target in (*TARGETS, "_INBOX", "_INBOX.", "_INBOX.gateway.>", "_INBOX.*.a", "_INBOXES.a"):
            await operator._client.publish(CALLED["storage-0"], b"deputy", reply=target)  # type: ignore[attr-defined]
        answer = await operator.call(CALLED["storage-0"], b"call")
        inputs = await stored(scheduler, subjects.INPUTS_STREAM, ">")
        outputs = await stored(scheduler, subjects.OUTPUTS_STREAM, ">")
        lead = await scheduler.read_record("scheduler")

    assert (handled, answer) == ([b"call"], b"call")
    assert (inputs, outputs, lead) == ([], [], None)
    assert before is not None
    assert counted() == before + len(TARGETS) + 5


async def test_reply_subjects_tell_nothing_of_the_next(server: NatsServer) -> None:
    """A process that was called once could otherwise answer in the place of others, whose callers are the same."""
    replies: list[str] = []
    async with connected(server, "operator") as (operator,):

        async def hear(message: Any) -> None:
            replies.append(message.reply)
            await message.respond(b"")

        await operator._client.subscribe("tc.rpc.scheduler.status", cb=hear)  # type: ignore[attr-defined]
        for _ in range(2):
            await operator.call("tc.rpc.scheduler.status", b"")
        inbox = operator._client.new_inbox()  # type: ignore[attr-defined]

    tokens = [token for reply in (*replies, inbox) for token in reply.split(".")[2:]]
    assert len({token[:12] for token in tokens}) == 4  # The two share the one of the connection.


async def test_one_user_for_all_workers_tells_kinds_apart(tmp_path: Path) -> None:
    """Where workers draw their names: any of them may be any worker, but none may be a gateway."""
    with served_with(tmp_path, cell_users(["*"], ["*"])) as server:
        async with connected(server, "scheduler", "worker") as (scheduler, worker):
            await scheduler.ensure_streams(LIMITS)
            await worker.subscribe(subjects.worker_output("worker-drawn"), ignore)
            await worker.append(subjects.worker_input("worker-drawn"), b"event")
            plans = await stored(worker, subjects.OUTPUTS_STREAM, subjects.worker_output("worker-drawn"))
            with pytest.raises(ConfigError, match="does not let us subscribe"):
                await worker.subscribe(subjects.gateway_output(GATEWAY), ignore)
            with pytest.raises(Unavailable, match="does not let us publish"):
                await worker.append(subjects.request_input(GATEWAY), b"forged")

    assert plans == []


async def test_the_users_take_the_place_of_a_single_one(tmp_path: Path) -> None:
    """A configuration that has one user for everybody and then includes ours knows only ours."""
    passwords = {user.name: nats_quoted(user.name[::-1]) for user in USERS}
    single = "authorization { user: thermocline, password: everybody }\n"
    with NatsServer(tmp_path, config=single + authorization_text(USERS, passwords)) as server:
        async with connected(server, "operator"):
            with pytest.raises(ConfigError, match="does not accept our credentials"):
                await connect([server.url.replace("://", "://thermocline:everybody@")], "test")


def denied(logged: Any) -> list[Any]:
    return [entry for entry in logged if entry["event"] == "broker_denies"]
