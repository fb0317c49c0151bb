"""What each kind of process may publish and subscribe to. Pure.

A process reads a stream through a consumer that it makes. The server takes the consumer's filter from the subject of
that call and refuses a body that differs, so ``$JS.API.CONSUMER.CREATE.STREAM.*.SUBJECT`` opens this subject of the
stream and no other. Calls about consumers that exist need their names, which are random and secret:
only the operator may list them.

Replies come to an inbox of the user's own, under random names. A process that answers calls may publish into the
inboxes of the users that call it. The server's ``allow_responses`` is not used: it would let the process publish to
any reply subject that a caller names, also to those of streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared import subjects
from shared.bus import answer_bucket
from shared.bus.access import inbox_prefix
from shared.bus.jetstream import BUCKET_STREAM
from shared.bus.kept_bucket import STREAM as KEPT_STREAM
from shared.bus.record_bucket import STREAM as RECORD_STREAM
from thermocline.broker.passwords import OPERATOR

ANY = "*"
"""In place of an id: every process of that kind, for cells whose processes draw their names."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may use, and the kinds of processes whose calls it answers."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: tuple[str, ...] = ()


def gateway(user: str) -> Permissions:
    """Return the permissions of any gateway: their names get a random suffix at each start."""
    return Permissions(
        publish=(
            subjects.request_input(ANY),
            subjects.cell_input(),
            subjects.heartbeat("gateway", ANY),
            *(subjects.rpc("scheduler", verb) for verb in ("status", "cache", "admissions", "divergences", "request")),
            subjects.rpc("storage", "inventory", ANY),
            subjects.rpc("storage", "verify", ANY),
            subjects.rpc("worker", "outputs", ANY),
            f"$JS.API.STREAM.INFO.{subjects.OUTPUTS_STREAM}",
            *_reading(subjects.OUTPUTS_STREAM, subjects.gateway_output(ANY)),
            subjects.CELLS_HEADS,
            subjects.CELLS_LOAD,
            f"$KV.{subjects.KEPT_BUCKET}.>",
            *(f"$JS.API.STREAM.{verb}.{KEPT_STREAM}" for verb in ("MSG.GET", "PURGE", "INFO")),
            # Answers by name: none can be listed, and a name is a digest of the conversation.
            answer_bucket.subject(ANY),
            f"$JS.API.DIRECT.GET.{answer_bucket.STREAM}.{answer_bucket.subject(ANY)}",
        ),
        subscribe=(
            *(inbox(user), subjects.tokens(ANY), subjects.gateway_output(ANY), subjects.STATUS),
            subjects.heads_wanted(ANY),
        ),
    )


def scheduler(user: str) -> Permissions:
    """Return the permissions of any scheduler: it owns the streams, and reads every input."""
    streams = (subjects.INPUTS_STREAM, subjects.OUTPUTS_STREAM, BUCKET_STREAM, RECORD_STREAM)
    return Permissions(
        publish=(
            subjects.cell_input(),
            subjects.skips_input(),
            subjects.OUTPUTS,
            subjects.STATUS,
            subjects.heartbeat("scheduler", ANY),
            *(
                f"$JS.API.STREAM.{verb}.{stream}"
                for stream in (*streams, KEPT_STREAM, answer_bucket.STREAM)
                for verb in ("INFO", "CREATE", "UPDATE")
            ),
            # What replaces or deletes a snapshot drops the chunks of the old one.
            f"$JS.API.STREAM.PURGE.{BUCKET_STREAM}",
            f"$JS.API.STREAM.MSG.GET.{BUCKET_STREAM}",
            f"$JS.API.DIRECT.GET.{BUCKET_STREAM}.>",
            f"$JS.API.STREAM.MSG.GET.{RECORD_STREAM}",
            *(subject for stream in streams[:3] for subject in _reading(stream, ">")),
            *(f"$JS.API.CONSUMER.CREATE.{stream}.*" for stream in streams[:3]),
            f"$O.{subjects.SNAPSHOT_BUCKET}.>",
            f"$KV.{subjects.RECORD_BUCKET}.>",
        ),
        subscribe=(inbox(user), subjects.HEARTBEATS, subjects.rpc("scheduler", ANY)),
        answers=("gateway", "storage", OPERATOR),
    )


def worker(user: str, worker_id: str) -> Permissions:
    """Return the permissions of one worker, or with ``ANY`` of all."""
    return Permissions(
        publish=(
            subjects.worker_input(worker_id),
            subjects.tokens(ANY),
            subjects.heartbeat("worker", worker_id),
            subjects.rpc("storage", "sparse", ANY),
            *_member(subjects.worker_output(worker_id), subjects.worker_input(worker_id)),
        ),
        subscribe=(
            inbox(user),
            subjects.worker_output(worker_id),
            subjects.rpc("worker", ANY, worker_id),
            subjects.STATUS,
        ),
        answers=("gateway", "storage", OPERATOR),
    )


def storage(user: str, storage_id: str) -> Permissions:
    """Return the permissions of one storage, or with ``ANY`` of all."""
    return Permissions(
        publish=(
            subjects.storage_input(storage_id),
            subjects.heartbeat("storage", storage_id),
            subjects.rpc("scheduler", "standing"),
            subjects.rpc("worker", "store", ANY),
            subjects.rpc("storage", "pool", ANY),
            *_member(subjects.storage_output(storage_id), subjects.storage_input(storage_id)),
        ),
        subscribe=(
            inbox(user),
            subjects.storage_output(storage_id),
            subjects.rpc("storage", ANY, storage_id),
            subjects.STATUS,
        ),
        answers=("gateway", "worker", "storage", OPERATOR),
    )


def operator(user: str) -> Permissions:
    """Return the permissions of the operator, whose commands inspect and repair everything: all subjects."""
    return Permissions(publish=(">",), subscribe=(">",))


OF_KIND: dict[str, Callable[[str], Permissions]] = {"gateway": gateway, "scheduler": scheduler, OPERATOR: operator}
"""Permissions by kind, for kinds whose processes are all trusted alike."""

OF_MEMBER: dict[str, Callable[[str, str], Permissions]] = {"worker": worker, "storage": storage}
"""Permissions by kind, for kinds whose processes have permissions by id."""


def inbox(user: str) -> str:
    """Return the subjects of the replies to ``user``."""
    return f"{inbox_prefix(user)}.>"


def _reading(stream: str, subject: str) -> tuple[str, ...]:
    """Return the API subjects for consumers of ``subject`` in ``stream``: create, flow control, delete."""
    return (
        f"$JS.API.CONSUMER.CREATE.{stream}.*.{subject}",
        f"$JS.API.CONSUMER.DELETE.{stream}.*",
        f"$JS.FC.{stream}.>",
    )


def _member(output: str, own_input: str) -> tuple[str, ...]:
    """Return the API subjects for a process that executes plans.

    It waits for the streams, and reads its plans and its own past events.
    """
    streams = (subjects.INPUTS_STREAM, subjects.OUTPUTS_STREAM)
    return (
        *(f"$JS.API.STREAM.INFO.{stream}" for stream in streams),
        *_reading(subjects.OUTPUTS_STREAM, output),
        *_reading(subjects.INPUTS_STREAM, own_input),
    )
