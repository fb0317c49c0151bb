"""Transfers that wait or run: bounded, in order of arrival, each ending exactly once.

The queue never looks at a clock and starts nothing by itself: the copier asks for the next transfer and reports its
result.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.storage.core.backup_check import Transfer
from services.storage.core.transfer_states import TransferState, next_state
from shared.errors import InvariantViolated, QueueFull


@dataclass(slots=True)
class _Entry:
    transfer: Transfer
    state: TransferState = "queued"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a transfer ended. ``reason`` is "" if and only if it is done."""

    transfer: Transfer
    reason: str

    @property
    def ok(self) -> bool:
        """Whether every page was copied."""
        return not self.reason


class TransferQueue:
    """Transfers that have not ended, in order of arrival."""

    def __init__(self, max_transfers: int) -> None:
        """Begin empty; at most ``max_transfers`` transfers wait or run at once."""
        self._max_transfers = max_transfers
        self._entries: dict[int, _Entry] = {}
        self._waiting: deque[int] = deque()

    def __len__(self) -> int:
        """Return the number of transfers that wait or run."""
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Number of transfers that have not started."""
        return len(self._waiting)

    def add(self, transfer: Transfer) -> bool:
        """Queue a transfer; return False if one of that id has not ended yet: its end answers for both.

        Raises QueueFull at the bound.
        """
        if transfer.transfer_id in self._entries:
            return False
        if len(self._entries) >= self._max_transfers:
            raise QueueFull(f"{self._max_transfers} transfers wait or run already")
        self._entries[transfer.transfer_id] = _Entry(transfer)
        self._waiting.append(transfer.transfer_id)
        return True

    def start(self) -> Transfer | None:
        """Return the transfer that waits longest, now copying; None if none waits."""
        if not self._waiting:
            return None
        entry = self._entries[self._waiting.popleft()]
        entry.state = next_state(entry.state, "started")
        return entry.transfer

    def finish(self, transfer_id: int, error: str = "") -> Ended:
        """Report that a copy ended, with ``error`` if it raised."""
        entry = self._entries.get(transfer_id)
        if entry is None:
            raise InvariantViolated(f"transfer {transfer_id} ended, but none of that id was copying")
        entry.state = next_state(entry.state, "raised" if error else "copied")
        del self._entries[transfer_id]
        return Ended(entry.transfer, entry.reason or error)

    def revoke(self, worker_id: str, reason: str) -> list[Ended]:
        """Fail the transfers that wait for this worker's pool, and return them; its running copies will fail, too."""
        return self._revoke(
            [entry for entry in self._entries.values() if entry.transfer.worker_id == worker_id], reason
        )

    def revoke_waiting(self, reason: str) -> list[Ended]:
        """Fail all waiting transfers, and return them; running copies go on."""
        return self._revoke([entry for entry in self._entries.values() if entry.state == "queued"], reason)

    def _revoke(self, entries: list[_Entry], reason: str) -> list[Ended]:
        ended = []
        for entry in entries:
            if entry.state == "revoked":
                continue
            entry.reason = reason
            entry.state = next_state(entry.state, "revoked")
            if entry.state == "failed":
                del self._entries[entry.transfer.transfer_id]
                ended.append(Ended(entry.transfer, reason))
        self._waiting = deque(number for number in self._waiting if number in self._entries)
        return ended
