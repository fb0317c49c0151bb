"""Membership of an incarnation in its cell.

After a long pause or a partition the cell may have given it up: its requests run elsewhere, and its pages belong
to no worker. The scheduler's status shows that, and the process ends; a supervisor starts a new incarnation.

A status that does not list a process may also be older than its join, or come from a scheduler that has been superseded
and does not know it yet. So a status counts only behind the join, and one of an older epoch only where no newer one
contradicts it.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.bus.protocol import Delivery
from shared.codec import decode
from shared.errors import CodecError
from shared.messages.status import CellStatus

SUPERSEDED_MOST = 20
"""Statuses of an older epoch that are ignored in a row. A superseded scheduler sends one or two before it ends; when
epochs begin again because the streams were lost, they go on, and this incarnation is unknown from then on."""

UNLISTED_MOST = 12
"""Statuses behind its join, and none before, that must lack a process before it takes itself for removed: six seconds.
A worker that is dismissed is never listed either, and ends for the reason that the dismissal gives; should that be
lost, it is read from the stream within five seconds."""


class Listing:
    """The meaning of consecutive statuses for one incarnation. Pure."""

    def __init__(self) -> None:
        """Begin before the first status, and before the join is known to be stored."""
        self._joined_seq = 0  # A sequence at or behind its join in ``TC_INPUTS``; 0: not known to be stored.
        self._was_listed = False
        self._unlisted = 0
        self._epoch = 0
        self._superseded = 0

    def see(self, *, is_listed: bool, epoch: int, seq: int, stored_seq: int) -> bool:
        """Take a status of ``epoch`` up to input ``seq``; return whether this incarnation was given up.

        ``stored_seq`` is of an event of this incarnation that is stored, 0 before there is one.
        """
        self._joined_seq = self._joined_seq or stored_seq
        if epoch < self._epoch and self._superseded < SUPERSEDED_MOST:
            self._superseded += 1
            return False
        self._epoch, self._superseded = epoch, 0
        if is_listed:
            self._was_listed = True
            return False
        if self._was_listed:
            return True
        if 0 < self._joined_seq <= seq:
            self._unlisted += 1
        return self._unlisted >= UNLISTED_MOST


class Readiness:
    """Whether the cell counts on this process, for probes. The event loop writes it, and any thread reads it."""

    def __init__(self) -> None:
        """Begin as not ready: the process has not joined."""
        self.reason = "it has not joined the cell yet"
        """Why it is not ready; "" where it is."""

    def note(self, *, is_listed: bool) -> None:
        """Take a status of the cell. Without statuses nothing changes: a broker that is away makes no process worse."""
        self.reason = "" if is_listed else "the cell does not list it"


class Membership:
    """A reader of every ``CellStatus`` that notices when the cell has given this incarnation up."""

    def __init__(
        self,
        is_listed: Callable[[CellStatus], bool],
        on_lost: Callable[[], None],
        stored_seq: Callable[[], int],
        readiness: Readiness | None = None,
    ) -> None:
        """Judge by ``is_listed``, which returns whether a status has this incarnation as a member.

        ``on_lost`` is called with each status that shows the loss, so it may be called again. ``stored_seq`` returns
        the place in ``TC_INPUTS`` of the incarnation's last event that is known to be stored, 0 before there is one.
        ``readiness`` is kept up to date.
        """
        self._is_listed = is_listed
        self._on_lost = on_lost
        self._stored_seq = stored_seq
        self._readiness = readiness or Readiness()
        self._listing = Listing()

    async def see(self, delivery: Delivery) -> None:
        """Handle one message of the status subject."""
        try:
            status = decode(delivery.data, CellStatus)
        except CodecError:
            return  # A newer scheduler may send fields that we do not know.
        is_listed = self._is_listed(status)
        self._readiness.note(is_listed=is_listed)
        if self._listing.see(is_listed=is_listed, epoch=status.epoch, seq=status.seq, stored_seq=self._stored_seq()):
            self._on_lost()


def lists_worker(status: CellStatus, worker_id: str, incarnation: str) -> bool:
    """Return whether the cell has this incarnation of a worker."""
    return any(worker.worker_id == worker_id and worker.incarnation == incarnation for worker in status.workers)


def lists_storage(status: CellStatus, storage_id: str, incarnation: str) -> bool:
    """Return whether the cell has this incarnation of a storage."""
    return status.storage_incarnations.get(storage_id) == incarnation
