"""A whole worker in this process, on the memory bus: joining, serving, failing and leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
import torch

from services.worker.bootstrap import make_saving, make_shell
from services.worker.config import WorkerConfig
from services.worker.identity import WorkerIdentity
from services.worker.importance.disk_reads import DiskReads
from services.worker.importance.read_buffers import ReadBuffers
from services.worker.importance.storage_calls import StorageCalls
from services.worker.kv.host_stores import HostStores
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from services.worker.streams import wait_for_streams
from shared import subjects
from shared.bus.protocol import Delivery, StreamLimits
from shared.codec import Input, decode, decode_input, encode
from shared.errors import InternalError, OperatorError, SparsePrefixLost, TransportError, Unavailable
from shared.lifecycle import Lifecycle
from shared.messages.base import unpack_int32
from shared.messages.page_stores import PagesStored, StorePages
from shared.messages.sparse_reads import ReadSparse
from shared.messages.status import CellStatus, GetInventory, GetOutputs, Inventory, Outputs, WorkerStatus
from shared.messages.tokens import TokenBatch
from shared.messages.worker_events import (
    BatchDone,
    LeaseRequested,
    RequestFinished,
    RestorationCosts,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from shared.messages.worker_plans import Dismiss, LeaveCell, WorkerOrder, WorkerPlan
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.unit.worker.driven_executor import admit, batch, chunk, extend, vocabulary
from tests.unit.worker.fake_model import GEOMETRY, FakeRunner, continuation

COSTS = RestorationCosts(hidden=0, hidden_us=0.0, token_us=2.0, pair_us=0.1, link_bytes_per_us=1000.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 14, 15]

E = TypeVar("E", bound=Input)


class Cell:
    """A worker shell and, on the other side of the bus, what a scheduler and a gateway would do."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.worker = self.broker.connect("worker")
        self.other = self.broker.connect("scheduler and gateway")
        self.runner: Any = FakeRunner()
        self.disk_reads: DiskReads | None = None
        self.stores: HostStores | None = None
        self.life = Lifecycle()
        self.drain_timeout_ms = 0
        self.heard: list[TokenBatch] = []
        self.run: asyncio.Task[None]
        self._number = 0

    async def start(self) -> None:
        await self.other.ensure_streams(StreamLimits())
        await self.other.subscribe(subjects.tokens("g"), self._hear)
        pool = self.runner.pool
        loads = Loads(
            GEOMETRY, pool.pages, BatchedMover(pool), timeout_s=60, clock_ns=lambda: 1, stores=self.stores
        )  # fmt: skip
        config = WorkerConfig(model="unused", id="w", lease_low_tokens=2, drain_timeout_ms=self.drain_timeout_ms)
        self.shell = make_shell(
            config,
            WorkerIdentity(worker_id="w", incarnation="inc", node="n", model="fingerprint"),
            self.worker,
            self.runner,
            vocabulary(),
            loads=loads,
            saving=make_saving(config, self.runner, None),
            restoration=COSTS,
            disk_reads=self.disk_reads,
        )
        self.run = asyncio.create_task(self.shell.run(self.life))
        await self.event(WorkerJoined)

    async def _hear(self, delivery: Delivery) -> None:
        self.heard.append(decode(delivery.data, TokenBatch))

    async def give(self, *orders: WorkerOrder, bus: MemoryBus | None = None) -> None:
        """Publish orders as the next plans."""
        for order in orders:
            self._number += 1
            plan = WorkerPlan(worker_id="w", incarnation="inc", number=self._number, epoch=1, cause=1, order=order)
            await (bus or self.other).publish(subjects.worker_output("w"), encode(plan))

    def events(self) -> list[Input]:
        return [decode_input(message.data) for message in self.broker.stream(subjects.INPUTS_STREAM).messages]

    async def event(self, kind: type[E], accept: Callable[[E], bool] = lambda event: True) -> E:
        """Wait for an event of this kind in the inputs stream."""
        async with asyncio.timeout(20):
            async for message in self.other.follow(subjects.INPUTS_STREAM):
                found = decode_input(message.data)
                if isinstance(found, kind) and accept(found):
                    return found
        raise AssertionError("the stream ended")

    async def outputs(self, request_id: str, index: int, attempt: int = 1) -> Outputs:
        asked = encode(GetOutputs(request_id=request_id, attempt=attempt, index=index))
        return decode(await self.other.call(subjects.rpc("worker", "outputs", "w"), asked), Outputs)

    async def stop(self) -> None:
        self.life.stop()
        await asyncio.wait_for(asyncio.gather(self.run, return_exceptions=True), 20)
        self.runner.close()

    async def told_to_stop(self) -> WorkerDraining:
        """SIGTERM came; returns what the worker says to that."""
        self.life.signalled()
        return await self.event(WorkerDraining)


@asynccontextmanager
async def cell(drain_timeout_ms: int = 0) -> AsyncIterator[Cell]:
    """A worker that drains for so long when it is told to stop: nobody here would let it go."""
    made = Cell()
    made.drain_timeout_ms = drain_timeout_ms
    await made.start()
    try:
        yield made
    finally:
        made.life.hurrying.set()
        await made.stop()


async def test_a_worker_that_stores_pages_answers_storages() -> None:
    """One that does not serves no such calls, as those of an earlier release."""
    call = encode(StorePages(worker_incarnation="inc", storage_id="s", storage_incarnation="si", pool="p"))
    made = Cell()
    made.stores = HostStores(BatchedMover(made.runner.pool), made.runner.pool.pages)
    await made.start()
    answer = decode(await made.other.call(subjects.rpc("worker", "store", "w"), call), PagesStored)
    await made.stop()
    made.stores.close()
    async with cell() as without:
        with pytest.raises(Unavailable):
            await without.other.call(subjects.rpc("worker", "store", "w"), call)

    assert answer.refused == "no host pool of s is attached"


async def test_reads_from_the_disk_hear_which_storages_there_are() -> None:
    """A slot that was lent to a storage which nobody lists any more is free again."""
    made = Cell()
    buffers = ReadBuffers("thermocline-test", 4096, slots=2)
    made.disk_reads = DiskReads(
        buffers, StorageCalls(made.worker, ask_again_s=1000.0), GEOMETRY, torch.device("cpu"), timeout_s=20.0
    )
    await made.start()
    call = ReadSparse(namespace="", depth=0, chunks=b"", layer=0, part="kv", buffer="", offset=0, nbytes=8)
    with pytest.raises(SparsePrefixLost, match="does not answer"):
        await asyncio.to_thread(made.disk_reads.read, "gone", [call])
    lent = buffers.taken

    status = CellStatus(
        scheduler_id="c", epoch=1, seq=1, model="m", page_size=4, queued=0, running=0, max_queued=1, max_context=1
    )
    await made.other.publish(subjects.STATUS, encode(status))
    async with asyncio.timeout(20):
        while buffers.taken:
            await asyncio.sleep(0)
    await made.stop()
    await made.disk_reads.close()

    assert lent == 1


async def test_a_worker_joins_serves_and_leaves() -> None:
    """Events in order, tokens to the gateway, both calls answered, and a last word at the end."""
    async with cell() as made:
        await made.give(admit(PROMPT, range(10)), batch(chunk(0, 10)))
        finished = await made.event(RequestFinished)
        await made.worker.flush()
        outputs = await made.outputs("r", 3)
        inventory = decode(
            await made.other.call(subjects.rpc("worker", "inventory", "w"), encode(GetInventory())), Inventory
        )
        made.life.stop()
        await asyncio.wait_for(made.run, 20)

        kinds = [type(event) for event in made.events()]
        heard = [token for sent in made.heard for item in sent.items for token in item.tokens]
    joined = made.events()[0]
    assert kinds == [WorkerJoined, BatchDone, RequestFinished, WorkerLeft]
    assert isinstance(joined, WorkerJoined)
    assert (joined.model, joined.pool.pages, joined.max_context) == ("fingerprint", 64, 256)
    assert joined.restoration == COSTS
    assert unpack_int32(finished.output) == heard == continuation(PROMPT, 8)
    assert outputs.item is not None
    assert list(outputs.item.tokens) == continuation(PROMPT, 8)[3:]
    assert (inventory.last_plan, inventory.pages_total, inventory.requests) == (2, 64, ())
    assert inventory.counters["prefill_tokens_computed"] == 10
    assert all((sent.worker_id, sent.incarnation) == ("w", "inc") for sent in made.heard)


async def test_a_worker_that_is_told_to_stop_works_on_until_it_is_let_go() -> None:
    """It finishes what it runs, takes orders, and says its last word when nothing is left for it to do."""
    async with cell(60_000) as made:
        await made.give(admit(PROMPT, range(3)), batch(chunk(0, 10)))
        await made.event(LeaseRequested)
        said = await made.told_to_stop()
        await made.give(extend([30, 31]))
        finished = await made.event(RequestFinished)
        is_done_before = made.run.done()
        await made.give(LeaveCell())
        await asyncio.wait_for(made.run, 20)

    assert said.grace_ms == 54_000
    assert unpack_int32(finished.output) == continuation(PROMPT, 8)
    assert not is_done_before
    assert [type(event) for event in made.events()] == [
        WorkerJoined,
        BatchDone,
        LeaseRequested,
        WorkerDraining,
        RequestFinished,
        WorkerLeft,
    ]


async def test_a_second_signal_ends_the_drain() -> None:
    """Who sends it does not want to wait; what ran is left to others."""
    async with cell(60_000) as made:
        await made.give(admit(PROMPT, range(3)), batch(chunk(0, 10)))
        await made.event(LeaseRequested)
        await made.told_to_stop()
        made.life.signalled()

        await asyncio.wait_for(made.run, 20)
    assert [type(event) for event in made.events()][-2:] == [WorkerDraining, WorkerLeft]


async def test_a_worker_whose_scheduler_is_away_leaves_after_its_grace() -> None:
    """Nobody answers, and it does not wait for longer than it was given."""
    async with cell(drain_timeout_ms=1) as made:
        await made.told_to_stop()

        await asyncio.wait_for(made.run, 20)
    assert [type(event) for event in made.events()] == [WorkerJoined, WorkerDraining, WorkerLeft]


async def test_decoding_goes_on_without_a_broker() -> None:
    """Events wait and arrive once and in order; tokens that were lost can be asked for."""
    async with cell() as made:
        await made.give(admit(PROMPT, range(3)), batch(chunk(0, 10)))
        await made.event(LeaseRequested)
        made.worker.disconnect()
        await made.give(extend([30, 31]))  # Missed: the worker is not connected.
        made.worker.reconnect()
        finished = await made.event(RequestFinished)
        outputs = await made.outputs("r", 0)

    assert unpack_int32(finished.output) == continuation(PROMPT, 8)
    assert outputs.item is not None
    assert list(outputs.item.tokens) == continuation(PROMPT, 8)
    assert [type(event) for event in made.events()] == [
        WorkerJoined,
        BatchDone,
        LeaseRequested,
        RequestFinished,
        WorkerLeft,
    ]


async def test_a_dismissed_worker_refuses_to_go_on() -> None:
    """An OperatorError makes the process exit with code 2, which no supervisor restarts."""
    async with cell() as made:
        await made.give(Dismiss(reason="other model"))

        with pytest.raises(OperatorError, match="other model"):
            await asyncio.wait_for(made.run, 20)
    assert [type(event) for event in made.events()] == [WorkerJoined]


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_broken_device_ends_the_worker_and_says_so(*, is_draining: bool) -> None:
    """The error reaches the process, and the cell need not wait for heartbeats to stop."""
    async with cell(60_000) as made:
        if is_draining:
            await made.told_to_stop()
        made.runner.is_broken = True
        await made.give(
            admit(PROMPT, range(5)), admit(PROMPT, range(5, 10), request_id="q"),
            batch(chunk(0, 10), chunk(0, 10, request_id="q")),
        )  # fmt: skip

        with pytest.raises(InternalError, match="every request"):
            await asyncio.wait_for(made.run, 20)
    assert isinstance(made.events()[-1], WorkerLeft)


def status(*incarnations: str) -> CellStatus:
    return CellStatus(
        scheduler_id="s", epoch=1, seq=9, model="fingerprint", page_size=4, queued=0, running=0, max_queued=9,
        max_context=256,
        workers=tuple(WorkerStatus(worker_id="w", incarnation=name, running=0, waiting=0) for name in incarnations),
    )  # fmt: skip


async def test_an_incarnation_that_the_cell_gave_up_ends() -> None:
    """It was listed once and is not any more: its pages belong to nobody."""
    async with cell() as made:
        await made.other.publish(subjects.STATUS, encode(status()))
        await made.other.publish(subjects.STATUS, encode(status("inc")))
        await made.other.publish(subjects.STATUS, encode(status("another")))

        with pytest.raises(TransportError, match="given this incarnation up"):
            await asyncio.wait_for(made.run, 20)


async def test_a_worker_waits_for_the_streams() -> None:
    """It may be started before the scheduler has made them."""
    broker = MemoryBroker()
    waiting = asyncio.create_task(wait_for_streams(broker.connect("worker"), Lifecycle()))
    for _ in range(5):
        await asyncio.sleep(0)
    waited = not waiting.done()

    await broker.connect("scheduler").ensure_streams(StreamLimits())

    assert await asyncio.wait_for(waiting, 20)
    assert waited
