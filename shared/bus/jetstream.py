"""Plain requests to JetStream's API, over a connected nats client.

The wire format is JetStream's documented JSON API; times are nanoseconds there.
"""

from __future__ import annotations

from typing import Any

import msgspec
import nats.errors

from shared import logs, subjects
from shared.bus import requests
from shared.bus.protocol import StreamInfo, StreamLimits
from shared.errors import ConfigError, PayloadTooLarge, TransportError, Unavailable

DEDUPLICATION_WINDOW_NS = 120 * 10**9
BUCKET_STREAM = f"OBJ_{subjects.SNAPSHOT_BUCKET}"

API_TIMEOUT_S = 5.0

# JetStream's own error numbers ("err_code").
_STREAM_NOT_FOUND = 10059
_NAME_IN_USE = (10058, 10065)
_MESSAGE_TOO_LARGE = 10054
_NO_REPLICAS = 10074  # More copies than one are asked of a server that is alone.
_NO_JETSTREAM = (10039, 10076)

# What cannot be changed of a stream that exists, and what our guarantees rest on.
_FIXED = ("storage", "retention", "subjects")

_log = logs.get_logger("bus")

_JSON = msgspec.json.Decoder()


def raise_api_error(error: dict[str, Any], what: str) -> None:
    """Translate an ``error`` object of an answer."""
    number, described = error.get("err_code", 0), error.get("description", "unknown error")
    if number == _MESSAGE_TOO_LARGE:
        raise PayloadTooLarge(f"{what}: {described}")
    if number == _NO_REPLICAS:
        raise ConfigError(f"{what}: {described}; --stream-replicas needs so many servers in a cluster")
    if number in _NO_JETSTREAM:
        raise ConfigError(f"{what}: {described}; a cell needs a broker with JetStream, allowed for its account")
    if error.get("code", 0) >= 500:
        # No leader, no space, shutting down: states that pass.
        raise Unavailable(f"{what}: {described}")
    raise TransportError(f"{what}: {described} ({number})")


async def request(
    client: Any, verb: str, body: dict[str, Any] | None = None, *, timeout_s: float = API_TIMEOUT_S
) -> dict[str, Any]:
    """Call ``$JS.API.<verb>``; the answer may hold an ``error`` object. Raises Unavailable."""
    data = b"" if body is None else msgspec.json.encode(body)
    try:
        reply = await requests.request(client, f"$JS.API.{verb}", data, timeout_s)
    except (nats.errors.Error, OSError) as error:
        raise Unavailable(f"JetStream does not answer {verb}: {error!r}") from error
    answer: dict[str, Any] = _JSON.decode(reply.data)
    return answer


async def checked_request(
    client: Any, verb: str, body: dict[str, Any] | None = None, *, timeout_s: float = API_TIMEOUT_S
) -> dict[str, Any]:
    """As :func:`request`; an ``error`` object is raised."""
    answer = await request(client, verb, body, timeout_s=timeout_s)
    if "error" in answer:
        raise_api_error(answer["error"], verb)
    return answer


def stream_config(name: str, captured: list[str], limits: StreamLimits) -> dict[str, Any]:
    """Return a file-backed stream that drops its oldest messages at its limits."""
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
    """Return the stream behind the snapshot bucket, laid out as JetStream's object stores are."""
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
    """Create a stream, or bring one of that name to ``config`` as far as that loses nothing.

    A bound that what is stored exceeds already is left as it is, and the log says so; so it does when the servers
    cannot hold so many copies now. Raises ConfigError for a stream that differs in what cannot be changed, Unavailable.
    """
    name = config["name"]
    answer = await request(client, f"STREAM.INFO.{name}")
    if "error" not in answer:
        await _update(client, answer, config)
        return
    if answer["error"].get("err_code") != _STREAM_NOT_FOUND:
        raise_api_error(answer["error"], f"STREAM.INFO.{name}")
    answer = await request(client, f"STREAM.CREATE.{name}", config)
    # Another process may have created it since we asked.
    if "error" in answer and answer["error"].get("err_code") not in _NAME_IN_USE:
        raise_api_error(answer["error"], f"STREAM.CREATE.{name}")


async def _update(client: Any, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    name, present = wanted["name"], found["config"]
    wrong = [key for key in _FIXED if key in wanted and present.get(key) != wanted[key]]
    if wrong:
        told = ", ".join(f"{key} is {present.get(key)!r} and not {wanted[key]!r}" for key in wrong)
        raise ConfigError(
            f"stream {name} is not ours: {told}. Stop the cell and delete the stream, or give the cell a broker"
        )
    changes, kept = stream_changes(found, wanted)
    if kept:
        _log.warning("stream_bounds_kept", stream=name, reason="what is stored exceeds them", **kept)
    if not changes:
        return
    answer = await request(client, f"STREAM.UPDATE.{name}", {**present, **changes})
    if "error" in answer:
        error = answer["error"]
        if error.get("err_code") == _NO_REPLICAS:
            raise_api_error(error, f"STREAM.UPDATE.{name}")
        # It goes on as it is: fewer copies are a risk, a cell that does not start is a certainty.
        _log.error("stream_not_updated", stream=name, reason=error.get("description", "unknown error"), **changes)
        return
    _log.info("stream_updated", stream=name, **changes)


def stream_changes(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what to change of a stream (as STREAM.INFO shows it), and what to leave because messages would be
    dropped.
    """
    present, stored = found["config"], found["state"]["bytes"]
    changes: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for key in ("num_replicas", "max_bytes", "max_age", "duplicate_window", "max_msgs"):
        if key not in wanted or present.get(key) == wanted[key]:
            continue
        # -1 is no bound. How old the oldest message is depends on clocks, so ages only grow while anything is stored.
        held = stored if key == "max_bytes" else found["state"].get("messages", 0)
        is_smaller = key in ("max_bytes", "max_msgs") and 0 <= wanted[key] < held
        is_younger = key == "max_age" and stored and 0 < wanted[key] < (present.get(key) or wanted[key] + 1)
        (kept if is_smaller or is_younger else changes)[key] = wanted[key]
    if "max_age" in kept:
        changes.pop("duplicate_window", None)  # It may not exceed the age, and goes with it.
    return changes, kept


async def stream_info(client: Any, name: str) -> StreamInfo:
    """Raise TransportError when there is no such stream."""
    state = (await checked_request(client, f"STREAM.INFO.{name}"))["state"]
    first = state["first_seq"] if state["messages"] else state["last_seq"] + 1
    return StreamInfo(first_seq=first, last_seq=state["last_seq"], nbytes=state["bytes"])
