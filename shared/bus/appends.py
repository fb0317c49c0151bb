"""Appends with acknowledgements, many at once over one reply subject.

In a cluster, a message published on a subject that a stream captures is stored by a server of the cluster's choice, so
a round trip to the server that we talk to proves nothing there. Such messages are acknowledged as appends are, and
``captured`` waits for all of them together.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.bus.jetstream import raise_api_error
from shared.errors import PayloadTooLarge, TransportError, Unavailable
from shared.undecodable import UNDECODABLE

_JSON = msgspec.json.Decoder()


class Appender:
    """Appends and captured publications of one bus, matched to their acknowledgements. Used on the event loop only."""

    def __init__(self) -> None:
        """Begin without a client, which :meth:`attach` gives before the first message."""
        self._client: Any = None
        self._inbox = ""
        self._numbers = itertools.count(1)
        self._waiting: dict[str, tuple[str, asyncio.Future[int]]] = {}
        self._captures: set[str] = set()
        self._is_capture_lost = False

    async def attach(self, client: Any) -> None:
        """Receive acknowledgements over this client from now on."""
        self._client = client
        self._inbox = client.new_inbox()
        await client.hear(f"{self._inbox}.*", self._acknowledged)

    async def append(self, subject: str, data: bytes, message_id: str, timeout_s: float) -> int:
        """Publish a message and return its sequence number. Raises Unavailable or PayloadTooLarge."""
        token, acknowledged = self._expect(subject)
        timer = asyncio.get_running_loop().call_later(
            timeout_s, self._fail, token, f"no acknowledgement of {subject} within {timeout_s} s"
        )
        headers = {"Nats-Msg-Id": message_id} if message_id else None
        try:
            await self._client.publish(subject, data, reply=f"{self._inbox}.{token}", headers=headers)
            return await acknowledged
        finally:
            timer.cancel()
            self._waiting.pop(token, None)

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        """Publish a message that a stream captures; :meth:`captured` tells whether it was stored."""
        token, acknowledged = self._expect(subject)
        self._captures.add(token)
        acknowledged.add_done_callback(lambda done: self._capture_ended(token, done))
        try:
            await self._client.publish(
                subject, data, reply=f"{self._inbox}.{token}", headers=dict(headers) if headers else None
            )
        except BaseException as error:
            self._fail(token, f"it could not be sent: {error!r}")
            raise

    async def captured(self, timeout_s: float) -> None:
        """Wait until all published messages are stored. Raises Unavailable when any of them may not be."""
        waiting = [self._waiting[token][1] for token in self._captures]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        for token in list(self._captures):
            if self._waiting[token][1] in waiting:
                self._fail(token, f"no acknowledgement within {timeout_s} s")
        # Callbacks of futures run in the loop's next turn.
        await asyncio.sleep(0)
        is_lost, self._is_capture_lost = self._is_capture_lost, False
        if is_lost:
            raise Unavailable("a stream may not have stored all published messages")

    def deny(self, subject: str) -> None:
        """Fail what waits for ``subject`` (in lower case): the server does not let us publish there."""
        for token, (waiting, _) in list(self._waiting.items()):
            if waiting.lower() == subject:
                self._fail(token, f"the broker does not let us publish to {waiting}")

    def fail_all(self, reason: str) -> None:
        """Fail all that wait for acknowledgements of a connection that is gone."""
        for token in list(self._waiting):
            self._fail(token, reason)

    def _expect(self, subject: str) -> tuple[str, asyncio.Future[int]]:
        token = str(next(self._numbers))
        acknowledged: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (subject, acknowledged)
        return token, acknowledged

    def _capture_ended(self, token: str, done: asyncio.Future[int]) -> None:
        self._captures.discard(token)
        self._waiting.pop(token, None)
        if done.cancelled() or done.exception() is not None:
            self._is_capture_lost = True

    def _fail(self, token: str, reason: str) -> None:
        _, future = self._waiting.get(token, ("", None))
        if future is not None and not future.done():
            future.set_exception(Unavailable(reason))

    def _acknowledged(self, reply: Any) -> None:
        _, future = self._waiting.get(reply.subject.rpartition(".")[2], ("", None))
        if future is None or future.done():
            return
        if reply.headers and reply.headers.get("Status") == "503":
            future.set_exception(Unavailable("no stream captures this subject"))
            return
        try:
            answer = _JSON.decode(reply.data)
            if "error" in answer:
                raise_api_error(answer["error"], "append")
            if not answer["seq"]:
                # NATS 2.10: what was stored with this message id is still in process, or was lost with its leader.
                raise Unavailable("append: an earlier attempt is in process")
            future.set_result(answer["seq"])
        except (PayloadTooLarge, Unavailable, TransportError) as error:
            future.set_exception(error)
        except (*UNDECODABLE, KeyError) as error:
            future.set_exception(TransportError(f"JetStream acknowledged in words unknown: {error!r}"))
