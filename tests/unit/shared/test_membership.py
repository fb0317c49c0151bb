"""An incarnation that the cell has given up learns it from the cell's status."""

from __future__ import annotations

import pytest

from shared.bus.protocol import Delivery
from shared.codec import encode
from shared.membership import Membership, lists_storage, lists_worker
from shared.messages.status import CellStatus, WorkerStatus

EMPTY = CellStatus(
    scheduler_id="s", epoch=1, seq=1, model="m", page_size=16, queued=0, running=0, max_queued=1, max_context=1
)
WITH_WORKER = CellStatus(
    scheduler_id="s",
    epoch=1,
    seq=1,
    model="m",
    page_size=16,
    queued=0,
    running=0,
    max_queued=1,
    max_context=1,
    workers=(WorkerStatus(worker_id="w", incarnation="one", running=0, waiting=0),),
    storages=("d",),
    storage_incarnations={"d": "one"},
)


class Lost:
    """Counts how often a member was told that it is lost."""

    def __init__(self, kind: str, incarnation: str) -> None:
        self.times = 0
        is_listed = {
            "worker": lambda status: lists_worker(status, "w", incarnation),
            "storage": lambda status: lists_storage(status, "d", incarnation),
        }[kind]
        self._membership = Membership(is_listed, self._count)

    def _count(self) -> None:
        self.times += 1

    async def see(self, *statuses: CellStatus | bytes) -> int:
        for status in statuses:
            data = status if isinstance(status, bytes) else encode(status)
            await self._membership.see(Delivery(subject="tc.status", data=data, headers={}))
        return self.times


@pytest.mark.parametrize("kind", ["worker", "storage"])
async def test_who_was_listed_and_is_not_any_more_is_lost(kind: str) -> None:
    """Before it is listed the cell may just not know it yet."""
    lost = Lost(kind, "one")

    assert await lost.see(EMPTY, WITH_WORKER, WITH_WORKER) == 0
    assert await lost.see(EMPTY) == 1


@pytest.mark.parametrize("kind", ["worker", "storage"])
async def test_another_incarnation_of_the_name_is_somebody_else(kind: str) -> None:
    """A successor's entry is not ours."""
    assert await Lost(kind, "two").see(WITH_WORKER, EMPTY) == 0


async def test_a_status_that_cannot_be_read_says_nothing() -> None:
    """Nobody ends for a message that is not understood."""
    assert await Lost("storage", "one").see(WITH_WORKER, b"\xff") == 0
