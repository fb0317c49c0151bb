"""The record bucket: a JetStream key/value store of small records, each replaced by compare-and-set.

It has no time to live. Who holds a lead is for its observers to judge, by their own clocks; what stays in the
record tells a successor where the last holder was.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import nats.errors

from shared import subjects
from shared.bus import jetstream, requests
from shared.bus.protocol import Record, StreamLimits
from shared.errors import TransportError, Unavailable
from shared.undecodable import UNDECODABLE

STREAM = f"KV_{subjects.RECORD_BUCKET}"

# JetStream's own error numbers ("err_code").
_NO_MESSAGE = 10037
_WRONG_LAST_SEQUENCE = (10070, 10071, 10164)

_EXPECTED_HEADER = "Nats-Expected-Last-Subject-Sequence"


def bucket_config(limits: StreamLimits) -> dict[str, Any]:
    """The stream behind the bucket, laid out as JetStream's key/value stores are. Each record is kept once."""
    return {
        "name": STREAM,
        "subjects": [f"$KV.{subjects.RECORD_BUCKET}.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_msgs_per_subject": 1,
        "max_bytes": -1,
        "num_replicas": limits.replicas,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_direct": True,
    }


def _subject(name: str) -> str:
    return f"$KV.{subjects.RECORD_BUCKET}.{name}"


async def read(client: Any, name: str, timeout_s: float) -> Record | None:
    """The record as the stream's leader has it. Raises Unavailable or TransportError."""
    verb = f"STREAM.MSG.GET.{STREAM}"
    answer = await _ask(client, f"$JS.API.{verb}", msgspec.json.encode({"last_by_subj": _subject(name)}), timeout_s)
    if "error" in answer:
        if answer["error"].get("err_code") == _NO_MESSAGE:
            return None
        jetstream.raise_api_error(answer["error"], verb)
    message = answer["message"]
    return Record(message["seq"], base64.b64decode(message.get("data", "")))


async def write(client: Any, name: str, data: bytes, revision: int, timeout_s: float) -> int | None:
    """Replace the record of this revision; None when it has another. Raises Unavailable or TransportError."""
    answer = await _ask(client, _subject(name), data, timeout_s, {_EXPECTED_HEADER: str(revision)})
    if "error" in answer:
        if answer["error"].get("err_code") in _WRONG_LAST_SEQUENCE:
            return None
        jetstream.raise_api_error(answer["error"], "write a record")
    written: int = answer["seq"]
    return written


async def _ask(
    client: Any, subject: str, data: bytes, timeout_s: float, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    try:
        reply = await requests.request(client, subject, data, timeout_s, headers)
    except (nats.errors.Error, OSError) as error:
        raise Unavailable(f"the record bucket does not answer: {error!r}") from error
    try:
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
    except UNDECODABLE as error:
        raise TransportError("the record bucket answered in words unknown") from error
    return answer
