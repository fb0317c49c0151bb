"""How an answer is sent as it grows: at once where the connection takes it, and in order whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from services.gateway import sse
from services.gateway.assembly import Delta
from services.gateway.event_stream import WRITE_EXTENSION, EventStream, StreamTimes
from services.gateway.pending import Choice, Generation
from services.gateway.ticket import Ticket
from services.gateway.views.answer import Wanted
from services.gateway.views.completion_view import CompletionView
from shared.messages.tokens import TokenItem
from tests.unit.gateway.test_views import HEAD, TEXTS, generation
from tests.virtual_loop import run_virtually

TEXT = b'"text":"'


class Held:
    """The part of a ticket that a stream needs."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Connection:
    """What was sent, and by which way; ``takes`` says whether the connection takes more at once."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.takes = True
        self.changed = asyncio.Event()

    def write(self, data: bytes) -> bool:
        if self.takes:
            self.note("written", data)
        return self.takes

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.note("sent", message["body"])

    def note(self, way: str, data: bytes) -> None:
        self.sent.append((way, data))
        self.changed.set()

    async def more(self) -> tuple[str, list[str]]:
        """The way of what comes next, and its texts."""
        while not self.sent:
            self.changed.clear()
            await self.changed.wait()
        way, data = self.sent.pop(0)
        return way, [part.partition(b'"')[0].decode() for part in data.split(TEXT)[1:]]


@asynccontextmanager
async def streaming(
    made: Generation, view: CompletionView | None = None, keepalive_s: float = 60.0
) -> AsyncIterator[tuple[Connection, asyncio.Task[None]]]:
    """A stream whose first token has been sent."""
    made.is_streaming = True
    connection, held = Connection(), Held()
    view = view or CompletionView(made, HEAD, Wanted(), TEXTS, lambda: 0)
    stream = EventStream(made, view, cast(Ticket, held), StreamTimes(keepalive_s=keepalive_s, send_s=5.0), None)
    say(made.choices[0], 0, "first")
    scope = {"extensions": {WRITE_EXTENSION: connection.write}}
    task = asyncio.create_task(stream(scope, cast(Any, None), connection.send))
    assert await connection.more() == ("written", ["first"])
    await asyncio.sleep(0)
    try:
        yield connection, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert held.is_closed
        assert made.take_news is None


def say(choice: Choice, index: int, text: str, finish: Any = None) -> None:
    item = TokenItem(request_id=choice.request_id, attempt=1, index=index, tokens=(1,), text=text, finish=finish)
    choice.accept("w", item, 1.0)


async def test_news_are_written_at_once_and_the_end_is_sent() -> None:
    """The task that answers is woken for the end alone."""
    made = generation()
    async with streaming(made) as (connection, task):
        say(made.choices[0], 1, "a")
        assert await connection.more() == ("written", ["a"])
        say(made.choices[0], 2, "b", finish="length")

        assert await connection.more() == ("sent", ["b"])
        await task


async def test_choices_share_a_write() -> None:
    """All that a step brings is one."""
    made = generation(n=2)
    async with streaming(made) as (connection, _):
        say(made.choices[0], 1, "a")
        say(made.choices[1], 0, "b")
        say(made.choices[0], 2, "c")

        assert await connection.more() == ("written", ["ac", "b"])


async def test_what_a_connection_does_not_take_is_sent_later_and_in_order() -> None:
    """Nothing is lost or overtaken, and later news are written again."""
    made = generation()
    async with streaming(made) as (connection, _):
        connection.takes = False
        say(made.choices[0], 1, "a")
        assert await connection.more() == ("sent", ["a"])
        await asyncio.sleep(0)
        connection.takes = True
        say(made.choices[0], 2, "b")

        assert await connection.more() == ("written", ["b"])


async def test_a_chunk_that_cannot_be_made_ends_the_stream() -> None:
    """The fault is the task's, as it was before anything was written at once."""

    class Broken(CompletionView):
        def chunk(self, choice: Choice, delta: Delta) -> bytes | None:
            if delta.text == "a":
                raise ValueError("no chunk")
            return super().chunk(choice, delta)

    made = generation()
    async with streaming(made, Broken(made, HEAD, Wanted(), TEXTS, lambda: 0)) as (_, task):
        say(made.choices[0], 1, "a")

        with pytest.raises(ValueError, match="no chunk"):
            await task


def test_a_quiet_stream_is_kept_alive_from_its_last_write_on() -> None:
    """Not from when somebody began to wait."""

    async def scenario() -> None:
        made, loop = generation(), asyncio.get_running_loop()
        async with streaming(made, keepalive_s=10.0) as (connection, _):
            begun = loop.time()
            await asyncio.sleep(7.0)
            say(made.choices[0], 1, "a")
            assert await connection.more() == ("written", ["a"])

            assert await connection.more() == ("written", [])
            assert loop.time() - begun == pytest.approx(17.0, abs=0.1)

    run_virtually(scenario())


@pytest.mark.parametrize("framing", [sse.DATA_ONLY, sse.NAMED], ids=["data only", "named"])
def test_a_stream_without_a_token_opens_by_its_framing(framing: sse.Framing) -> None:
    """Clients take the first chunk with a choice for the first token, and know an event of the beginning by its name.

    An answer that waits is kept alive in both.
    """

    class View(CompletionView):
        def opening(self) -> list[bytes]:
            return [b"role"]

    View.framing = dataclasses.replace(framing, event=sse.event)

    async def scenario() -> list[bytes]:
        made, connection, loop = generation(), Connection(), asyncio.get_running_loop()
        made.is_streaming = True
        view = View(made, HEAD, Wanted(), TEXTS, lambda: 0)
        stream = EventStream(made, view, cast(Ticket, Held()), StreamTimes(keepalive_s=10.0, send_s=5.0), None)
        scope = {"extensions": {WRITE_EXTENSION: connection.write}}
        task = asyncio.create_task(stream(scope, cast(Any, None), connection.send))
        loop.call_later(12.0, say, made.choices[0], 0, "a")
        loop.call_later(13.0, say, made.choices[0], 1, "b", "length")
        await task
        return [data.split(b"{")[0] for _, data in connection.sent]

    role, token = b"data: role\n\n", b"data: "
    late = [framing.keepalive, role + token, token]
    assert run_virtually(scenario()) == (late if framing is sse.DATA_ONLY else [role, framing.keepalive, token, token])


@pytest.mark.parametrize("finish", [None, "length"])
@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("earlier_s", [0.0, 1e-10])
def test_what_comes_as_a_keepalive_falls_due_is_sent(earlier_s: float, takes: bool, finish: str | None) -> None:
    """In the same turn of the event loop, before or after the timer, and also if it is the end of the answer."""

    async def scenario() -> list[str]:
        made, loop = generation(), asyncio.get_running_loop()
        async with streaming(made, keepalive_s=10.0) as (connection, task):
            connection.takes = takes
            loop.call_at(loop.time() + 10.0 - earlier_s, say, made.choices[0], 1, "a", finish)
            if finish is None:
                loop.call_later(11.0, say, made.choices[0], 2, "b", "length")
            await task
            texts: list[str] = []
            while connection.sent:
                texts += (await connection.more())[1]
            return texts

    assert run_virtually(scenario()) == (["a"] if finish else ["a", "b"])
