"""Searching workers for answers of which nothing arrived: found where they are, and never a flood of questions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from services.gateway.pending import Choice, Generation, PendingTable
from services.gateway.relay import PARALLEL_SEARCHES, TokenRelay
from services.gateway.timeouts import WaitLimits, needs_search
from shared import subjects
from shared.codec import decode, encode
from shared.messages.status import GetOutputs, GetRequestStanding, Outputs, RequestStanding
from shared.messages.tokens import TokenItem
from tests.memory_bus import MemoryBroker
from tests.scripted_cell import submit
from tests.unit.gateway.running_gateway import running_gateway
from tests.waiting import until

WORKERS = ["worker-0", "worker-1", "worker-2"]
LIMITS = WaitLimits(request_s=1000, first_token_s=600, idle_s=120, probe_s=5)


@dataclass
class Workers:
    """Workers that tell what a test says they know, once ``may_answer`` is set, and a scheduler that does at once."""

    now_s: float = 0.0
    pending: PendingTable = field(default_factory=PendingTable)
    knows: dict[tuple[str, str], tuple[TokenItem, ...]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    scheduled: set[str] = field(default_factory=set)
    reclaimed: list[tuple[str, float]] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def expect(self, *request_ids: str) -> list[Choice]:
        """Requests that were submitted at 0 s."""
        choices = [Choice(submit(request_id, [1]), 0, 0, now_s=0.0) for request_id in request_ids]
        for one in choices:
            self.pending.add(Generation([one]))
        return choices

    def know(self, worker_id: str, request_id: str, *items: TokenItem) -> None:
        """One answer of a worker after the other; the last one again and again."""
        self.knows[worker_id, request_id] = items

    async def stand(self, data: bytes) -> bytes:
        request_id = decode(data, GetRequestStanding).request_id
        self.asked.append(("scheduler", request_id))
        return encode(RequestStanding(is_known=request_id in self.scheduled))

    async def reclaim(self, choice: Choice, now_s: float) -> None:
        self.reclaimed.append((choice.request_id, now_s))

    async def answer(self, worker_id: str, data: bytes) -> bytes:
        question = decode(data, GetOutputs)
        self.asked.append((worker_id, question.request_id))
        await self.may_answer.wait()
        items = self.knows.get((worker_id, question.request_id), ())
        covering = (item for item in items if item.index + len(item.tokens) > question.index)
        return encode(Outputs(item=next(covering, items[-1] if items else None)))


@contextlib.asynccontextmanager
async def relay_beside(workers: Workers) -> AsyncIterator[TokenRelay]:
    broker = MemoryBroker()
    bus, theirs = broker.connect("gateway"), broker.connect("workers")
    for worker_id in WORKERS:

        async def answer(data: bytes, worker_id: str = worker_id) -> bytes:
            return await workers.answer(worker_id, data)

        await theirs.serve(subjects.rpc("worker", "outputs", worker_id), answer, at_once=64)
    await theirs.serve(subjects.rpc("scheduler", "request"), workers.stand)
    relay = TokenRelay(bus, workers.pending, lambda: workers.now_s, workers.reclaim)
    try:
        yield relay
    finally:
        workers.may_answer.set()
        await relay.close()
        await theirs.close()
        await bus.close()


def item(request_id: str, index: int, count: int, *, attempt: int = 1, ends: bool = False) -> TokenItem:
    tokens = tuple(100 + position for position in range(index, index + count))
    return TokenItem(
        request_id=request_id, attempt=attempt, index=index, tokens=tokens, finish="stop" if ends else None
    )


async def test_an_answer_of_which_nothing_arrived_is_found() -> None:
    """No worker was heard of, so all are asked; an answer that was cut to fit a message is fetched to its end."""
    workers = Workers()
    (one,) = workers.expect("r")
    workers.know("worker-2", "r", item("r", 0, 2), item("r", 2, 2, ends=True))
    workers.may_answer.set()
    async with relay_beside(workers) as relay:
        workers.now_s = 5.1
        assert needs_search(one, workers.now_s, LIMITS)
        relay.search([one], WORKERS)
        await until(lambda: one.is_over)

    assert one.assembly.tokens == [100, 101, 102, 103]
    assert one.workers == {1: "worker-2"}


async def test_a_worker_that_has_nothing_new_does_not_end_a_search() -> None:
    """The first attempt's worker still knows the request; the next attempt runs where nothing was heard from."""
    workers = Workers()
    (one,) = workers.expect("r")
    one.accept("worker-0", item("r", 0, 1), 1.0)
    workers.know("worker-0", "r", item("r", 1, 0))
    workers.know("worker-1", "r", item("r", 1, 3, attempt=2, ends=True))
    workers.may_answer.set()
    async with relay_beside(workers) as relay:
        relay.search([one], WORKERS)
        await until(lambda: one.is_over)

    assert one.assembly.tokens == [100, 101, 102, 103]
    assert workers.asked == [("worker-0", "r"), ("worker-1", "r")]


async def test_a_worker_that_knows_what_was_fenced_alone_is_not_the_last_to_be_asked() -> None:
    """What an older attempt said is refused, and the new one's worker is asked next."""
    workers = Workers()
    (one,) = workers.expect("r")
    one.accept("worker-0", item("r", 0, 1), 1.0)
    one.assembly.fence(2)
    workers.know("worker-0", "r", item("r", 1, 1, ends=True))
    workers.know("worker-2", "r", item("r", 1, 3, attempt=2, ends=True))
    workers.may_answer.set()
    async with relay_beside(workers) as relay:
        relay.recover([one], WORKERS)
        await until(lambda: one.is_over)

    assert one.assembly.tokens == [100, 101, 102, 103]


async def test_what_neither_workers_nor_scheduler_know_is_reclaimed() -> None:
    """Its end went with the worker that was the last to know it."""
    workers = Workers(now_s=7.0)
    (one,) = workers.expect("r")
    one.accept("worker-0", item("r", 0, 1), 1.0)
    workers.may_answer.set()
    async with relay_beside(workers) as relay:
        relay.search([one], WORKERS)
        await until(lambda: not one.is_fetching)

    assert workers.asked == [*((worker_id, "r") for worker_id in WORKERS), ("scheduler", "r")]
    assert workers.reclaimed == [("r", 7.0)]


@pytest.mark.parametrize("knower", ["scheduler", "worker"])
async def test_what_somebody_knows_is_not_reclaimed(knower: str) -> None:
    """It waits in the queue, or a worker that has nothing new yet runs it."""
    workers = Workers(now_s=7.0)
    (one,) = workers.expect("r")
    if knower == "scheduler":
        workers.scheduled.add("r")
    else:
        workers.know("worker-1", "r", item("r", 0, 0))
    workers.may_answer.set()
    async with relay_beside(workers) as relay:
        relay.search([one], WORKERS)
        await until(lambda: not one.is_fetching)

    assert ("worker-2", "r") in workers.asked
    assert workers.reclaimed == []


async def test_what_ends_while_the_scheduler_is_asked_is_not_reclaimed() -> None:
    """Its last tokens came after all."""
    workers = Workers(now_s=7.0)
    (one,) = workers.expect("r")
    workers.may_answer.set()

    async def end_first(data: bytes) -> bytes:
        one.accept("worker-0", item("r", 0, 2, ends=True), 7.0)
        return await Workers.stand(workers, data)

    workers.stand = end_first  # type: ignore[method-assign]
    async with relay_beside(workers) as relay:
        relay.search([one], WORKERS)
        await until(lambda: not one.is_fetching)

    assert one.is_over
    assert workers.asked[-1] == ("scheduler", "r")
    assert workers.reclaimed == []


async def test_thousands_of_queued_requests_are_asked_for_a_few_at_a_time() -> None:
    """What cannot be searched for now stays due, and each search asks one worker at a time."""
    workers = Workers()
    queued = workers.expect(*(f"r{number}" for number in range(2000)))
    workers.scheduled.update(one.request_id for one in queued)
    async with relay_beside(workers) as relay:
        workers.now_s = 5.1
        for _ in range(10):
            relay.search([one for one in queued if needs_search(one, workers.now_s, LIMITS)], WORKERS)
        await until(lambda: len(workers.asked) == PARALLEL_SEARCHES)
        due = [one for one in queued if needs_search(one, workers.now_s, LIMITS)]
        assert len(due) == 2000 - PARALLEL_SEARCHES
        workers.may_answer.set()
        await until(lambda: not any(one.is_fetching for one in queued))
        relay.search(due, WORKERS)
        await until(lambda: not any(one.is_fetching for one in queued))

    assert len(workers.asked) == 2 * PARALLEL_SEARCHES * (len(WORKERS) + 1)
    assert workers.reclaimed == []
    assert len({request_id for _, request_id in workers.asked}) == 2 * PARALLEL_SEARCHES


async def test_a_search_without_workers_is_still_due() -> None:
    """Nothing was asked while the cell's workers were unknown."""
    workers = Workers(now_s=5.1)
    (one,) = workers.expect("r")
    async with relay_beside(workers) as relay:
        relay.search([one], [])

    assert needs_search(one, workers.now_s, LIMITS)


async def test_what_is_asked_for_after_a_loss_is_searched_for_soon() -> None:
    """A question from before the loss may still be under way, and its round brings nothing more than that."""
    workers = Workers()
    (one,) = workers.expect("r")
    one.searched_s = 100.0
    async with relay_beside(workers) as relay:
        workers.now_s = 101.0
        one.is_fetching = True
        assert not needs_search(one, workers.now_s, LIMITS)
        relay.recover([one], WORKERS)

    assert workers.asked == []
    assert needs_search(one, workers.now_s, LIMITS)


async def test_a_running_gateway_finds_an_answer_of_which_nothing_arrived() -> None:
    """Its sweep looks for it, long before the wait for a first token is over."""
    async with running_gateway(probe_ms=50) as harness:
        body = {"prompt": "hi", "return_token_ids": True}
        call = asyncio.create_task(harness.client.post("/v1/completions", json=body))
        await harness.cell.until(lambda: bool(harness.cell.submitted))
        request = harness.cell.submitted[0]
        harness.cell.finishes[request.request_id] = ("stop", None)
        harness.cell.steps[request.request_id] = [(10, "a"), (11, "b")]
        response = await call

    assert response.status_code == 200
    assert response.json()["choices"][0]["token_ids"] == [10, 11]
