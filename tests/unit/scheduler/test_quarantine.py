"""Inputs for which the core raises: counted across deaths, left out by all, and never where that would contradict."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.scheduler import core
from services.scheduler.fold import StepFailed
from services.scheduler.leadership import Progress
from services.scheduler.quarantine import FAILURES, MOST_AT_ONCE, decide, read_skips
from services.scheduler.record import record
from services.scheduler.recording import Header
from services.scheduler.replay import main as replay_main
from services.scheduler.replay import replay
from services.scheduler.snapshots import decode_snapshot, object_name
from shared import subjects
from shared.bus.protocol import StreamLimits, StreamMessage
from shared.codec import Input, encode
from shared.errors import RecordingError, Unavailable
from shared.messages.cell_events import InputFailed, InputSkipped, SkipInput
from shared.messages.gateway_notices import GatewayNotice, RequestFailed
from shared.messages.requests import SubmitRequest
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.recording_files import writing
from tests.scripted_cell import submit, worker_joined
from tests.unit.scheduler.test_shell_standby import Cell, Process, check_that_none_contradicts
from tests.waiting import until

POISON = "poison"


def is_poison(message: Input) -> bool:
    return isinstance(message, SubmitRequest) and message.request_id == POISON


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core raises half way through the request of that name; waits are short."""
    original = core.step

    def step(state: core.CellState, stamped: core.Stamped) -> list[core.Output]:
        if is_poison(stamped.input):
            state.last_seq, state.epoch = stamped.seq, 99
            raise KeyError("poisoned")
        return original(state, stamped)

    monkeypatch.setattr(core, "step", step)
    monkeypatch.setattr("services.scheduler.follower.RETRY_S", 0.01)
    monkeypatch.setattr("services.scheduler.follower.FAILED_RETRY_S", 0.01)


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    """An empty cell, whose processes may end by a failed step and by nothing else."""
    async with Cell() as made:
        yield made
    for process in made.processes:
        if not process.task.cancelled() and process.task.exception() is not None:
            assert isinstance(process.task.exception(), StepFailed)


class Supervised:
    """A scheduler that is started again whenever it ends by itself."""

    def __init__(self, cell: Cell, name: str, **settings: Any) -> None:
        self._cell, self._name, self._settings = cell, name, settings
        self.deaths = 0
        self.process = Process(cell, name, **settings)
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.wait({self.process.task})
            if self.process.task.cancelled() or self.process.task.exception() is None:
                return
            self.deaths += 1
            self.process = Process(self._cell, self._name, **self._settings)


async def settled(*supervised: Supervised, seq: int) -> None:
    """Wait until all have folded up to ``seq`` and one of them speaks."""
    async with asyncio.timeout(30.0):
        while not (
            any(one.process.is_live for one in supervised) and all(one.process.position >= seq for one in supervised)
        ):
            for one in supervised:
                one.process.clock_ns += 20_000_000
            await asyncio.sleep(0.005)


def state_of(process: Process) -> bytes:
    return core.encode_state(process.shell._follower.fold.state)


async def test_a_poisoned_request_is_left_out_after_some_failures_and_its_gateway_is_told(cell: Cell) -> None:
    """The only scheduler dies by it so often, then goes on; everything before and behind it is decided as ever."""
    only = Supervised(cell, "only")
    await until(lambda: only.process.is_live)
    await cell.put(worker_joined(), submit("before", [1] * 20))

    poison = await cell.put(submit(POISON, [2] * 20))
    after = await cell.put(submit("after", [3] * 20))
    await settled(only, seq=after)

    assert only.deaths == FAILURES - 1
    inputs = await cell.inputs()
    assert [one.seq for one in inputs if isinstance(one, InputFailed)] == [poison] * FAILURES
    (skipped,) = [one for one in inputs if isinstance(one, InputSkipped)]
    assert (skipped.seq, skipped.kind, skipped.subject) == (poison, "SubmitRequest", "tc.in.cell")
    assert "KeyError('poisoned')" in skipped.reason
    status = await cell.folded(len(inputs))
    assert (status.running, status.counters["inputs_quarantined"], status.counters["inputs_failed"]) == (2, 1, 3)
    (shown,) = [each for each in status.degraded if each.what == "input"]
    assert f"input {poison} (SubmitRequest on tc.in.cell)" in shown.reason
    notices = [one for one in await cell.outputs() if isinstance(one, GatewayNotice)]
    assert [notice.word for notice in notices] == [
        RequestFailed(request_id=POISON, code="internal_error", message="the scheduler could not process this request")
    ]


async def test_active_and_standby_come_through_poison_under_load_with_equal_states(cell: Cell) -> None:
    """Both fail at the same input; both leave it out, whoever decides; nothing that was said is contradicted."""
    pair = Supervised(cell, "first"), Supervised(cell, "second")
    await until(lambda: any(one.process.is_live for one in pair))
    await until(lambda: any(one.process.stands_by for one in pair))
    await cell.put(worker_joined())
    await cell.put(*(submit(f"before-{number}", [number] * 20) for number in range(20)))
    await cell.snapshot()

    await cell.put(submit(POISON, [2] * 20))
    last = await cell.put(*(submit(f"after-{number}", [number] * 20) for number in range(20)))
    await settled(*pair, seq=last)
    end = await cell.put(submit("end", [7] * 20))
    await settled(*pair, seq=end)
    await until(lambda: pair[0].process.position == pair[1].process.position)

    assert state_of(pair[0].process) == state_of(pair[1].process)
    assert sum(one.deaths for one in pair) == FAILURES - 1
    assert pair[0].process.shell._follower.fold.state.counters["requests_accepted"] == 41
    check_that_none_contradicts(await cell.outputs())


async def test_standby_that_could_fold_it_leaves_it_out_once_that_is_decided(cell: Cell) -> None:
    """A fold that has come past the input begins anew, and ends with the state of the others."""
    await cell.put(worker_joined())
    harmless = await cell.put(submit("harmless", [1] * 20))
    active = await cell.active()
    standby = await cell.standby()
    await until(lambda: standby.position == active.position)
    await active.kill()
    # As another scheduler decides that could not fold it; this one must give its own view up.
    decision = InputSkipped(seq=harmless, subject="tc.in.cell", kind="SubmitRequest", reason="a test")
    last = await cell.bus.append(subjects.skips_input(), encode(decision))

    await until(lambda: standby.position >= last or standby.shell._follower.restored is None)
    await standby.take_over()

    status = await cell.folded(last)
    assert status.counters["inputs_quarantined"] == 1
    assert "requests_accepted" not in status.counters


async def test_a_decision_that_no_scheduler_can_have_made_changes_nothing(cell: Cell) -> None:
    """On another subject it may be anybody's, and of a later input nobody can know."""
    await cell.active()
    joined = await cell.put(worker_joined())
    forged = InputSkipped(seq=joined, subject="x", kind="x", reason="forged")
    await cell.put(forged)

    last = await cell.bus.append(subjects.skips_input(), encode(InputSkipped(seq=99, subject="", kind="", reason="")))
    status = await cell.folded(last)

    assert len(status.workers) == 1
    assert "inputs_quarantined" not in status.counters
    assert (await read_skips(cell.bus)).decided == {}


async def test_an_order_skips_an_input_at_which_every_start_hangs_or_dies(cell: Cell) -> None:
    """One failure, or none that could be told, and an operator's order: the next start leaves it out."""
    poison = await cell.put(submit(POISON, [2] * 20))
    await cell.bus.append(subjects.skip_orders_input(), encode(SkipInput(seq=poison, reason="it hangs")))

    only = Supervised(cell, "only")
    await settled(only, seq=poison)

    assert only.deaths == 0
    status = await cell.folded(poison)
    assert (status.counters["inputs_quarantined"], status.counters["skips_ordered"]) == (1, 1)
    assert any("it hangs" in each.reason for each in status.degraded)


async def test_an_order_for_an_input_that_was_folded_is_refused_for_ever(cell: Cell) -> None:
    """Workers obeyed what it led to. Neither the scheduler that folded it nor one that starts later leaves it out."""
    first = await cell.active()
    folded = await cell.put(worker_joined(), submit("one", [1] * 20))
    await cell.folded(folded)
    await until(lambda: first.shell._outbox.published.seq >= folded)
    order = await cell.bus.append(subjects.skip_orders_input(), encode(SkipInput(seq=folded, reason="changed my mind")))
    await cell.folded(order)
    await first.kill()

    second = Process(cell, "second")
    await second.take_over()

    status = await cell.folded(order)
    assert status.running == 1
    assert "inputs_quarantined" not in status.counters
    assert [one for one in await cell.inputs() if isinstance(one, InputSkipped)] == []


async def test_snapshot_that_holds_an_input_which_is_left_out_is_not_used(cell: Cell) -> None:
    """However it came about, the fold begins at an earlier one, or at the stream's beginning."""
    first = await cell.active()
    folded = await cell.put(worker_joined(), submit("one", [1] * 20))
    await cell.folded(folded)
    await cell.snapshot()
    await first.kill()
    decision = InputSkipped(seq=folded, subject="tc.in.cell", kind="SubmitRequest", reason="a test")
    last = await cell.bus.append(subjects.skips_input(), encode(decision))

    second = Process(cell, "second")
    await second.take_over()

    status = await cell.folded(last)
    assert (status.running, status.counters["inputs_quarantined"]) == (0, 1)
    assert second.shell._follower.restored is not None
    assert second.shell._follower.restored.seq == 0


async def test_recording_never_begins_at_a_snapshot_that_holds_what_was_left_out(cell: Cell, tmp_path: Path) -> None:
    """Where the stream's beginning is gone and no other snapshot is there, nothing can be recorded."""
    first = await cell.active()
    folded = await cell.put(worker_joined(), submit("one", [1] * 20))
    await cell.folded(folded)
    taken = await cell.snapshot()
    await first.kill()
    decision = InputSkipped(seq=folded, subject="tc.in.cell", kind="SubmitRequest", reason="a test")
    await cell.bus.append(subjects.skips_input(), encode(decision))
    cell.broker.drop_oldest(subjects.INPUTS_STREAM, taken.seq - 1)

    with pytest.raises(RecordingError, match="no snapshot stands in"):
        await record(cell.bus, tmp_path / "none.tcrec")


async def test_snapshot_behind_the_decision_is_used(cell: Cell) -> None:
    """It says which inputs were left out, so a repeated decision changes nothing either."""
    only = Supervised(cell, "only")
    await until(lambda: only.process.is_live)
    poison = await cell.put(submit(POISON, [2] * 20))
    await settled(only, seq=poison)
    taken = await cell.snapshot()
    again = InputSkipped(seq=poison, subject="tc.in.cell", kind="SubmitRequest", reason="again")
    last = await cell.bus.append(subjects.skips_input(), encode(again))
    await only.process.kill()

    second = Process(cell, "second")
    await second.take_over()

    status = await cell.folded(last)
    assert second.shell._follower.restored is not None
    assert second.shell._follower.restored.seq == taken.seq
    assert status.counters["inputs_quarantined"] == 1


async def test_half_changed_state_is_neither_told_nor_kept(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a failure is being counted, no snapshot is taken and no call is answered from what the step left."""
    first = await cell.active(snapshot_every_inputs=1)
    await cell.put(worker_joined())
    counting, may_count = asyncio.Event(), asyncio.Event()
    original = first.bus.append

    async def held_up(subject: str, data: bytes, **options: Any) -> int:
        if subject == subjects.skips_input():
            counting.set()
            await may_count.wait()
        return await original(subject, data, **options)

    monkeypatch.setattr(first.bus, "append", held_up)
    await cell.put(submit(POISON, [2] * 20))
    await counting.wait()

    with pytest.raises(Unavailable, match="could not fold an input"):
        await cell.status()
    with pytest.raises(Unavailable, match="half changed"):
        await cell.snapshot()
    may_count.set()
    await asyncio.wait({first.task})
    assert [one.epoch for one in map(decode_snapshot, cell.broker.objects.values())] == [1] * len(cell.broker.objects)


# -- what is decided --------------------------------------------------------------------------------------------


async def streams(*messages: Input) -> tuple[MemoryBus, int]:
    """A bus with these inputs, and the sequence of the last."""
    bus = MemoryBroker().connect("test")
    await bus.ensure_streams(StreamLimits())
    seq = 0
    for message in messages:
        seq = await bus.append("tc.in.cell", encode(message))
    return bus, seq


async def fail(bus: MemoryBus, seq: int, times: int = FAILURES) -> None:
    for _ in range(times):
        failed = InputFailed(seq=seq, scheduler_id="s", error="KeyError()")
        await bus.append(subjects.skips_input(), encode(failed))


async def test_one_failure_less_is_not_enough() -> None:
    """Only the last of them decides, and only once."""
    bus, seq = await streams(submit("one", [1]))
    await fail(bus, seq, FAILURES - 1)
    await decide(bus, Progress())
    assert (await read_skips(bus)).decided == {}

    await fail(bus, seq, 1)
    await decide(bus, Progress())
    await decide(bus, Progress())

    decisions = [m async for m in bus.follow(subjects.INPUTS_STREAM, subject=subjects.skips_input(), live=False)]
    assert len(decisions) == FAILURES + 1


@pytest.mark.parametrize("behind", [0, 1])
async def test_what_targets_were_told_of_is_not_left_out(behind: int) -> None:
    """Neither where the lead's record says so, nor where an output of that input or a later one is stored."""
    bus, seq = await streams(submit("one", [1]))
    await fail(bus, seq)

    await decide(bus, Progress(seq + behind, 2**62))

    assert (await read_skips(bus)).decided == {}
    notice = GatewayNotice(
        gateway_id="g", number=1, epoch=1, cause=seq + behind, word=RequestFailed(request_id="r", code="c", message="")
    )
    await bus.append("tc.out.gateway.g", encode(notice))

    await decide(bus, Progress())

    assert (await read_skips(bus)).decided == {}


async def test_what_a_snapshot_holds_is_not_left_out() -> None:
    """Also where neither the lead's record nor any output is left to say that a scheduler came past it."""
    bus, seq = await streams(submit("one", [1]))
    await fail(bus, seq)
    await bus.put_object(object_name(seq), b"whatever")

    await decide(bus, Progress())

    assert (await read_skips(bus)).decided == {}


async def test_what_an_earlier_input_led_to_is_no_obstacle() -> None:
    """Nothing that was said depends on the input."""
    bus, seq = await streams(submit("one", [1]), submit("two", [1]))
    await fail(bus, seq)
    notice = GatewayNotice(
        gateway_id="g", number=1, epoch=1, cause=1, word=RequestFailed(request_id="r", code="c", message="")
    )
    await bus.append("tc.out.gateway.g", encode(notice))

    await decide(bus, Progress(1, 2**62))

    assert list((await read_skips(bus)).decided) == [seq]


async def test_where_many_inputs_fail_the_state_is_at_fault() -> None:
    """So many are left out and no more, except by order."""
    bus, last = await streams(*(submit(f"r{number}", [1]) for number in range(MOST_AT_ONCE + 2)))
    for seq in range(1, last + 1):
        await fail(bus, seq)
    await bus.append(subjects.skip_orders_input(), encode(SkipInput(seq=last, reason="by order")))

    await decide(bus, Progress())

    assert list((await read_skips(bus)).decided) == [*range(1, MOST_AT_ONCE + 1), last]


async def test_what_an_operator_stores_counts_as_an_order_and_as_nothing_else() -> None:
    """Failures and decisions are believed from schedulers alone."""
    bus, seq = await streams(submit("one", [1]))
    for message in (
        InputFailed(seq=seq, scheduler_id="s", error=""),
        InputSkipped(seq=seq, subject="", kind="", reason=""),
        SkipInput(seq=seq + 100, reason="not there yet"),
    ):
        await bus.append(subjects.skip_orders_input(), encode(message))
    await bus.append(subjects.skip_orders_input(), b"\xc1")

    skips = await read_skips(bus)

    assert (skips.decided, dict(skips.failures), skips.orders) == ({}, {}, {})


# -- replay -----------------------------------------------------------------------------------------------------


async def test_recording_that_holds_a_quarantined_input_replays_equal(cell: Cell, tmp_path: Path) -> None:
    """Recorded live, over the deaths; replayed by the same code, which cannot fold the input."""
    only = Supervised(cell, "only")
    await until(lambda: only.process.is_live)
    await cell.put(worker_joined(), submit("before", [1] * 20))
    poison = await cell.put(submit(POISON, [2] * 20))
    await settled(only, seq=await cell.put(submit("after", [3] * 20)))
    last = len(await cell.inputs())
    await cell.folded(last)
    path = tmp_path / "poisoned.tcrec"

    recorded = await record(cell.bus, path)

    report = replay(path)
    assert report.difference is None
    assert (report.skipped, report.inputs, report.outputs) == (1, last, recorded.outputs)
    assert report.counters["inputs_quarantined"] == 1
    assert poison < last


def test_recording_from_before_the_decision_says_where_it_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends where the live cell stood still, with the input and the error, and not with a traceback."""
    path = tmp_path / "stuck.tcrec"
    with writing(path, Header()) as writer:
        writer.write_input(StreamMessage(1, 1, "tc.in.cell", encode(submit(POISON, [2] * 20))))

    code = replay_main([str(path)])

    assert code == 2
    assert "input 1 (SubmitRequest on tc.in.cell) cannot be folded: KeyError('poisoned')" in capsys.readouterr().err
