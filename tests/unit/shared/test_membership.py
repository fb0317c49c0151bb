"""An incarnation that the cell has given up learns it from the cell's status."""

from __future__ import annotations

import pytest
from msgspec import structs

from shared.bus.protocol import Delivery
from shared.codec import encode
from shared.membership import SUPERSEDED_MOST, UNLISTED_MOST, Membership, Readiness, lists_storage, lists_worker
from shared.messages.status import CellStatus, WorkerStatus

EMPTY = CellStatus(
    scheduler_id="s", epoch=1, seq=1, model="m", page_size=16, queued=0, running=0, max_queued=1, max_context=1
)
WITH_WORKER = structs.replace(
    EMPTY,
    workers=(WorkerStatus(worker_id="w", incarnation="one", running=0, waiting=0),),
    storages=("d",),
    storage_incarnations={"d": "one"},
)


class Lost:
    """Counts how often a member was told that it is lost."""

    def __init__(self, kind: str, incarnation: str, stored_seq: int = 0) -> None:
        self.times, self.stored_seq = 0, stored_seq
        is_listed = {
            "worker": lambda status: lists_worker(status, "w", incarnation),
            "storage": lambda status: lists_storage(status, "d", incarnation),
        }[kind]
        self.readiness = Readiness()
        self._membership = Membership(is_listed, self._count, lambda: self.stored_seq, self.readiness)

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


@pytest.mark.parametrize("kind", ["worker", "storage"])
async def test_who_was_given_up_before_a_status_listed_it_learns_it_all_the_same(kind: str) -> None:
    """Cut off between its join and the first status, it would wait for orders for ever."""
    lost = Lost(kind, "one", stored_seq=7)
    behind = structs.replace(EMPTY, seq=7)

    assert await lost.see(*[behind] * (UNLISTED_MOST - 1)) == 0
    assert await lost.see(behind) == 1


@pytest.mark.parametrize("stored_seq", [0, 8])
async def test_a_status_from_before_the_join_says_nothing(stored_seq: int) -> None:
    """Whether the join is not stored yet, or the scheduler has not come so far."""
    behind = structs.replace(EMPTY, seq=7)

    assert await Lost("worker", "one", stored_seq).see(*[behind] * 3 * UNLISTED_MOST) == 0


async def test_events_that_follow_the_join_do_not_put_the_end_off() -> None:
    """What counts is the first place that was known, or a busy process would always be ahead of the status."""
    lost = Lost("worker", "one", stored_seq=7)
    await lost.see(EMPTY)
    for seq in range(7, 7 + UNLISTED_MOST):
        lost.stored_seq = seq + 100
        await lost.see(structs.replace(EMPTY, seq=seq))

    assert lost.times == 1


async def test_a_superseded_scheduler_gives_nobody_up() -> None:
    """One that stood still while others joined says what it knew before it is fenced."""
    lost = Lost("worker", "one")
    listed = structs.replace(WITH_WORKER, epoch=2)

    assert await lost.see(listed, EMPTY, listed, EMPTY, EMPTY, listed) == 0
    assert await lost.see(structs.replace(EMPTY, epoch=2)) == 1


async def test_epochs_that_begin_anew_are_believed_in_the_end() -> None:
    """The streams were lost, and the cell with them: nobody contradicts what the new one says."""
    lost = Lost("worker", "one")
    await lost.see(structs.replace(WITH_WORKER, epoch=2))

    assert await lost.see(*[EMPTY] * SUPERSEDED_MOST) == 0
    assert await lost.see(EMPTY) == 1


@pytest.mark.parametrize("kind", ["worker", "storage"])
async def test_a_process_is_ready_while_the_cell_lists_it(kind: str) -> None:
    """A status that cannot be read changes nothing."""
    member = Lost(kind, "one")
    reasons = [member.readiness.reason]
    for status in (EMPTY, WITH_WORKER, b"\xff", EMPTY):
        await member.see(status)
        reasons.append(member.readiness.reason)

    absent = "the cell does not list it"
    assert reasons == ["it has not joined the cell yet", absent, "", "", absent]
