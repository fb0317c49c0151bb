"""Whether the cell still counts this incarnation among its own.

After a long pause or a partition the cell may have given it up: its requests run elsewhere, and its pages belong
to nobody. The scheduler's status says so, and the process ends; a supervisor starts a new incarnation.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.bus.protocol import Delivery
from shared.codec import decode
from shared.errors import CodecError
from shared.messages.status import CellStatus


class Membership:
    """Reads every ``CellStatus``; ``on_lost`` is called when an incarnation that was listed is not any more."""

    def __init__(self, is_listed: Callable[[CellStatus], bool], on_lost: Callable[[], None]) -> None:
        self._is_listed = is_listed
        self._on_lost = on_lost
        self._was_listed = False

    async def see(self, delivery: Delivery) -> None:
        """Handle one message of the status subject."""
        try:
            status = decode(delivery.data, CellStatus)
        except CodecError:
            return  # A newer scheduler may say more than we understand.
        if self._is_listed(status):
            self._was_listed = True
        elif self._was_listed:
            self._on_lost()


def lists_worker(status: CellStatus, worker_id: str, incarnation: str) -> bool:
    """Whether the cell has this incarnation of a worker."""
    return any(worker.worker_id == worker_id and worker.incarnation == incarnation for worker in status.workers)


def lists_storage(status: CellStatus, storage_id: str, incarnation: str) -> bool:
    """Whether the cell has this incarnation of a storage."""
    return status.storage_incarnations.get(storage_id) == incarnation
