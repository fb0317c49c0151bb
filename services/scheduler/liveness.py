"""Which members have ended, and whose heartbeats have stopped. Pure: the time (monotonic, ns) is an argument.

A member is watched from the moment the fold knows it (a worker or storage joined, a gateway submitted). It is lost when
a process that saw its end says so (``Heartbeat.is_gone``), or when no heartbeat of its incarnation came for
``silence_ns``, and is reported once per incarnation.

Silence that was ours (the loop stood still, the broker was away) does not count; an end that was seen does.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core import CellState
from shared.codec import Input
from shared.messages.cell_events import GatewayLost, StorageLost, WorkerLost
from shared.messages.requests import ReclaimRequest, ResumeRequest, SubmitRequest
from shared.messages.status import Heartbeat, Kind
from shared.messages.storage_events import StorageJoined, StorageLeft
from shared.messages.worker_events import WorkerJoined, WorkerLeft

Lost = WorkerLost | StorageLost | GatewayLost

PROCESS_GONE, HEARTBEAT_LOST = "process_gone", "heartbeat_lost"


@dataclass(slots=True)
class _Member:
    incarnation: str  # "" for a gateway that has not been heard of yet.
    heard_ns: int
    is_gone: bool = False  # Permanently: a heartbeat from before its end may come after the report of it.
    is_reported: bool = False


class Liveness:
    """The cell's members by kind and id, in the order in which they appeared."""

    def __init__(self, silence_ns: int) -> None:
        """Begin with no members; one is lost after ``silence_ns`` without a heartbeat."""
        self._silence_ns = silence_ns
        self._members: dict[tuple[Kind, str], _Member] = {}
        self._checked_ns: int | None = None

    def watch_state(self, state: CellState, now_ns: int) -> None:
        """Watch all members that a restored state knows."""
        for worker in state.workers.values():
            self._watch("worker", worker.worker_id, worker.incarnation, now_ns)
        for joined in state.arriving.values():
            self._watch("worker", joined.worker_id, joined.incarnation, now_ns)
        for storage in state.storages.values():
            self._watch("storage", storage.storage_id, storage.incarnation, now_ns)
        for request in state.requests.values():
            self._watch_gateway(request.submit.gateway_id, now_ns)

    def observe(self, message: Input, now_ns: int) -> None:
        """Watch members that a folded input names, and forget those that it says are gone."""
        match message:
            case WorkerJoined():
                self._watch("worker", message.worker_id, message.incarnation, now_ns)
            case StorageJoined():
                self._watch("storage", message.storage_id, message.incarnation, now_ns)
            case WorkerLeft() | WorkerLost():
                self._forget("worker", message.worker_id, message.incarnation)
            case StorageLeft() | StorageLost():
                self._forget("storage", message.storage_id, message.incarnation)
            case SubmitRequest() | ResumeRequest():
                self._watch_gateway(message.gateway_id, now_ns)
            case ReclaimRequest():
                self._watch_gateway(message.submit.gateway_id, now_ns)
            case GatewayLost():
                self._members.pop(("gateway", message.gateway_id), None)
            case _:
                pass

    def beat(self, heartbeat: Heartbeat, now_ns: int) -> None:
        """Note a heartbeat; one of another incarnation than the watched one is ignored."""
        member = self._members.get((heartbeat.kind, heartbeat.id))
        if member is None:
            return
        if heartbeat.is_gone:
            member.is_gone = member.is_gone or member.incarnation == heartbeat.incarnation
            return
        if heartbeat.kind == "gateway" and not member.incarnation:
            member.incarnation = heartbeat.incarnation
        if member.incarnation == heartbeat.incarnation:
            member.heard_ns = max(member.heard_ns, now_ns)

    def excuse(self, now_ns: int) -> None:
        """Count every member's silence from now on: none could have been heard until now."""
        for member in self._members.values():
            member.heard_ns = max(member.heard_ns, now_ns)

    def check(self, now_ns: int, interval_ns: int) -> list[tuple[str, Lost]]:
        """Return (message id, report) of each newly lost member; the id is the same for each report of one incarnation.

        Call it every ``interval_ns`` at least; a call that comes much later than that excuses all silent members.
        """
        late_ns = 0 if self._checked_ns is None else now_ns - self._checked_ns - interval_ns
        self._checked_ns = now_ns
        if late_ns > max(interval_ns, self._silence_ns // 4):
            self.excuse(now_ns)
        lost: list[tuple[str, Lost]] = []
        for (kind, member_id), member in self._members.items():
            is_silent = now_ns - member.heard_ns >= self._silence_ns
            if member.is_reported or not (member.is_gone or is_silent):
                continue
            member.is_reported = True
            reason = PROCESS_GONE if member.is_gone else HEARTBEAT_LOST
            word = _lost(kind, member_id, member.incarnation, reason)
            lost.append((f"lost-{kind}-{member_id}-{member.incarnation}", word))
        return lost

    def _watch(self, kind: Kind, member_id: str, incarnation: str, now_ns: int) -> None:
        self._members[kind, member_id] = _Member(incarnation, now_ns)

    def _watch_gateway(self, gateway_id: str, now_ns: int) -> None:
        member = self._members.get(("gateway", gateway_id))
        if member is None:
            self._watch("gateway", gateway_id, "", now_ns)

    def _forget(self, kind: Kind, member_id: str, incarnation: str) -> None:
        member = self._members.get((kind, member_id))
        if member is not None and member.incarnation == incarnation:
            del self._members[kind, member_id]


def _lost(kind: Kind, member_id: str, incarnation: str, reason: str) -> Lost:
    if kind == "worker":
        return WorkerLost(worker_id=member_id, incarnation=incarnation, reason=reason)
    if kind == "storage":
        return StorageLost(storage_id=member_id, incarnation=incarnation, reason=reason)
    return GatewayLost(gateway_id=member_id, reason=reason)
