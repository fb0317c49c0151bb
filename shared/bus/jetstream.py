"""Plain requests to JetStream's API, over a connected nats client.

The wire format is JetStream's documented JSON API; times are nanoseconds there.
"""

from __future__ import annotations

import asyncio
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

# How long a start waits for a broker that is up and does not answer: one that reads its streams again after a crash, or
# whose disk is behind, takes longer than a call of a running cell may.
SETUP_S = 60.0

# JetStream's own error numbers ("err_code").
_STREAM_NOT_FOUND = 10059
_NAME_IN_USE = (10058, 10065)
_MESSAGE_TOO_LARGE = 10054
_NO_REPLICAS = 10074  # Several copies were asked of a single server.
_NO_JETSTREAM = (10039, 10076)
# States that pass although they are not reported as faults of the server. 10158: an earlier attempt with the same
# message id was taken up and is not stored yet (a leader may fall between the two). 10164: another write of the subject
# was, so that its last sequence is not known. 10167: the stream's queue is full, and the message was dropped. 10002:
# the account has no space until messages expire or are deleted.
_PASSING = (10002, 10158, 10164, 10167)
_NO_PEERS = 10005  # Servers for the copies of a new stream: passes where one is away, and not where there are too few.

# Settings of a stream that cannot be changed later, and that our guarantees rest on.
_FIXED = ("storage", "retention", "subjects")

_log = logs.get_logger("bus")

_JSON = msgspec.json.Decoder()


def raise_api_error(error: dict[str, Any], what: str) -> None:
    """Raise an answer's ``error`` object as our own error; ``what`` names the call.

    PayloadTooLarge, ConfigError for what an operator must change, Unavailable for states that pass, otherwise
    TransportError.
    """
    number, described = error.get("err_code", 0), error.get("description", "unknown error")
    if number == _MESSAGE_TOO_LARGE:
        raise PayloadTooLarge(f"{what}: {described}")
    if number == _NO_REPLICAS:
        raise ConfigError(f"{what}: {described}; --stream-replicas needs so many servers in a cluster")
    if number in _NO_JETSTREAM:
        raise ConfigError(f"{what}: {described}; a cell needs a broker with JetStream, allowed for its account")
    is_passing = number in _PASSING or (number == _NO_PEERS and "offline" in described)
    if error.get("code", 0) >= 500 or is_passing:
        # No leader, no space, shutting down: states that pass.
        raise Unavailable(f"{what}: {described}")
    raise TransportError(f"{what}: {described} ({number})")


async def request(
    client: Any, verb: str, body: dict[str, Any] | None = None, *, timeout_s: float = API_TIMEOUT_S
) -> dict[str, Any]:
    """Call ``$JS.API.<verb>`` and return its answer, which may hold an ``error`` object. Raises Unavailable."""
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
    """Return the same as :func:`request`; raise an ``error`` object of the answer."""
    answer = await request(client, verb, body, timeout_s=timeout_s)
    if "error" in answer:
        raise_api_error(answer["error"], verb)
    return answer


def stream_config(name: str, captured: list[str], limits: StreamLimits) -> dict[str, Any]:
    """Return the configuration of a file-backed stream that drops its oldest messages at its limits."""
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
    """Return the configuration of the stream behind the snapshot bucket, laid out as JetStream's object stores are."""
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


async def ensure_stream(client: Any, config: dict[str, Any], wait_s: float = API_TIMEOUT_S) -> None:
    """Create a stream, or change one of that name to ``config`` as far as that loses no message.

    A bound that the stored messages exceed already is left as it is and logged; so is a number of copies that the
    servers cannot hold now. Each call waits ``wait_s`` for its answer and is repeated within that, which is harmless.
    Raises Unavailable, or ConfigError for a stream that differs in what cannot be changed.
    """
    name = config["name"]
    answer = await _patient_request(client, f"STREAM.INFO.{name}", None, wait_s)
    if "error" not in answer:
        await _update(client, answer, config, wait_s)
        return
    if answer["error"].get("err_code") != _STREAM_NOT_FOUND:
        raise_api_error(answer["error"], f"STREAM.INFO.{name}")
    answer = await _patient_request(client, f"STREAM.CREATE.{name}", config, wait_s)
    # Another process may have created it since we asked.
    if "error" in answer and answer["error"].get("err_code") not in _NAME_IN_USE:
        raise_api_error(answer["error"], f"STREAM.CREATE.{name}")


async def _patient_request(client: Any, verb: str, body: dict[str, Any] | None, wait_s: float) -> dict[str, Any]:
    """Return the answer to a call that may be repeated; the last try gets what is left of ``wait_s``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while (left_s := deadline - loop.time()) > API_TIMEOUT_S:
        try:
            return await request(client, verb, body)
        except Unavailable as error:
            if not isinstance(error.__cause__, nats.errors.TimeoutError):
                raise
            _log.warning("broker_does_not_answer", call=verb, waits_s=round(deadline - loop.time(), 1))
    return await request(client, verb, body, timeout_s=max(left_s, 0.0))


async def _update(client: Any, found: dict[str, Any], wanted: dict[str, Any], wait_s: float) -> None:
    name, present = wanted["name"], found["config"]
    wrong = [key for key in _FIXED if key in wanted and present.get(key) != wanted[key]]
    if wrong:
        told = ", ".join(f"{key} is {present.get(key)!r} and not {wanted[key]!r}" for key in wrong)
        raise ConfigError(
            f"stream {name} is not ours: {told}. Stop the cell and delete the stream, or give the cell a broker"
        )
    changes, kept = stream_changes(found, wanted)
    if kept:
        _log.warning("stream_bounds_kept", stream=name, reason="the stored messages exceed them", **kept)
    if not changes:
        return
    answer = await _patient_request(client, f"STREAM.UPDATE.{name}", {**present, **changes}, wait_s)
    if "error" in answer:
        error = answer["error"]
        if error.get("err_code") == _NO_REPLICAS:
            raise_api_error(error, f"STREAM.UPDATE.{name}")
        # It stays as it is: fewer copies are a risk, a cell that does not start is a certainty.
        _log.error("stream_not_updated", stream=name, reason=error.get("description", "unknown error"), **changes)
        return
    _log.info("stream_updated", stream=name, **changes)


def stream_changes(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what to change of a stream (as in STREAM.INFO), and bounds to leave because messages would be dropped."""
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
        changes.pop("duplicate_window", None)  # It may not exceed the age, and stays with it.
    return changes, kept


async def stream_info(client: Any, name: str) -> StreamInfo:
    """Return first and last sequence and size of a stream. Raises TransportError when there is no such stream."""
    state = (await checked_request(client, f"STREAM.INFO.{name}"))["state"]
    first = state["first_seq"] if state["messages"] else state["last_seq"] + 1
    return StreamInfo(first_seq=first, last_seq=state["last_seq"], nbytes=state["bytes"])
