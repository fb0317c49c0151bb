"""The scheduler's shell on the in-process bus: start, live, restart, loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from services.scheduler import core
from services.scheduler.active import Active
from services.scheduler.config import SchedulerConfig
from services.scheduler.fold import Fold, Folded
from services.scheduler.shell import Shell
from services.scheduler.snapshots import SnapshotStore, encode_snapshot, take_snapshot
from shared import lifecycle, subjects
from shared.bus.protocol import Delivery, StreamMessage
from shared.codec import Input, decode_input, decode_published, encode
from shared.lifecycle import Lifecycle
from shared.messages.cell_events import CellConfigured, SchedulerStarted, TimerFired, WorkerLost
from shared.messages.gateway_notices import GatewayNotice, RequestFailed
from shared.messages.status import Heartbeat, Kind
from shared.messages.storage_events import StorageJoined
from shared.messages.storage_plans import CreateHostPool, StoragePlan
from shared.messages.worker_plans import AdmitRequest, WorkerPlan
from tests.memory_bus import MemoryBus
from tests.scripted_cell import GEOMETRY, submit, worker_joined
from tests.stateful.model_hidden import COSTS
from tests.unit.scheduler import test_shell_standby


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask again until it holds; a test that waits in vain fails here."""
    async with asyncio.timeout(20.0):
        while not await holds():
            await asyncio.sleep(0.01)


class Cell(test_shell_standby.Cell):
    """A cell, and the clock that its scheduler reads."""

    monotonic_ns = 0

    async def has_outputs(self) -> bool:
        return bool(await self.outputs())

    async def has_snapshots(self) -> bool:
        return bool(await self.bus.list_objects())

    async def has_no_workers(self) -> bool:
        return not (await self.status()).workers

    async def saw(self, matches: Callable[[Input], bool]) -> Input:
        """Wait for an input."""
        async with asyncio.timeout(20.0):
            async for message in self.bus.follow(subjects.INPUTS_STREAM):
                if matches(found := decode_input(message.data)):
                    return found
        raise AssertionError("unreachable")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no state looks again at once; every scheduler of these tests begins without one."""
    monkeypatch.setattr("services.scheduler.follower.RETRY_S", 0.01)


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    """An empty cell without a scheduler."""
    async with Cell() as made:
        yield made


@asynccontextmanager
async def scheduler(cell: Cell, name: str = "first", **settings: object) -> AsyncIterator[Lifecycle]:
    """A live scheduler. It dies without a word at the end, as if killed, unless the test has stopped it."""
    life = Lifecycle()
    chosen = {"id": name, "check_invariants_every": 1, "lead_ms": 100} | settings
    config = SchedulerConfig(**chosen)  # type: ignore[arg-type]
    bus = cell.broker.connect(name)
    shell = Shell(bus, config, f"incarnation-{name}", monotonic_ns=lambda: cell.monotonic_ns)
    running = asyncio.create_task(shell.run(life))

    async def is_live() -> bool:
        if running.done():
            running.result()
        cell.monotonic_ns += 10_000_000  # So that the lead of one who was killed falls free.
        return shell.live.is_set()

    await until(is_live)
    try:
        yield life
    finally:
        if not life.stopping.is_set():
            bus.disconnect()
            running.cancel()
        await asyncio.wait({running}, timeout=20.0)
        await bus.close()
    if not running.cancelled():
        running.result()


async def test_first_start_announces_itself_and_its_configuration(cell: Cell) -> None:
    """An empty stream begins with the epoch and the settings."""
    async with scheduler(cell, max_running=3):
        status = await cell.folded(2)

    started, configured = await cell.inputs()
    assert started == SchedulerStarted(scheduler_id="first", epoch=1)
    assert isinstance(configured, CellConfigured)
    assert configured.config.max_running == 3
    assert (status.scheduler_id, status.epoch, status.seq) == ("first", 1, 2)


async def test_members_that_were_there_before_any_scheduler_are_given_pools_by_its_settings(cell: Cell) -> None:
    """A stream may begin with them; by the defaults they would be given hidden pools of another form."""
    room: dict[str, Any] = {"host_bytes": 2**20, "disk_bytes": 2**20, "hidden_bytes": 2**20}
    await cell.put(StorageJoined(storage_id="s1", incarnation="one", node="node", **room))
    await cell.put(structs.replace(worker_joined(), restoration=COSTS))

    async with scheduler(cell, hidden_form="1/0/1"):
        await cell.folded(4)
    async with scheduler(cell, "second", hidden_form="off"):
        await cell.folded(6)

    kinds = [type(message).__name__ for message in await cell.inputs()][2:]
    plans = {encode(output): output for output in await cell.outputs() if isinstance(output, StoragePlan)}
    pools = [plan.order.geometry for plan in plans.values() if isinstance(plan.order, CreateHostPool)]
    assert kinds == ["SchedulerStarted", "CellConfigured", "SchedulerStarted", "CellConfigured"]
    assert pools == [GEOMETRY, structs.replace(GEOMETRY, absent=1)]


async def test_settings_that_a_scheduler_died_before_saying_are_said_by_the_next(cell: Cell) -> None:
    """Even where they are the defaults and it left a snapshot: until they are said nobody gets a pool."""
    await cell.put(SchedulerStarted(scheduler_id="dead", epoch=1))
    fold = Fold(core.new_state())
    async for message in cell.bus.follow(subjects.INPUTS_STREAM, live=False):
        fold.apply(message)
    await SnapshotStore(cell.bus).put(1, encode_snapshot(take_snapshot(fold)))

    async with scheduler(cell):
        await cell.folded(3)

    kinds = [type(message).__name__ for message in await cell.inputs()]
    assert kinds == ["SchedulerStarted", "SchedulerStarted", "CellConfigured"]


async def test_inputs_become_plans_with_the_time_of_sending(cell: Cell) -> None:
    """A request to a joined worker is admitted: the plan is published, stamped and captured."""
    received: list[Delivery] = []

    async def handler(delivery: Delivery) -> None:
        received.append(delivery)

    async def has_received() -> bool:
        return bool(received)

    await cell.bus.subscribe("tc.out.worker.w1", handler)
    async with scheduler(cell):
        await cell.put(worker_joined())
        await cell.folded(await cell.put(submit("r1", [1, 2, 3])))
        await until(has_received)

    plans = [output for output in await cell.outputs() if isinstance(output, WorkerPlan)]
    assert [plan.number for plan in plans] == list(range(1, len(plans) + 1))
    assert any(isinstance(plan.order, AdmitRequest) for plan in plans)
    assert int(received[0].headers[subjects.SENT_NS_HEADER]) > 0


async def test_outputs_are_written_before_anything_else_is_done_for_their_input(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus writes at the end of a turn of the loop; metrics, timers and heartbeats come after that."""
    happened: list[str] = []
    publish, observe = MemoryBus.publish, Active.observe

    async def published(bus: MemoryBus, subject: str, data: bytes, headers: Any = None) -> None:
        if subject.startswith(subjects.OUTPUTS[:-1]):
            asyncio.get_running_loop().call_soon(happened.append, "written")
        await publish(bus, subject, data, headers)

    def observed(active: Active, message: StreamMessage, folded: Folded) -> None:
        if folded.published:
            happened.append("observed")
        observe(active, message, folded)

    monkeypatch.setattr(MemoryBus, "publish", published)
    monkeypatch.setattr(Active, "observe", observed)
    async with scheduler(cell):
        await cell.put(worker_joined())
        await cell.folded(await cell.put(submit("r1", [1, 2, 3])))

    told = [each for place, each in enumerate(happened) if not place or happened[place - 1] != each]
    assert told[:2] == ["written", "observed"]
    assert told == ["written", "observed"] * (len(told) // 2)


async def test_restart_continues_with_the_same_numbers(cell: Cell) -> None:
    """Killed before some inputs and after others, the successor goes on counting; what it repeats has equal bytes."""
    async with scheduler(cell):
        await cell.put(worker_joined())
        await cell.folded(await cell.put(submit("r1", [1, 2, 3])))
    before = await cell.outputs()
    last = await cell.put(submit("r2", [4, 5, 6]))

    async with scheduler(cell, "second"):
        status = await cell.folded(last)
        await cell.folded(await cell.put(submit("r3", [7, 8, 9])))

    first_copies = list(dict.fromkeys(encode(output) for output in await cell.outputs()))
    numbers = [plan.number for plan in map(decode_published, first_copies) if isinstance(plan, WorkerPlan)]
    assert first_copies[: len(before)] == [encode(output) for output in before]
    assert numbers == list(range(1, len(numbers) + 1))
    assert status.epoch == 2
    assert status.counters["requests_accepted"] == 2


async def test_restart_from_a_snapshot_repeats_only_what_came_behind_it(cell: Cell) -> None:
    """Outputs before the snapshot are confirmed before it is taken and are not published again."""
    async with scheduler(cell):
        await cell.put(worker_joined())
        await cell.folded(await cell.put(submit("r1", [1, 2, 3])))
        taken = await cell.snapshot()
    before = await cell.outputs()
    seq = await cell.put(submit("r2", [4, 5, 6]))

    async with scheduler(cell, "second"):
        status = await cell.folded(seq)

    repeated = [output for output in (await cell.outputs())[len(before) :] if output.cause <= taken.seq]
    assert repeated == []
    assert status.counters["requests_accepted"] == 2


async def test_damaged_snapshots_fall_back_to_older_ones_and_to_the_start(cell: Cell) -> None:
    """With every snapshot torn the whole stream is folded again, to the same state."""
    async with scheduler(cell):
        await cell.put(worker_joined())
        await cell.folded(await cell.put(submit("r1", [1, 2, 3])))
        await cell.snapshot()
        expected = await cell.status()
    for name in await cell.bus.list_objects():
        await cell.bus.put_object(name, b"torn")

    async with scheduler(cell, "second"):
        status = await cell.folded(expected.seq + 1)

    assert status.counters == expected.counters
    assert status.workers == expected.workers


async def test_lost_beginning_without_a_snapshot_starts_anew_behind_the_end(cell: Cell) -> None:
    """Old requests are not run again; a snapshot marks the new beginning, so a further restart keeps the state."""
    async with scheduler(cell):
        await cell.put(worker_joined())
        await cell.folded(await cell.put(submit("r1", [1, 2, 3])))
    cell.broker.drop_oldest(subjects.INPUTS_STREAM, 2)

    async with scheduler(cell, "second"):
        anew = await cell.status()
        seq = await cell.put(worker_joined("w2", "two"))
        with_worker = await cell.folded(seq)
    async with scheduler(cell, "third"):
        again = await cell.folded(seq + 1)

    assert (anew.workers, anew.queued, anew.running) == ((), 0, 0)
    assert [worker.worker_id for worker in with_worker.workers] == ["w2"]
    assert again.workers == with_worker.workers
    assert again.epoch == with_worker.epoch + 1


async def test_snapshot_of_another_stream_is_not_used_but_its_epoch_counts(cell: Cell) -> None:
    """A stream made anew starts from nothing, with an epoch above every earlier one."""
    for name in ("one", "two"):
        async with scheduler(cell, name):
            await cell.put(worker_joined())
            await cell.snapshot()
    async with Cell() as anew:
        for name in await cell.bus.list_objects():
            data = await cell.bus.get_object(name)
            assert data is not None
            await anew.bus.put_object(name, bytes(data))
        async with scheduler(anew, "three"):
            status = await anew.folded(2)

    assert status.workers == ()
    assert status.epoch == 3
    assert [snapshot.seq async for snapshot in SnapshotStore(anew.bus).newest_first()] == []


async def test_message_that_is_no_input_is_skipped_live_and_after_a_restart(cell: Cell) -> None:
    """One bad message stops nobody."""
    async with scheduler(cell):
        await cell.bus.append("tc.in.cell", b"\xc1")
        seq = await cell.put(submit("r1", [1]))
        live = await cell.folded(seq)

    async with scheduler(cell, "second"):
        restarted = await cell.folded(seq)

    assert live.counters == restarted.counters
    assert restarted.queued == 1


async def test_changed_settings_are_an_input_and_unchanged_ones_are_not(cell: Cell) -> None:
    """A restart with the same flags appends its start only."""
    async with scheduler(cell):
        pass
    async with scheduler(cell, "second"):
        pass
    async with scheduler(cell, "third", max_running=5):
        await cell.folded(4)

    kinds = [type(message).__name__ for message in await cell.inputs()]
    assert kinds == ["SchedulerStarted", "CellConfigured", "SchedulerStarted", "SchedulerStarted", "CellConfigured"]


async def test_due_timer_is_an_input_also_after_a_restart(cell: Cell) -> None:
    """A deadline that passed while no scheduler ran fires at the next start."""
    async with scheduler(cell):
        message = submit("r1", [1])
        patient = type(message)(**{**{f: getattr(message, f) for f in message.__struct_fields__}, "deadline_ms": 60})
        await cell.folded(await cell.put(patient))

    async with scheduler(cell, "second"):
        fired = await cell.saw(lambda found: isinstance(found, TimerFired))
        await until(cell.has_outputs)

    notice = (await cell.outputs())[-1]
    assert isinstance(fired, TimerFired)
    assert isinstance(notice, GatewayNotice)
    assert isinstance(notice.word, RequestFailed)
    assert notice.word.code == "deadline_exceeded"


async def test_silent_worker_is_reported_lost_once(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats keep it; their end is one input."""
    monkeypatch.setattr("services.scheduler.active.LIVENESS_S", 0.01)
    beat = encode(Heartbeat(kind="worker", id="w1", incarnation="one"))

    async def silence_reaches_the_scheduler() -> bool:
        cell.monotonic_ns += 100_000_000
        return await cell.has_no_workers()

    async with scheduler(cell, heartbeat_lost_ms=2000, lead_ms=3_600_000):
        await cell.folded(await cell.put(worker_joined("w1", "one")))
        for _ in range(30):  # Longer than a worker may be silent.
            cell.monotonic_ns += 100_000_000
            await cell.bus.publish(subjects.heartbeat("worker", "w1"), beat)
            await asyncio.sleep(0.01)
        alive = await cell.status()
        await until(silence_reaches_the_scheduler)
        for _ in range(30):
            await silence_reaches_the_scheduler()
            await asyncio.sleep(0.01)

    lost = [message for message in await cell.inputs() if isinstance(message, WorkerLost)]
    assert [worker.worker_id for worker in alive.workers] == ["w1"]
    assert lost == [WorkerLost(worker_id="w1", incarnation="one")]


async def test_what_disks_hold_is_a_part_of_the_status(cell: Cell) -> None:
    """Storages say it with their heartbeats; who is none, or is not a member, is not believed."""
    joined = StorageJoined(storage_id="s1", incarnation="one", node="n1", host_bytes=2**20)

    def owned(kind: Kind, name: str, nbytes: int) -> bytes:
        return encode(Heartbeat(kind=kind, id=name, incarnation="one", owned_bytes={"": 1, "a": nbytes}))

    async with scheduler(cell):
        await cell.folded(await cell.put(joined))
        await cell.bus.publish(subjects.heartbeat("worker", "s1"), owned("worker", "s1", 7))
        await cell.bus.publish(subjects.heartbeat("storage", "s2"), owned("storage", "s2", 8))
        await cell.bus.publish(subjects.heartbeat("storage", "s1"), owned("storage", "s1", 9))

        async def has_disk() -> bool:
            return bool((await cell.status()).owner_bytes)

        await until(has_disk)
        status = await cell.status()

    assert {row.owner: row.disk for row in status.owner_bytes} == {"": 1, "a": 9}


async def test_a_worker_that_is_said_to_be_gone_is_lost_at_once(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the end of its silence nor the next look at heartbeats is waited for, and it is one input."""
    monkeypatch.setattr("services.scheduler.active.LIVENESS_S", 3600.0)
    gone = encode(Heartbeat(kind="worker", id="w1", incarnation="one", is_gone=True))

    async with scheduler(cell, heartbeat_lost_ms=3_600_000, lead_ms=3_600_000):
        await cell.folded(await cell.put(worker_joined("w1", "one")))
        await cell.bus.publish(subjects.heartbeat("storage", "s1"), gone)
        await cell.bus.publish(subjects.heartbeat("storage", "s1"), gone)
        await until(cell.has_no_workers)
        await cell.bus.publish(subjects.heartbeat("storage", "s1"), gone)
        # What is folded behind all of that shows that nothing more came of it.
        await cell.folded(await cell.put(worker_joined("w2", "two")))

    lost = [message for message in await cell.inputs() if isinstance(message, WorkerLost)]
    assert lost == [WorkerLost(worker_id="w1", incarnation="one", reason="process_gone")]


async def test_only_a_storage_may_say_that_somebody_else_is_gone(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the broker keeps subjects apart, no worker can have another one given up."""
    monkeypatch.setattr("services.scheduler.active.LIVENESS_S", 3600.0)
    gone = [encode(Heartbeat(kind="worker", id=name, incarnation="one", is_gone=True)) for name in ("w1", "w2")]

    async def only_one_worker_is_left() -> bool:
        return len((await cell.status()).workers) == 1

    async with scheduler(cell, heartbeat_lost_ms=3_600_000, lead_ms=3_600_000):
        await cell.put(worker_joined("w1", "one"))
        await cell.folded(await cell.put(worker_joined("w2", "one")))
        await cell.bus.publish(subjects.heartbeat("worker", "w2"), gone[0])
        await cell.bus.publish(subjects.heartbeat("storage", "s1"), gone[1])
        await until(only_one_worker_is_left)
        left = (await cell.status()).workers

    assert [worker.worker_id for worker in left] == ["w1"]


async def test_an_end_that_was_told_before_the_take_over_is_heard_when_it_is_told_again(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby does not remember who was gone; it watches whom the state has, and the word is said again."""
    monkeypatch.setattr("services.scheduler.active.LIVENESS_S", 3600.0)
    gone = encode(Heartbeat(kind="worker", id="w1", incarnation="one", is_gone=True))
    await cell.put(worker_joined("w1", "one"))
    await cell.bus.publish(subjects.heartbeat("storage", "s1"), gone)

    async with scheduler(cell, heartbeat_lost_ms=3_600_000, lead_ms=3_600_000):
        unaware = await cell.status()
        await cell.bus.publish(subjects.heartbeat("storage", "s1"), gone)
        await until(cell.has_no_workers)

    assert [worker.worker_id for worker in unaware.workers] == ["w1"]


async def test_graceful_stop_leaves_a_snapshot(cell: Cell) -> None:
    """The next start has nothing to fold."""
    async with scheduler(cell) as life:
        seq = await cell.put(worker_joined())
        await cell.folded(seq)
        life.stop()

    newest = [snapshot.seq async for snapshot in SnapshotStore(cell.bus).newest_first()]
    assert newest[0] >= seq
    assert life.exit_code == lifecycle.EXIT_OK


async def test_snapshots_are_taken_every_so_many_inputs(cell: Cell) -> None:
    """The setting bounds how long a restart folds."""
    async with scheduler(cell, snapshot_every_inputs=10):
        for number in range(30):
            await cell.put(submit(f"r{number}", [1]))
        await until(cell.has_snapshots)

    taken = [snapshot.seq async for snapshot in SnapshotStore(cell.bus).newest_first()]
    assert taken[0] >= 10


async def test_stream_that_is_trimmed_while_it_is_restored_is_restored_again(cell: Cell) -> None:
    """Better to start over than to fold on with a hole."""
    async with scheduler(cell):
        seq = await cell.put(worker_joined())
        await cell.folded(seq)
        await cell.snapshot()
    for _ in range(5):
        last = await cell.put(submit("r", [1]))
    follow = MemoryBus.follow
    trimmed = False

    def follow_trimmed(bus: MemoryBus, stream: str, **options: Any) -> AsyncIterator[StreamMessage]:
        # Retention strikes between choosing the snapshot and reading the tail behind it.
        nonlocal trimmed
        if options.get("from_seq") == seq + 1 and not trimmed:
            trimmed = True
            cell.broker.drop_oldest(subjects.INPUTS_STREAM, seq + 2)
        return follow(bus, stream, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryBus, "follow", follow_trimmed)
        async with scheduler(cell, "second"):
            status = await cell.folded(last + 1)

    assert trimmed
    assert (status.workers, status.queued) == ((), 0)  # Nothing reaches back to the snapshot any more.
    assert status.epoch == 3
