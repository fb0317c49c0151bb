"""The record bucket: a JetStream key/value store of small records, each replaced by compare-and-set.

Records do not expire. Observers judge by their own clocks whether a lead still holds; the record tells a successor
where the last holder was.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from shared import subjects
from shared.bus import jetstream, key_value
from shared.bus.protocol import Record, StreamLimits

STREAM = key_value.stream_of(subjects.RECORD_BUCKET)

# JetStream's own error numbers ("err_code").
_NO_MESSAGE = 10037
_WRONG_LAST_SEQUENCE = (10070, 10071)

_EXPECTED_HEADER = "Nats-Expected-Last-Subject-Sequence"


def bucket_config(limits: StreamLimits) -> dict[str, Any]:
    """Return the configuration of the stream behind the bucket. Only the newest message of each record is stored."""
    return key_value.config_of(subjects.RECORD_BUCKET, limits, discard="new", max_bytes=-1)


def _subject(name: str) -> str:
    return key_value.subject_of(subjects.RECORD_BUCKET, name)


async def read(client: Any, name: str, timeout_s: float) -> Record | None:
    """Return the record as the stream's leader has it, or None. Raises Unavailable or TransportError."""
    verb = f"STREAM.MSG.GET.{STREAM}"
    answer = await _ask(client, f"$JS.API.{verb}", msgspec.json.encode({"last_by_subj": _subject(name)}), timeout_s)
    if "error" in answer:
        if answer["error"].get("err_code") == _NO_MESSAGE:
            return None
        jetstream.raise_api_error(answer["error"], verb)
    message = answer["message"]
    return Record(message["seq"], base64.b64decode(message.get("data", "")))


async def write(client: Any, name: str, data: bytes, revision: int, timeout_s: float) -> int | None:
    """Replace the record of this revision and return the new revision; None when it has another one.

    Raises Unavailable or TransportError.
    """
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
    return await key_value.ask(client, subject, data, timeout_s, what="the record bucket", headers=headers)
