"""The bucket of kept answers: a JetStream key/value store bounded by age, number and size; the oldest are dropped.

An entry is written once. Forgetting purges its subject, so that no copy stays behind a deletion mark.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from shared import logs, subjects
from shared.bus import jetstream, key_value
from shared.bus.protocol import KeptRoom, StreamLimits
from shared.errors import TransportError, Unavailable

STREAM = key_value.stream_of(subjects.KEPT_BUCKET)

_log = logs.get_logger("bus")

# JetStream's own error numbers ("err_code").
_ABSENT = (10037, 10059)  # No such message, no such stream.


def bucket_config(limits: StreamLimits) -> dict[str, Any]:
    """Return the configuration of the stream behind the bucket."""
    return key_value.config_of(
        subjects.KEPT_BUCKET,
        limits,
        discard="old",
        max_msgs=limits.kept_entries,
        max_bytes=limits.kept_bytes,
        max_age=int(limits.kept_age_s * 1e9),
    )


async def ensure(client: Any, limits: StreamLimits) -> None:
    """Create the bucket, or change it to ``limits``. Where the broker does not allow that, an error is logged only."""
    try:
        await jetstream.ensure_stream(client, bucket_config(limits))
    except (Unavailable, TransportError) as error:
        _log.error("answers_are_not_kept", reason=error.message, advice="has the broker this release's permissions?")


async def keep(client: Any, name: str, data: bytes, timeout_s: float) -> None:
    """Store an entry. Raises Unavailable, also where there is no bucket, or TransportError."""
    answer = await _ask(client, _subject(name), data, timeout_s)
    if "error" in answer:
        jetstream.raise_api_error(answer["error"], "keep an answer")


async def kept(client: Any, name: str, timeout_s: float) -> bytes | None:
    """Return an entry as the stream's leader has it, or None. Raises Unavailable or TransportError."""
    verb = f"STREAM.MSG.GET.{STREAM}"
    answer = await _ask(client, f"$JS.API.{verb}", msgspec.json.encode({"last_by_subj": _subject(name)}), timeout_s)
    if "error" in answer:
        if answer["error"].get("err_code") in _ABSENT:
            return None
        jetstream.raise_api_error(answer["error"], verb)
    return base64.b64decode(answer["message"].get("data", ""))


async def room(client: Any, timeout_s: float) -> KeptRoom:
    """Return how full the bucket is. Raises Unavailable or TransportError."""
    verb = f"STREAM.INFO.{STREAM}"
    answer = await _ask(client, f"$JS.API.{verb}", b"", timeout_s)
    if "error" in answer:
        if answer["error"].get("err_code") in _ABSENT:
            raise Unavailable("there is no bucket of kept answers")
        jetstream.raise_api_error(answer["error"], verb)
    state, config = answer["state"], answer["config"]
    return KeptRoom(state["bytes"], config["max_bytes"], state["messages"], config["max_msgs"])


async def forget(client: Any, names: str, timeout_s: float) -> int:
    """Purge the entries whose names match; return their number. Raises Unavailable or TransportError."""
    verb = f"STREAM.PURGE.{STREAM}"
    answer = await _ask(client, f"$JS.API.{verb}", msgspec.json.encode({"filter": _subject(names)}), timeout_s)
    if "error" in answer:
        if answer["error"].get("err_code") in _ABSENT:
            return 0
        jetstream.raise_api_error(answer["error"], verb)
    purged: int = answer.get("purged", 0)
    return purged


def _subject(name: str) -> str:
    return key_value.subject_of(subjects.KEPT_BUCKET, name)


async def _ask(client: Any, subject: str, data: bytes, timeout_s: float) -> dict[str, Any]:
    return await key_value.ask(client, subject, data, timeout_s, what="the bucket of kept answers")
