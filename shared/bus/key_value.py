"""The common part of the buckets of records, answers and responses: JetStream's key/value layout, and calls."""

from __future__ import annotations

from typing import Any

import msgspec
import nats.errors

from shared.bus import requests
from shared.bus.protocol import StreamLimits
from shared.errors import TransportError, Unavailable
from shared.undecodable import UNDECODABLE


def stream_of(bucket: str) -> str:
    """Return the name of the stream behind a bucket."""
    return f"KV_{bucket}"


def subject_of(bucket: str, name: str) -> str:
    """Return the subject of an entry; ``name`` may hold wildcards."""
    return f"$KV.{bucket}.{name}"


def config_of(bucket: str, limits: StreamLimits, **bounds: Any) -> dict[str, Any]:
    """Return the stream's configuration, with one message for each entry. ``bounds`` limit the entries."""
    return {
        "name": stream_of(bucket),
        "subjects": [subject_of(bucket, ">")],
        "retention": "limits",
        "storage": "file",
        "max_msgs_per_subject": 1,
        "num_replicas": limits.replicas,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_direct": True,
        **bounds,
    }


async def ask(
    client: Any, subject: str, data: bytes, timeout_s: float, *, what: str, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the server's answer, which may hold an error; ``what`` names the bucket in errors.

    Raises Unavailable without an answer, TransportError for one that is not JSON.
    """
    try:
        reply = await requests.request(client, subject, data, timeout_s, headers)
    except (nats.errors.Error, OSError) as error:
        raise Unavailable(f"{what} does not answer: {error!r}") from error
    try:
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
    except UNDECODABLE as error:
        raise TransportError(f"{what} answered in words unknown") from error
    return answer
