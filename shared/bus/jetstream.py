"""Plain requests to JetStream's API and acknowledged appends, over a connected nats client.

The wire format is JetStream's documented JSON API; times are nanoseconds there.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import nats.errors

from shared import subjects
from shared.bus.protocol import StreamInfo, StreamLimits
from shared.errors import PayloadTooLarge, TransportError, Unavailable

DEDUPLICATION_WINDOW_NS = 120 * 10**9
BUCKET_STREAM = f"OBJ_{subjects.SNAPSHOT_BUCKET}"

API_TIMEOUT_S = 5.0

# JetStream's own error numbers ("err_code").
_STREAM_NOT_FOUND = 10059
_NAME_IN_USE = (10058, 10065)
_MESSAGE_TOO_LARGE = 10054

_JSON = msgspec.json.Decoder()


def raise_api_error(error: dict[str, Any], what: str) -> None:
    """Translate an ``error`` object of an answer."""
    number, described = error.get("err_code", 0), error.get("description", "unknown error")
    if number == _MESSAGE_TOO_LARGE:
        raise PayloadTooLarge(f"{what}: {described}")
    if error.get("code", 0) >= 500:
        # No leader, no space, shutting down: states that pass.
        raise Unavailable(f"{what}: {described}")
    raise TransportError(f"{what}: {described} ({number})")


async def request(client: Any, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call ``$JS.API.<verb>``; the answer may hold an ``error`` object. Raises Unavailable."""
    data = b"" if body is None else msgspec.json.encode(body)
    try:
        reply = await client.request(f"$JS.API.{verb}", data, timeout=API_TIMEOUT_S)
    except (nats.errors.Error, OSError) as error:
        raise Unavailable(f"JetStream does not answer {verb}: {error!r}") from error
    answer: dict[str, Any] = _JSON.decode(reply.data)
    return answer


async def checked_request(client: Any, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """As :func:`request`; an ``error`` object is raised."""
    answer = await request(client, verb, body)
    if "error" in answer:
        raise_api_error(answer["error"], verb)
    return answer


def stream_config(name: str, captured: list[str], limits: StreamLimits) -> dict[str, Any]:
    """A file-backed stream that drops its oldest messages at its limits."""
    return {
        "name": name,
        "subjects": captured,
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_bytes": limits.max_bytes,
        "max_age": int(limits.max_age_s * 1e9),
        "max_msgs": -1,
        "max_consumers": -1,
        "num_replicas": limits.replicas,
        "duplicate_window": min(DEDUPLICATION_WINDOW_NS, int(limits.max_age_s * 1e9) or DEDUPLICATION_WINDOW_NS),
        "allow_direct": True,
    }


def bucket_config(limits: StreamLimits) -> dict[str, Any]:
    """The stream behind the snapshot bucket, laid out as JetStream's object stores are."""
    bucket = subjects.SNAPSHOT_BUCKET
    return {
        "name": BUCKET_STREAM,
        "subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": -1,
        "num_replicas": limits.replicas,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
    }


async def ensure_stream(client: Any, config: dict[str, Any]) -> None:
    """Create a stream unless one of that name exists already, whatever its limits."""
    name = config["name"]
    answer = await request(client, f"STREAM.INFO.{name}")
    if "error" not in answer:
        return
    if answer["error"].get("err_code") != _STREAM_NOT_FOUND:
        raise_api_error(answer["error"], f"STREAM.INFO.{name}")
    answer = await request(client, f"STREAM.CREATE.{name}", config)
    # Another process may have created it since we asked.
    if "error" in answer and answer["error"].get("err_code") not in _NAME_IN_USE:
        raise_api_error(answer["error"], f"STREAM.CREATE.{name}")


async def stream_info(client: Any, name: str) -> StreamInfo:
    """Raises TransportError when there is no such stream."""
    state = (await checked_request(client, f"STREAM.INFO.{name}"))["state"]
    first = state["first_seq"] if state["messages"] else state["last_seq"] + 1
    return StreamInfo(first_seq=first, last_seq=state["last_seq"], nbytes=state["bytes"])


class Appender:
    """Appends many messages at once over one reply subject, each with its own acknowledgement."""

    def __init__(self) -> None:
        self._client: Any = None
        self._inbox = ""
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[int]] = {}

    async def attach(self, client: Any) -> None:
        """Receive acknowledgements over this client from now on."""
        self._client = client
        self._inbox = client.new_inbox()
        await client.subscribe(f"{self._inbox}.*", cb=self._acknowledged)

    async def append(self, subject: str, data: bytes, message_id: str, timeout_s: float) -> int:
        """Returns the sequence. Raises Unavailable or PayloadTooLarge."""
        token = str(next(self._numbers))
        loop = asyncio.get_running_loop()
        acknowledged: asyncio.Future[int] = loop.create_future()
        self._waiting[token] = acknowledged
        timer = loop.call_later(timeout_s, self._fail, token, f"no acknowledgement of {subject} within {timeout_s} s")
        headers = {"Nats-Msg-Id": message_id} if message_id else None
        try:
            await self._client.publish(subject, data, reply=f"{self._inbox}.{token}", headers=headers)
            return await acknowledged
        finally:
            timer.cancel()
            self._waiting.pop(token, None)

    def fail_all(self, reason: str) -> None:
        """The connection is gone and its acknowledgements with it."""
        for token in list(self._waiting):
            self._fail(token, reason)

    def _fail(self, token: str, reason: str) -> None:
        future = self._waiting.get(token)
        if future is not None and not future.done():
            future.set_exception(Unavailable(reason))

    async def _acknowledged(self, reply: Any) -> None:
        future = self._waiting.get(reply.subject.rpartition(".")[2])
        if future is None or future.done():
            return
        if reply.headers and reply.headers.get("Status") == "503":
            future.set_exception(Unavailable("no stream captures this subject"))
            return
        try:
            answer = _JSON.decode(reply.data)
            if "error" in answer:
                raise_api_error(answer["error"], "append")
            future.set_result(answer["seq"])
        except (PayloadTooLarge, Unavailable, TransportError) as error:
            future.set_exception(error)
        except (msgspec.DecodeError, KeyError) as error:
            future.set_exception(TransportError(f"JetStream acknowledged in words unknown: {error!r}"))
