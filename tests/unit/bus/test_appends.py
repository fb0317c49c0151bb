"""Acknowledgements of appends, as the servers of several releases word them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shared.bus.appends import Appender
from shared.errors import ThermoclineError, TransportError, Unavailable


class Incoming:
    """A message as the client hands it over."""

    headers = None

    def __init__(self, subject: str, answer: dict[str, Any]) -> None:
        self.subject, self.data = subject, msgspec.json.encode(answer)


class Client:
    """Acknowledges every message with the same answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer
        self._hearer: Any = None

    def new_inbox(self) -> str:
        return "_INBOX.one"

    async def hear(self, subject: str, hearer: Any) -> None:
        self._hearer = hearer

    async def publish(self, subject: str, data: bytes, reply: str, headers: Any) -> None:
        asyncio.get_running_loop().call_soon(self._hearer, Incoming(reply, self._answer))


async def appended(answer: dict[str, Any]) -> int:
    appender = Appender()
    await appender.attach(Client(answer))
    return await appender.append("tc.in.cell", b"x", "m", 5.0)


async def test_a_repeat_of_what_is_stored_has_its_sequence() -> None:
    """So a caller that repeats an append learns where it is."""
    assert await appended({"stream": "TC_INPUTS", "seq": 7, "duplicate": True}) == 7


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # NATS 2.10 answers so while a first attempt is in process, which may never be stored.
        ({"stream": "TC_INPUTS", "seq": 0, "duplicate": True}, Unavailable),
        ({"error": {"code": 409, "err_code": 10158, "description": "is in process"}}, Unavailable),
        ({"error": {"code": 400, "err_code": 10002, "description": "resource limits exceeded"}}, Unavailable),
        ({"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence"}}, TransportError),
        ({"stream": "TC_INPUTS"}, TransportError),
    ],
)
async def test_what_is_not_known_to_be_stored_is_an_error(
    answer: dict[str, Any], expected: type[ThermoclineError]
) -> None:
    """Unavailable where another attempt may store it."""
    with pytest.raises(expected):
        await appended(answer)
