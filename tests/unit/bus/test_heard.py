"""Messages cut out of what the server sent, and heard in the turn in which they come."""

from __future__ import annotations

import asyncio
from typing import Any

import nats.aio.client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.access import from_urls
from shared.bus.client import Client
from shared.bus.heard import Heard, cut, parse_headers

HEAD = b"NATS/1.0\r\nNats-Msg-Id: one\r\n\r\n"


def message(number: int, data: bytes, *, reply: str = "", head: bytes = b"") -> bytes:
    """A message as a server sends it."""
    name = f"{'HMSG' if head else 'MSG'} tc.status {number} {reply + ' ' if reply else ''}"
    sizes = f"{len(head)} {len(head) + len(data)}" if head else str(len(data))
    return f"{name}{sizes}\r\n".encode() + head + data + b"\r\n"


@pytest.mark.parametrize("reply", ["", "_INBOX.a.1"])
@pytest.mark.parametrize("head", [b"", HEAD])
def test_a_whole_message_is_cut_out(reply: str, head: bytes) -> None:
    """With its subscription, headers and reply subject, and wherever it begins."""
    found = cut(b"+OK\r\n" + message(7, b"a\r\nb", reply=reply, head=head) + b"PING\r\n", 5)
    assert found is not None
    heard = found.message

    assert (found.number, heard.subject, heard.reply, heard.data) == (7, "tc.status", reply, b"a\r\nb")
    assert heard.headers == ({"Nats-Msg-Id": "one"} if head else {})
    assert found.end == 5 + len(message(7, b"a\r\nb", reply=reply, head=head))


@pytest.mark.parametrize("head", [b"", HEAD])
def test_a_message_that_is_not_whole_is_left(head: bytes) -> None:
    """At whatever byte it ends."""
    whole = message(7, b"data", reply="_INBOX.a", head=head)

    assert [cut(whole[:length], 0) for length in range(len(whole))] == [None] * len(whole)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"PING\r\n",
        b"-ERR 'x'\r\n",
        b"MSG a 1\r\n\r\n",
        b"MSG a 1 r s 0\r\n\r\n",
        b"MSG a x 0\r\n\r\n",
        b"MSG a 1 -1\r\n\r\n",
        b"HMSG a 1 5 3\r\nabc\r\n",
        b"HMSG a 1 -1 0\r\n\r\n",
        b"MSG \xff 1 0\r\n\r\n",
    ],
)
def test_everything_else_is_left(data: bytes) -> None:
    """nats-py reads it, or says what is wrong with it."""
    assert cut(data, 0) is None


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"NATS/1.0\r\n\r\n", {}),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503"}),
        (b"NATS/1.0 404 No Messages\r\n\r\n", {"Status": "404", "Description": "No Messages"}),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 3\r\n\r\n",
            {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Consumer": "3"},
        ),
        (b"NATS/1.0\r\nA:b:c \r\nno header\r\n: no name\r\nd: \xff\r\n\r\n", {"A": "b:c", "d": "\ufffd"}),
    ],
)
def test_headers_are_read(block: bytes, expected: dict[str, str]) -> None:
    """Those of the server's own word say what it is about."""
    assert parse_headers(block) == expected


@given(
    kinds=st.lists(st.sampled_from(["short", "head", "long", "other"]), max_size=8),
    cuts=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    waits=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_messages_are_heard_in_order_however_they_come(kinds: list[str], cuts: list[int], waits: list[bool]) -> None:
    """Whole ones at once, others by nats-py's task that reads; none overtakes another, none is lost or repeated."""
    sent = b""
    for place, kind in enumerate(kinds):
        data = b"%d" % place + b"x" * (700 if kind == "long" else 0)
        sent += b"+OK\r\n" if kind == "other" else message(1, data, head=HEAD if kind == "head" else b"")
    pieces: list[bytes] = []
    while sent:
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(sent[:size])
        sent = sent[size:]

    heard = asyncio.run(_heard(pieces, waits))

    assert heard == [place for place, kind in enumerate(kinds) if kind != "other"]


async def _heard(pieces: list[bytes], waits: list[bool]) -> list[int]:
    """What a client hears of these pieces; the loop may turn between two of them."""
    client, heard = Client(from_urls(["nats://127.0.0.1:1"])), list[int]()

    def hear(message: Any) -> None:
        assert isinstance(message, Heard)
        heard.append(int(message.data.rstrip(b"x")))

    reader = asyncio.StreamReader()
    client._transport._io_reader = reader
    client._status = nats.aio.client.Client.CONNECTED
    client._hearers[1] = hear
    client._transport.on_bytes(client._hear_now)
    reading = asyncio.create_task(client._read_loop())
    for place, piece in enumerate(pieces):
        if waits[place % len(waits)]:
            await asyncio.sleep(0)
        reader.feed_data(piece)
    for _ in range(10 + 4 * len(pieces)):  # Turns of the loop, which are more than the reading takes.
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return heard
