"""Degradations: features that the cell's processes were configured for and lack, as their heartbeats say.

Like :mod:`services.scheduler.disk_usage`, a part of the cell's status that is not in the state: no decision depends on
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.messages.status import CellStatus, Degradation, Heartbeat, Kind

_JOIN = ("storage", "worker")
"""Kinds of processes that the status lists as members; other processes are known by their heartbeats alone."""


@dataclass(frozen=True, slots=True)
class _Said:
    incarnation: str
    heard_ns: int
    degraded: tuple[Degradation, ...]


class Shortfalls:
    """The degradations in each process's last heartbeat."""

    def __init__(self, silence_ns: int) -> None:
        """Begin with no heartbeats; a process silent for ``silence_ns`` is dropped."""
        self._silence_ns = silence_ns
        self._said: dict[tuple[Kind, str], _Said] = {}

    def note(self, heartbeat: Heartbeat, now_ns: int) -> None:
        """Keep the heartbeat's degradations; drop them when it announces the end of that incarnation."""
        key = heartbeat.kind, heartbeat.id
        if not heartbeat.is_gone:
            self._said[key] = _Said(heartbeat.incarnation, now_ns, heartbeat.degraded)
        elif key in self._said and self._said[key].incarnation == heartbeat.incarnation:
            del self._said[key]

    def told(self, status: CellStatus, now_ns: int, *, is_storage_wanted: bool) -> CellStatus:
        """Return the status with its processes' degradations; a member that has not sent a heartbeat yet is one.

        So is a worker of an earlier incarnation: a cell that begins where another was killed still lists that one's
        worker.
        """
        self._said = {key: said for key, said in self._said.items() if now_ns - said.heard_ns < self._silence_ns}
        members: dict[tuple[Kind, str], str | None] = {("storage", name): None for name in status.storages}
        members |= {("worker", worker.worker_id): worker.incarnation for worker in status.workers}
        degraded: list[Degradation] = []
        for process, said in self._said.items():
            if process[0] not in _JOIN or process in members:
                degraded += said.degraded
        degraded += [
            Degradation(
                component=name, what=kind, reason=f"this {kind} has joined, and no heartbeat of it has come yet"
            )
            for (kind, name), incarnation in members.items()
            if not self._has_said(kind, name, incarnation)
        ]
        if is_storage_wanted and not status.storages:
            reason = "no storage has joined, so KV is kept on devices alone"
            degraded.append(
                Degradation(component=status.scheduler_id, what="storage", reason=reason, setting="--host-tier")
            )
        return msgspec.structs.replace(status, degraded=tuple(degraded)) if degraded else status

    def _has_said(self, kind: Kind, name: str, incarnation: str | None) -> bool:
        """Return whether this incarnation has sent a heartbeat; None is any, where the status names none."""
        said = self._said.get((kind, name))
        return said is not None and incarnation in (None, said.incarnation)
