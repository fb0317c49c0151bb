"""Several schedulers of one cell on the in-process bus, each with a clock of its own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Self

import msgspec
import pytest

from services.scheduler.config import SchedulerConfig
from services.scheduler.fold import Fold
from services.scheduler.leadership import LEAD_RECORD, Claim
from services.scheduler.shell import Shell
from services.scheduler.snapshots import Snapshot, take_snapshot
from shared import subjects
from shared.bus.protocol import StreamLimits
from shared.codec import Input, Published, decode, decode_input, decode_published, encode
from shared.errors import TransportError, Unavailable
from shared.lifecycle import Lifecycle
from shared.messages.cell_events import SchedulerStarted
from shared.messages.status import CellStatus, GetStatus, SnapshotTaken, TakeSnapshot
from shared.messages.worker_plans import WorkerPlan
from shared.plan_order import PlanOrder
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.scripted_cell import scripted_cell, submit, worker_joined
from tests.waiting import until

LEAD_MS = 100


class Process:
    """One scheduler as a process. Its clock stands still until somebody moves it."""

    def __init__(self, cell: Cell, name: str, **settings: Any) -> None:
        self.clock_ns = 0
        self.bus = cell.broker.connect(name)
        self.life = Lifecycle()
        release = settings.pop("release", "this one")
        chosen: dict[str, Any] = {"id": name, "check_invariants_every": 1, "lead_ms": LEAD_MS} | settings
        self.shell = Shell(
            self.bus,
            SchedulerConfig(**chosen),
            f"incarnation-{name}-{len(cell.processes)}",
            release=release,
            monotonic_ns=lambda: self.clock_ns,
        )
        self.task = asyncio.create_task(self.shell.run(self.life), name=name)
        cell.processes.append(self)

    @property
    def is_live(self) -> bool:
        return self.shell.live.is_set()

    @property
    def stands_by(self) -> bool:
        return self.shell.standing_by.is_set()

    @property
    def position(self) -> int:
        return self.shell._follower.position

    async def kill(self) -> None:
        """As SIGKILL does: nothing is said any more, and the connection is gone."""
        self.bus.disconnect()
        self.task.cancel()
        await asyncio.wait({self.task})

    async def stop(self) -> None:
        """As SIGTERM does."""
        self.life.stop()
        await asyncio.wait_for(self.task, 20.0)

    async def take_over(self) -> None:
        """Let its time pass until it is active; others' stands still."""
        async with asyncio.timeout(20.0):
            while not self.is_live:
                self.clock_ns += LEAD_MS * 1_000_000 // 5
                await asyncio.sleep(0.005)


class Cell:
    """The broker, a client of the test, and the processes so far. Those that still run at the end are killed."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus: MemoryBus = self.broker.connect("test")
        self.processes: list[Process] = []

    async def __aenter__(self) -> Self:
        await self.bus.ensure_streams(StreamLimits())
        return self

    async def __aexit__(self, *error: object) -> None:
        for process in self.processes:
            if not process.task.done():
                await process.kill()

    async def active(self, name: str = "first", **settings: Any) -> Process:
        """A process that becomes the active one at once."""
        process = Process(self, name, **settings)
        await until(lambda: process.is_live)
        return process

    async def standby(self, name: str = "second", **settings: Any) -> Process:
        """A process that is ready to take over."""
        process = Process(self, name, **settings)
        await until(lambda: process.stands_by)
        return process

    async def put(self, *messages: Input) -> int:
        """The sequence of the last."""
        return [await self.bus.append("tc.in.cell", encode(message)) for message in messages][-1]

    async def inputs(self) -> list[Input]:
        return [decode_input(m.data) async for m in self.bus.follow(subjects.INPUTS_STREAM, live=False)]

    async def outputs(self) -> list[Published]:
        return [decode_published(m.data) async for m in self.bus.follow(subjects.OUTPUTS_STREAM, live=False)]

    async def starts(self) -> list[tuple[str, int]]:
        found = [one for one in await self.inputs() if isinstance(one, SchedulerStarted)]
        return [(one.scheduler_id, one.epoch) for one in found]

    async def status(self) -> CellStatus:
        return decode(await self.bus.call("tc.rpc.scheduler.status", encode(GetStatus())), CellStatus)

    async def folded(self, seq: int) -> CellStatus:
        """Wait until an active scheduler has folded input ``seq``."""
        async with asyncio.timeout(20.0):
            while True:
                try:
                    if (status := await self.status()).seq >= seq:
                        return status
                except Unavailable:
                    pass  # Between two terms.
                await asyncio.sleep(0.005)

    async def snapshot(self) -> SnapshotTaken:
        return decode(await self.bus.call("tc.rpc.scheduler.snapshot", encode(TakeSnapshot())), SnapshotTaken)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no state looks again at once; every scheduler of these tests begins without one."""
    monkeypatch.setattr("services.scheduler.follower.RETRY_S", 0.01)


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    """An empty cell; a process that failed by itself fails the test."""
    async with Cell() as made:
        yield made
    for process in made.processes:
        if not process.task.cancelled():
            process.task.result()


def failures(process: Process, name: str) -> list[Unavailable]:
    """Calls of this bus method that find no broker, from now on."""
    found: list[Unavailable] = []
    original: Callable[..., Awaitable[Any]] = getattr(process.bus, name)

    async def noted(*arguments: Any, **options: Any) -> Any:
        try:
            return await original(*arguments, **options)
        except Unavailable as error:
            found.append(error)
            raise

    setattr(process.bus, name, noted)
    return found


async def tries_to_restore(process: Process, count: int = 2) -> list[bool]:
    """Wait until it has tried so often, from now on, to get a state; whether it got one."""
    follower = process.shell._follower
    found: list[bool] = []
    original = follower._try_to_restore

    async def noted() -> Any:
        restored = await original()
        found.append(restored is not None)
        return restored

    follower._try_to_restore = noted  # type: ignore[method-assign]
    await until(lambda: len(found) >= count)
    return found[:count]


def numbers(outputs: list[Published]) -> list[int]:
    """Of the worker's plans, first copies only."""
    first_copies = dict.fromkeys(encode(output) for output in outputs)
    return [plan.number for plan in map(decode_published, first_copies) if isinstance(plan, WorkerPlan)]


def check_that_none_contradicts(outputs: list[Published]) -> None:
    """Whoever says a number to a target says the same bytes, so that it cannot matter whom the target obeys."""
    said: dict[tuple[str, int], set[bytes]] = defaultdict(set)
    for output in outputs:
        if isinstance(output, WorkerPlan):
            said[output.incarnation, output.number].add(encode(output))
    assert {key: len(copies) for key, copies in said.items() if len(copies) > 1} == {}


async def test_standby_folds_and_says_nothing(cell: Cell) -> None:
    """No plan, no input, no snapshot, no status, no answer; only its heartbeat."""
    said: list[str] = []
    first = await cell.active()
    second = Process(cell, "second")

    def watch(name: str) -> None:
        original: Callable[..., Awaitable[Any]] = getattr(second.bus, name)

        async def noted(subject: str, *arguments: Any, **options: Any) -> Any:
            said.append(f"{name} {subject}")
            return await original(subject, *arguments, **options)

        setattr(second.bus, name, noted)

    for name in ("publish", "append", "serve", "put_object", "delete_object", "write_record"):
        watch(name)
    await until(lambda: second.stands_by)
    seq = await cell.put(worker_joined(), *(submit(f"r{n}", [n, 2, 3]) for n in range(20)))
    await cell.folded(seq)
    await cell.snapshot()
    await until(lambda: second.position == first.position)

    assert set(said) == {f"publish {subjects.heartbeat('scheduler', 'second')}"}
    assert await cell.starts() == [("first", 1)]


async def test_standby_forgets_what_the_active_one_has_published(cell: Cell) -> None:
    """The lead says how far that is, so that a take-over repeats nothing of it."""
    first = await cell.active()
    second = await cell.standby()
    await cell.folded(await cell.put(worker_joined(), submit("r1", [1, 2, 3])))
    await until(lambda: second.position == first.position and second.shell._outbox.unconfirmed == 0)
    before = await cell.outputs()
    await first.kill()
    await second.take_over()
    await cell.folded(await cell.put(submit("r2", [4, 5, 6])))
    outputs = await cell.outputs()

    assert outputs[: len(before)] == before
    assert len(outputs) == len({encode(output) for output in outputs})
    assert numbers(outputs) == list(range(1, len(numbers(outputs)) + 1))
    assert await cell.starts() == [("first", 1), ("second", 2)]


async def test_outputs_that_died_with_the_active_one_are_published_by_its_successor(cell: Cell) -> None:
    """It had folded inputs and said what followed into a connection that led nowhere."""
    first = await cell.active()
    second = await cell.standby()
    publish = first.bus.publish

    async def swallow(subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        if not subject.startswith("tc.out."):
            await publish(subject, data, headers)

    async def never_comes_back() -> None:
        raise Unavailable("no answer in time")

    first.bus.publish, first.bus.flush = swallow, never_comes_back  # type: ignore[method-assign]
    last = await cell.put(worker_joined(), *(submit(f"r{n}", [n, 2, 3]) for n in range(8)))
    await until(lambda: first.position == last)
    silent = await cell.outputs()
    await first.kill()
    await second.take_over()
    status = await cell.folded(last)
    outputs = await cell.outputs()

    assert silent == []
    assert status.counters["requests_accepted"] == 8
    assert numbers(outputs) == list(range(1, len(numbers(outputs)) + 1))
    assert len(numbers(outputs)) == 4  # Admitted and planned are as many as a worker gets ahead.


async def test_graceful_stop_hands_over_at_once(cell: Cell) -> None:
    """Nobody's clock has to move."""
    first = await cell.active()
    second = await cell.standby()
    await first.stop()
    await until(lambda: second.is_live)
    status = await cell.folded(await cell.put(worker_joined()))

    assert status.scheduler_id == "second"
    assert first.life.exit_code == 0
    assert await cell.starts() == [("first", 1), ("second", 2)]


async def test_scheduler_that_comes_back_stands_by(cell: Cell) -> None:
    """It neither fences the active one nor says that it started."""
    first = await cell.active()
    second = await cell.standby()
    await first.kill()
    await second.take_over()
    again = await cell.standby("first")
    status = await cell.folded(await cell.put(worker_joined()))

    assert (status.scheduler_id, status.epoch) == ("second", 2)
    assert not again.is_live
    assert await cell.starts() == [("first", 1), ("second", 2)]


async def test_one_of_two_standbys_takes_over(cell: Cell) -> None:
    """Both find the lead free at the same moment; the other goes on standing by."""
    first = await cell.active()
    second, third = await cell.standby("second"), await cell.standby("third")
    await first.kill()
    async with asyncio.timeout(20.0):
        while not (second.is_live or third.is_live):
            # Either may see the last renewal late, and counts from then.
            for process in (second, third):
                process.clock_ns += LEAD_MS * 1_000_000 // 5
            await asyncio.sleep(0.005)
    seq = await cell.put(worker_joined(), submit("r1", [1]))
    status = await cell.folded(seq)
    await until(lambda: second.position == third.position)

    assert [second.is_live, third.is_live].count(True) == 1
    assert status.epoch == 2
    assert len(await cell.starts()) == 2


async def test_holder_that_is_cut_off_is_replaced_and_comes_back_as_the_standby(cell: Cell) -> None:
    """What it folded meanwhile it does not say again, and later it takes over with the same state."""
    first = await cell.active()
    second = await cell.standby()
    seq = await cell.put(worker_joined(), submit("r1", [1, 2, 3]))
    await cell.folded(seq)
    first.bus.disconnect()
    first.clock_ns += LEAD_MS * 1_000_000
    await second.take_over()
    await cell.folded(await cell.put(submit("r2", [4])))
    first.bus.reconnect()
    await until(lambda: first.stands_by and not first.is_live)
    await cell.folded(await cell.put(submit("r3", [5])))
    await second.stop()
    await until(lambda: first.is_live)
    status = await cell.folded(await cell.put(submit("r4", [6])))
    outputs = await cell.outputs()

    assert await cell.starts() == [("first", 1), ("second", 2), ("first", 3)]
    assert status.counters["requests_accepted"] == 4
    assert numbers(outputs) == list(range(1, len(numbers(outputs)) + 1))
    check_that_none_contradicts(outputs)


async def test_broker_s_absence_costs_the_holder_nothing(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    """All were cut off together: the holder goes on in the same term, and the standby does not take it for dead.

    It may last for hours, so each reason is logged once.
    """
    first = await cell.active()
    second = await cell.standby()
    everybody = (first, second)
    for process in everybody:
        process.bus.disconnect()
    for process in everybody:
        process.clock_ns += 100 * LEAD_MS * 1_000_000
    tried = failures(first, "write_record"), failures(second, "read_record")
    await until(lambda: all(len(found) >= 3 for found in tried))
    silent = not first.shell._lead.is_held
    for process in reversed(everybody):
        process.bus.reconnect()
    status = await cell.folded(await cell.put(worker_joined()))

    assert silent
    assert (status.scheduler_id, status.epoch) == ("first", 1)
    assert await cell.starts() == [("first", 1)]
    assert capsys.readouterr().out.count("lead_not_renewed") <= 2  # While it is held, and after that.


async def test_a_broker_that_lost_its_store_gets_new_streams_under_a_higher_epoch(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers begin at 1 again, so whoever obeyed earlier ones must be able to tell the two apart."""
    monkeypatch.setattr("services.scheduler.shell.BEHIND_S", 0.01)
    await cell.active()
    await cell.standby()
    await cell.folded(await cell.put(worker_joined(), submit("r1", [1, 2])))
    before = await cell.status()
    await until(lambda: cell.broker.records[LEAD_RECORD].revision > 8)  # Those of a new store are lower.

    cell.broker.lose_store()
    await until(lambda: bool(cell.broker.records))
    async with asyncio.timeout(20.0):
        while not await cell.starts():
            await asyncio.sleep(0.005)
    status = await cell.folded(await cell.put(worker_joined()))
    await until(lambda: all(process.position >= status.seq for process in cell.processes))

    assert [epoch for _, epoch in await cell.starts()] == [before.epoch + 1]
    assert (status.epoch, status.queued, status.running) == (before.epoch + 1, 0, 0)
    assert all(output.epoch == before.epoch + 1 for output in await cell.outputs())


async def test_standby_that_looks_before_it_hears_of_the_reconnect_takes_nothing(cell: Cell) -> None:
    """A look that was under way is answered first; the holder's time counts from that look all the same."""
    first = await cell.active()
    second = await cell.standby()
    second.bus._on_reconnect.clear()
    for process in (first, second):
        process.bus.disconnect()
    second.clock_ns += 100 * LEAD_MS * 1_000_000
    tried = failures(second, "read_record")
    await until(lambda: bool(tried))
    looked = second.shell._lead.look
    looks: list[bool] = []

    async def look() -> None:
        await looked()
        looks.append(second.is_live)

    second.shell._lead.look = look  # type: ignore[method-assign]
    second.bus.reconnect()
    await until(lambda: len(looks) >= 3 or second.is_live)
    first.bus.reconnect()
    status = await cell.folded(await cell.put(worker_joined()))

    assert (status.scheduler_id, status.epoch) == ("first", 1)
    assert first.is_live
    assert not second.is_live


async def test_two_who_both_believe_to_be_active_are_never_both_obeyed(cell: Cell) -> None:
    """A holder whose clock stands still and whose renewals get nowhere goes on speaking beside its successor.

    Whoever is heard first, in whatever order, a worker executes the plans of one scheduler that never ended.
    """
    script = scripted_cell(24)
    first = await cell.active(lead_ms=LEAD_MS)
    second = await cell.standby()
    stuck = asyncio.Event()

    async def write_nothing(name: str, data: bytes, **options: Any) -> int | None:
        await stuck.wait()
        raise Unavailable("no answer in time")

    async def feed(begin: int, end: int) -> int:
        seq = 0
        for message in script.messages[max(begin, 1) : end]:
            seq = await cell.bus.append(message.subject, message.data)
        return seq

    await cell.folded(await feed(0, 20))
    first.bus.write_record = write_nothing  # type: ignore[method-assign]
    # It does not even learn of its successor from the stream: only what was there before reaches it.
    first.shell._active._latest_start_seq = -(2**62)  # type: ignore[union-attr]
    first.shell._active.observe = lambda message, folded: None  # type: ignore[union-attr, method-assign]
    await second.take_over()
    assert first.is_live
    assert first.shell._lead.is_held
    await until(lambda: first.position == second.position)
    last = await feed(20, len(script.messages))
    await until(lambda: first.position == second.position >= last)
    await first.shell._outbox.confirm()
    await second.shell._outbox.confirm()
    outputs = await cell.outputs()
    plans = [output for output in outputs if isinstance(output, WorkerPlan)]
    expected = numbers(outputs)

    check_that_none_contradicts(outputs)
    assert len(plans) > len(expected)  # Both spoke, and said much of it twice.
    for heard in (plans, list(reversed(plans)), sorted(plans, key=lambda plan: (plan.number % 7, plan.number))):
        order: PlanOrder[WorkerPlan] = PlanOrder(plans[0].incarnation)
        executed = [due for plan in heard for due in order.offer(plan)]
        assert [plan.number for plan in executed] == expected == list(range(1, len(expected) + 1))
    stuck.set()


async def test_active_one_whose_time_is_over_does_not_answer(cell: Cell) -> None:
    """Another may know better by now."""
    first = await cell.active()

    async def unreachable(name: str, data: bytes, **options: Any) -> int | None:
        raise Unavailable("no answer in time")

    first.bus.write_record = unreachable  # type: ignore[method-assign]
    before = await cell.status()
    first.clock_ns += LEAD_MS * 1_000_000

    assert before.scheduler_id == "first"
    with pytest.raises(Unavailable):
        await cell.status()
    with pytest.raises(Unavailable):
        await cell.snapshot()


async def test_a_status_comes_behind_outputs_that_were_held_back(cell: Cell) -> None:
    """What was folded while the lead's time was over is published before any status covers it."""
    first = await cell.active()
    renew, is_reachable = first.bus.write_record, asyncio.Event()

    async def renew_later(name: str, data: bytes, **options: Any) -> int | None:
        if not is_reachable.is_set():
            raise Unavailable("no answer in time")
        return await renew(name, data, **options)

    first.bus.write_record = renew_later  # type: ignore[method-assign]
    await cell.put(worker_joined())
    first.clock_ns += LEAD_MS * 1_000_000
    seq = await cell.put(submit("held back", [1] * 20))
    await until(lambda: first.position >= seq)
    held_back = not any(isinstance(one, WorkerPlan) for one in await cell.outputs())

    is_reachable.set()
    await cell.folded(seq)

    assert held_back
    assert any(isinstance(one, WorkerPlan) for one in await cell.outputs())


async def test_standby_that_the_stream_left_behind_restores_again(cell: Cell) -> None:
    """From a snapshot of the active one; and takes over with its state."""
    first = await cell.active()
    second = await cell.standby()
    await cell.folded(await cell.put(worker_joined()))
    second.bus.disconnect()
    await cell.folded(await cell.put(*(submit(f"r{n}", [n, 2]) for n in range(10))))
    taken = await cell.snapshot()
    cell.broker.drop_oldest(subjects.INPUTS_STREAM, taken.seq - 1)
    second.bus.reconnect()
    await until(lambda: second.position >= taken.seq and second.stands_by)
    expected = await cell.status()
    await first.kill()
    await second.take_over()
    status = await cell.folded(expected.seq)

    assert second.shell._follower.restored is not None
    assert second.shell._follower.restored.seq == taken.seq
    assert status.counters["requests_accepted"] == 10
    assert status.workers == expected.workers


async def test_standby_waits_for_a_snapshot_where_the_stream_s_beginning_is_gone(cell: Cell) -> None:
    """Anything that it could fold without would not be the active one's state."""
    first = await cell.active()
    seq = await cell.put(worker_joined(), submit("r1", [1]))
    await cell.folded(seq)
    cell.broker.drop_oldest(subjects.INPUTS_STREAM, 1)
    second = Process(cell, "second")
    found = await tries_to_restore(second)
    had_none = not second.stands_by and second.position == 0
    await cell.snapshot()
    await until(lambda: second.stands_by)

    assert not any(found)
    assert had_none
    assert second.position == first.position


async def test_scheduler_without_a_state_takes_over_all_the_same(cell: Cell) -> None:
    """The active one died before there was a snapshot, and the stream's beginning is gone: the cell starts anew."""
    first = await cell.active()
    last = await cell.put(worker_joined(), submit("r1", [1]))
    await cell.folded(last)
    cell.broker.drop_oldest(subjects.INPUTS_STREAM, 1)
    second = Process(cell, "second")
    await first.kill()
    await second.take_over()
    status = await cell.folded(last)

    assert (status.workers, status.queued) == ((), 0)
    assert status.epoch == 3


async def test_scheduler_of_another_release_does_not_fold_beside_the_active_one(cell: Cell) -> None:
    """It might decide differently. When the active one stops it begins from the snapshot that this leaves."""
    first = await cell.active()
    second = Process(cell, "second", release="another one")
    await cell.folded(await cell.put(worker_joined(), submit("r1", [1, 2])))
    found = await tries_to_restore(second)
    had_none = second.position == 0 and not second.stands_by
    position = first.position
    await first.stop()
    await until(lambda: second.is_live)
    status = await cell.folded(await cell.put(submit("r2", [3])))
    restored = second.shell._follower.restored

    assert not any(found)
    assert had_none
    assert restored is not None
    assert restored.seq == position
    assert not restored.is_lost
    assert status.counters["requests_accepted"] == 2


async def test_another_release_does_not_fold_again_what_was_obeyed(cell: Cell) -> None:
    """It finds a snapshot and a tail that targets acted upon: it begins anew behind the end, and repeats nothing."""
    first = await cell.active()
    await cell.folded(await cell.put(worker_joined()))
    await cell.snapshot()
    end = await cell.put(submit("r1", [1, 2]))
    await cell.folded(end)
    said = await cell.outputs()
    second = Process(cell, "second", release="another one")
    await first.kill()
    await second.take_over()
    anew = await cell.status()
    seq = await cell.put(worker_joined("w2", "two"))
    status = await cell.folded(seq)

    assert second.shell._follower.restored is not None
    assert (second.shell._follower.restored.is_lost, second.shell._follower.restored.seq) == (True, end)
    assert (anew.workers, anew.queued, anew.running, anew.epoch) == ((), 0, 0, 3)
    assert [worker.worker_id for worker in status.workers] == ["w2"]
    assert [output.cause for output in (await cell.outputs())[len(said) :] if output.cause <= end] == []


async def test_what_nobody_folded_is_folded_by_another_release(cell: Cell) -> None:
    """The snapshot of the last holder is damaged. Requests that came since it let go are not lost with its state."""
    first = await cell.active()
    await cell.folded(await cell.put(worker_joined()))
    await first.stop()
    let_go_at = first.position
    for name in await cell.bus.list_objects():
        await cell.bus.put_object(name, b"torn")
    await cell.put(submit("r1", [1, 2]))
    second = await cell.active("second", release="another one")
    status = await cell.status()

    assert second.shell._follower.restored is not None
    assert (second.shell._follower.restored.is_lost, second.shell._follower.restored.seq) == (True, let_go_at)
    assert (status.workers, status.counters["requests_accepted"]) == ((), 1)


async def test_a_release_that_comes_back_does_not_continue_its_own_old_state(cell: Cell) -> None:
    """Another was active in between, for a moment; targets may have obeyed it."""
    first = await cell.active()
    await cell.folded(await cell.put(worker_joined(), submit("r1", [1, 2])))
    await first.stop()
    second = await cell.active("second", release="another one")
    await cell.folded(await cell.put(submit("r2", [3])))
    third = Process(cell, "third")
    await second.kill()
    await third.take_over()

    assert third.shell._follower.restored is not None
    assert third.shell._follower.restored.is_lost
    assert (await cell.status()).epoch == 4


async def test_a_holder_that_died_before_it_had_a_state_changes_nothing(cell: Cell) -> None:
    """It took the lead, of another release, and said nothing: the release before goes on."""
    first = await cell.active()
    await cell.folded(await cell.put(worker_joined(), submit("r1", [1, 2])))
    await first.kill()
    second = Process(cell, "second", release="another one")
    follow = second.bus.follow

    def hanging(stream: str, **options: Any) -> Any:
        return follow("TC_NOTHING", **options)

    second.bus.follow = hanging  # type: ignore[method-assign]
    await until(lambda: second.shell._lead.claim is not None)
    async with asyncio.timeout(20.0):
        while not second.shell._lead.is_ours:
            second.clock_ns += LEAD_MS * 1_000_000 // 5
            await asyncio.sleep(0.005)
    await second.kill()
    third = Process(cell, "third")
    await third.take_over()
    status = await cell.status()

    assert third.shell._follower.restored is not None
    assert not third.shell._follower.restored.is_lost
    assert (len(status.workers), status.counters["requests_accepted"]) == (1, 1)


@pytest.mark.parametrize("fault", [Unavailable("no answer"), TransportError("no object")])
async def test_the_last_snapshot_is_taken_again_after_a_failure(
    cell: Cell, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer that is lost, or an election while a rollout stops the scheduler, would make the next release begin
    anew.
    """
    monkeypatch.setattr("services.scheduler.shell.BEHIND_S", 0.01)
    first = await cell.active()
    await cell.folded(await cell.put(worker_joined(), submit("r1", [1, 2])))
    put, faults = first.bus.put_object, [fault, fault]

    async def put_at_last(name: str, data: bytes) -> None:
        if faults:
            raise faults.pop()
        await put(name, data)

    first.bus.put_object = put_at_last  # type: ignore[method-assign]
    await first.stop()
    second = await cell.active("second", release="another one")
    status = await cell.status()

    assert second.shell._follower.restored is not None
    assert not second.shell._follower.restored.is_lost
    assert (len(status.workers), status.counters["requests_accepted"]) == (1, 1)


async def test_a_standby_waits_for_no_snapshot_that_cannot_be_stored(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures that outlast an election are final: the cell would stand still meanwhile."""
    monkeypatch.setattr("services.scheduler.shell.BEHIND_S", 0.01)
    monkeypatch.setattr("services.scheduler.shell.ELECTION_S", 0.05)
    first, second = await cell.active(), await cell.standby()
    await cell.folded(await cell.put(worker_joined()))

    async def full(name: str, data: bytes) -> None:
        raise Unavailable("no space")

    first.bus.put_object = full  # type: ignore[method-assign]
    await first.stop()

    await until(lambda: second.is_live)
    assert (await cell.status()).workers


async def test_a_stop_ends_when_the_lead_is_lost_meanwhile(cell: Cell) -> None:
    """Its outputs are the next scheduler's to publish, so that a snapshot would wait for ever."""
    first, second = await cell.active(), await cell.standby()
    await cell.folded(await cell.put(worker_joined()))

    async def unconfirmed() -> None:
        first.shell._outbox.send_again()
        raise Unavailable("not stored")

    async def unwritten(*_: Any, **__: Any) -> int | None:
        raise Unavailable("no answer")

    write = first.bus.write_record
    first.bus.flush, first.bus.write_record = unconfirmed, unwritten  # type: ignore[method-assign]
    await cell.put(submit("r1", [1, 2]))
    await until(lambda: first.shell._outbox.unconfirmed > 0)
    stopping = asyncio.create_task(first.stop())
    await until(lambda: first.shell._follower.folding.locked())
    first.clock_ns += 10 * LEAD_MS * 1_000_000
    await second.take_over()
    first.bus.write_record = write  # type: ignore[method-assign]

    await stopping


async def test_a_stop_without_a_broker_takes_no_snapshot(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends soon, and the same release goes on from the stream."""
    monkeypatch.setattr("services.scheduler.shell.STOP_S", 0.05)
    first = await cell.active()
    await cell.folded(await cell.put(worker_joined()))
    first.bus.disconnect()
    await first.stop()
    second = Process(cell, "second")
    await second.take_over()

    assert second.shell._follower.restored is not None
    assert not second.shell._follower.restored.is_lost


async def test_a_call_that_waits_does_not_keep_a_scheduler_from_standing_by(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot waits until outputs are confirmed, which after the loss of the lead is the next scheduler's to do."""
    monkeypatch.setattr("services.scheduler.active.CLOSE_S", 0.05)
    first, second = await cell.active(), await cell.standby()
    await cell.folded(await cell.put(worker_joined()))
    flush, write = first.bus.flush, first.bus.write_record

    async def unconfirmed() -> None:
        first.shell._outbox.send_again()
        raise Unavailable("not stored")

    async def unwritten(*_: Any, **__: Any) -> int | None:
        raise Unavailable("no answer")

    first.bus.flush, first.bus.write_record = unconfirmed, unwritten  # type: ignore[method-assign]
    await cell.put(submit("r1", [1, 2]))
    await until(lambda: first.shell._outbox.unconfirmed > 0)
    call = asyncio.create_task(
        cell.bus.call(subjects.rpc("scheduler", "snapshot"), encode(TakeSnapshot()), timeout_s=0.5)
    )
    await until(lambda: first.shell._follower.folding.locked())
    first.clock_ns += 10 * LEAD_MS * 1_000_000
    await second.take_over()
    first.bus.flush, first.bus.write_record = flush, write  # type: ignore[method-assign]
    await asyncio.gather(call, return_exceptions=True)

    await until(lambda: first.stands_by)
    last = await cell.put(submit("r2", [3]))
    await until(lambda: first.position >= last)
    await first.stop()


async def test_a_stop_without_a_snapshot_loses_nothing(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not done in time; the same release folds a longer tail."""
    monkeypatch.setattr("services.scheduler.shell.LAST_SNAPSHOT_S", 0.01)
    first = await cell.active()

    async def never(name: str, data: bytes) -> None:
        await asyncio.Event().wait()

    first.bus.put_object = never  # type: ignore[method-assign]
    await cell.folded(await cell.put(worker_joined(), submit("r1", [1, 2])))
    expected = await cell.status()
    await first.stop()
    none = await cell.bus.list_objects()
    await cell.active("second")
    status = await cell.status()

    assert none == []
    assert status.workers == expected.workers
    assert status.counters["requests_accepted"] == 1


async def test_standby_gives_its_fold_up_when_another_release_takes_over(cell: Cell) -> None:
    """And has one again when its own release does, from a snapshot that this one took."""
    first = await cell.active()
    second = await cell.standby()
    await cell.folded(await cell.put(worker_joined()))
    other = Process(cell, "other", release="another one")
    await first.kill()
    await other.take_over()
    await until(lambda: not second.stands_by)
    await cell.folded(await cell.put(submit("r1", [1])))
    third = Process(cell, "third")
    await other.stop()
    await until(lambda: second.is_live or third.is_live)
    status = await cell.folded(await cell.put(submit("r2", [2])))
    await cell.snapshot()
    await until(lambda: second.position == third.position == status.seq or second.stands_by or third.stands_by)

    assert status.counters["requests_accepted"] == 2
    assert await cell.starts() == [("first", 1), ("other", 3), (status.scheduler_id, 4)]


async def test_start_in_the_stream_that_the_lead_does_not_know_of_begins_a_new_term(cell: Cell) -> None:
    """Somebody who knows no lead started: whoever holds it outbids that, and says so."""
    await cell.active()
    await cell.put(SchedulerStarted(scheduler_id="of old", epoch=9))
    async with asyncio.timeout(20.0):
        while (await cell.starts())[-1] != ("first", 10):
            await asyncio.sleep(0.005)
    status = await cell.folded(await cell.put(worker_joined()))

    assert (status.scheduler_id, status.epoch) == ("first", 10)


async def test_timers_set_before_the_take_over_fire_behind_it(cell: Cell) -> None:
    """A standby sets none; its successor's term begins with those of the state."""
    first = await cell.active()
    second = await cell.standby()
    message = submit("r1", [1])
    patient = type(message)(**{**{f: getattr(message, f) for f in message.__struct_fields__}, "deadline_ms": 200})
    await cell.folded(await cell.put(patient))
    await first.kill()
    await second.take_over()
    async with asyncio.timeout(20.0):
        while (status := await cell.folded(0)).queued:
            second.clock_ns += LEAD_MS * 1_000_000 // 20
            await asyncio.sleep(0.005)

    assert status.scheduler_id == "second"


async def test_standby_stops_without_a_word(cell: Cell) -> None:
    """It has nothing to hand over, and the active one does not notice."""
    await cell.active()
    second = await cell.standby()
    before = await cell.bus.list_objects()
    await second.stop()
    status = await cell.folded(await cell.put(worker_joined()))

    assert second.life.exit_code == 0
    assert (status.scheduler_id, status.epoch) == ("first", 1)
    assert await cell.bus.list_objects() == before


async def test_active_one_that_the_stream_left_behind_ends(cell: Cell) -> None:
    """It must not go on with a hole in its fold; its next start restores."""
    first = await cell.active()
    seq = await cell.put(worker_joined())
    await cell.folded(seq)
    first.bus.disconnect()
    await cell.put(*(submit(f"r{n}", [n, 2]) for n in range(5)))
    cell.broker.drop_oldest(subjects.INPUTS_STREAM, seq + 2)
    first.bus.reconnect()
    cell.processes.remove(first)

    with pytest.raises(TransportError, match="goes on with"):
        await asyncio.wait_for(first.task, 20.0)


async def test_lead_is_held_for_longer_over_a_pause_that_is_expected(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot takes as long as the last one did, and nothing is renewed meanwhile."""
    first = await cell.active()
    durations: list[int] = []
    write = first.bus.write_record

    async def noted(name: str, data: bytes, **options: Any) -> int | None:
        durations.append(msgspec.json.decode(data, type=Claim).lead_ms)
        return await write(name, data, **options)

    def slow(fold: Fold, release: str, said: int) -> Snapshot:
        first.clock_ns += 300_000_000
        return take_snapshot(fold, release, said)

    first.bus.write_record = noted  # type: ignore[method-assign]
    monkeypatch.setattr("services.scheduler.snapshot_keeper.take_snapshot", slow)
    await cell.put(worker_joined())
    await cell.snapshot()
    unexpected = set(durations)
    await until(lambda: first.shell._lead.is_held)
    await cell.snapshot()
    held = first.shell._lead.is_held
    await until(lambda: durations[-1] == LEAD_MS)

    assert max(unexpected, default=LEAD_MS) == LEAD_MS
    assert max(durations) == LEAD_MS + 600
    assert held


async def test_snapshot_is_not_stored_by_a_scheduler_that_was_superseded(cell: Cell) -> None:
    """The bucket is the active one's."""
    first = await cell.active()
    second = await cell.standby()
    active = first.shell._active
    assert active is not None
    await first.kill()
    await second.take_over()

    first.bus.reconnect()
    with pytest.raises(Unavailable):
        await active.snapshots.take()
    assert await cell.bus.list_objects() == []


async def test_standby_without_the_active_ones_policy_says_which_it_lacks(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, and it waits: with the package it would stand by."""
    told: list[str] = []
    monkeypatch.setattr("services.scheduler.follower._log.warning", lambda event, **said: told.append(said["reason"]))
    monkeypatch.setattr("services.scheduler.claimant.of_config", lambda config: ("policy newest-first", "policy lru"))
    await cell.active(release="with a stranger's")

    second = Process(cell, "second")
    await until(lambda: bool(told))

    assert not second.stands_by
    assert told == [
        "the active scheduler names policy newest-first, which is not registered here: install the package that has it"
    ]
