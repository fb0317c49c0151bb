"""The answer bucket: a JetStream key/value store of sealed token ids of answers, which gateways share.

A cache, and nothing else: the oldest entries are dropped at its bounds of size and age, and an unreadable entry is a
miss. Names are digests that only a process with the conversation can form; entries are read by name alone, so that a
gateway's user needs no permission to list them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from shared import subjects
from shared.bus import jetstream, key_value, requests
from shared.bus.protocol import StreamLimits
from shared.errors import Unavailable

STREAM = key_value.stream_of(subjects.ANSWER_BUCKET)

MAX_BYTES = 256 * 2**20
MAX_AGE_S = 7 * 24 * 3600

AT_ONCE = 64
"""Reads in flight at once for one caller."""

_NOT_FOUND = "404"


def bucket_config(limits: StreamLimits) -> dict[str, Any]:
    """Return the configuration of the stream behind the bucket."""
    return key_value.config_of(
        subjects.ANSWER_BUCKET, limits, discard="old", max_bytes=MAX_BYTES, max_age=MAX_AGE_S * 10**9
    )


def subject(name: str) -> str:
    """Return the subject under which the bucket holds the entry of a name."""
    return key_value.subject_of(subjects.ANSWER_BUCKET, name)


async def read(client: Any, names: Sequence[str], timeout_s: float) -> dict[str, bytes | None]:
    """Return the entries of these names, None for a missing one; those later than ``timeout_s`` are left out.

    Raises Unavailable when none came.
    """
    if not names:
        return {}
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> bytes | None:
        async with gate:
            reply = await requests.request(client, f"$JS.API.DIRECT.GET.{STREAM}.{subject(name)}", b"", timeout_s)
        status = (reply.headers or {}).get("Status", "")
        if status and status != _NOT_FOUND:
            raise Unavailable(f"the answer bucket answers {status}")
        return None if status else bytes(reply.data)

    tasks = {name: asyncio.create_task(one(name)) for name in names}
    try:
        await asyncio.wait(tasks.values(), timeout=timeout_s)
    finally:
        for task in tasks.values():
            task.cancel()
    ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
    found = {name: got for name, got in zip(tasks, ended, strict=True) if not isinstance(got, BaseException)}
    if not found:
        first = next(iter(ended))
        raise Unavailable(f"the answer bucket does not answer: {first!r}")
    return found


async def write(client: Any, name: str, data: bytes, timeout_s: float) -> None:
    """Store an entry, replacing one of the same name. Raises Unavailable or TransportError."""
    answer = await key_value.ask(client, subject(name), data, timeout_s, what="the answer bucket")
    if "error" in answer:
        jetstream.raise_api_error(answer["error"], "store an answer")
