"""Whether the cell still counts this incarnation among its own.

After a long pause or a partition the cell may have given it up: its requests run elsewhere, and its pages belong
to no worker. The scheduler's status says so, and the process ends; a supervisor starts a new incarnation.

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
"""Statuses of an older epoch that are passed over in a row. A superseded scheduler says one or two before it ends; when
epochs begin anew because the streams were lost, they go on, and this incarnation is unknown from then on.
"""

UNLISTED_MOST = 12
"""Statuses behind its join, and none before, without a process that make it take itself for removed: six seconds.

A worker that is dismissed is never listed either, and ends for the reason that the dismissal gives; should that be
lost, it is read from the stream within five seconds.
"""


class Listing:
    """What a row of statuses means for one incarnation. Pure."""

    def __init__(self) -> None:
        self._joined_seq = 0  # At or behind its join in ``TC_INPUTS``; 0 is not known to be stored.
        self._was_listed = False
        self._unlisted = 0
        self._epoch = 0
        self._superseded = 0

    def see(self, *, is_listed: bool, epoch: int, seq: int, stored_seq: int) -> bool:
        """Take in a status of ``epoch`` up to input ``seq``; returns whether this incarnation was given up.

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


class Membership:
    """Reads every ``CellStatus``; ``on_lost`` is called when this incarnation is not among the cell's own any more.

    ``stored_seq`` tells the place in ``TC_INPUTS`` of the last of its events that is known to be stored, 0 before.
    """

    def __init__(
        self,
        is_listed: Callable[[CellStatus], bool],
        on_lost: Callable[[], None],
        stored_seq: Callable[[], int],
    ) -> None:
        self._is_listed = is_listed
        self._on_lost = on_lost
        self._stored_seq = stored_seq
        self._listing = Listing()

    async def see(self, delivery: Delivery) -> None:
        """Handle one message of the status subject."""
        try:
            status = decode(delivery.data, CellStatus)
        except CodecError:
            return  # A newer scheduler may say more than we understand.
        if self._listing.see(
            is_listed=self._is_listed(status), epoch=status.epoch, seq=status.seq, stored_seq=self._stored_seq()
        ):
            self._on_lost()


def lists_worker(status: CellStatus, worker_id: str, incarnation: str) -> bool:
    """Whether the cell has this incarnation of a worker."""
    return any(worker.worker_id == worker_id and worker.incarnation == incarnation for worker in status.workers)


def lists_storage(status: CellStatus, storage_id: str, incarnation: str) -> bool:
    """Whether the cell has this incarnation of a storage."""
    return status.storage_incarnations.get(storage_id) == incarnation
