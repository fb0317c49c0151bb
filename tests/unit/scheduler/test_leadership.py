"""One lead, several who want it, and clocks that nobody compares."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import pytest

from services.scheduler.leadership import LEAD_RECORD, MARGIN, Claim, Leadership, Progress, Tail, read_tail
from shared.errors import Unavailable
from tests.memory_bus import MemoryBroker, MemoryBus

DURATION_MS = 1000


@dataclass
class Clock:
    """Monotonic nanoseconds; every process has its own, and they have nothing to do with one another."""

    ns: int

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, ms: float) -> None:
        self.ns += int(ms * 1e6)


class Rival:
    """A process that wants the lead."""

    def __init__(self, broker: MemoryBroker, name: str, started_ns: int) -> None:
        self.name = name
        self.clock = Clock(started_ns)
        self.bus: MemoryBus = broker.connect(name)
        self.lead = Leadership(self.bus, name, DURATION_MS, self.clock)

    def claim(self, epoch: int = 1) -> Claim:
        return Claim(holder=self.name, scheduler_id=self.name, epoch=epoch, lead_ms=DURATION_MS, release="r")

    async def try_to_take(self) -> bool:
        await self.lead.look()
        return self.lead.is_free and await self.lead.take(self.claim())


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def first(broker: MemoryBroker) -> Rival:
    return Rival(broker, "first", 5_000_000_000_000)


@pytest.fixture
def second(broker: MemoryBroker) -> Rival:
    return Rival(broker, "second", 17)


async def test_lead_that_nobody_has_is_taken_at_once(first: Rival) -> None:
    """And then it is held, for less than it lasts."""
    assert not first.lead.is_free  # It has not looked yet.
    assert await first.try_to_take()
    assert first.lead.is_held
    first.clock.pass_ms(DURATION_MS * (1 - MARGIN))
    assert not first.lead.is_held
    assert first.lead.is_ours  # type: ignore[unreachable]  # Time has passed.


async def test_renewed_lead_is_never_free(first: Rival, second: Rival) -> None:
    """However long it goes on."""
    await first.try_to_take()
    for _ in range(50):
        assert not await second.try_to_take()
        first.clock.pass_ms(DURATION_MS / 4)
        second.clock.pass_ms(DURATION_MS / 4)
        assert await first.lead.renew(first.claim())

    assert first.lead.is_held
    assert not second.lead.is_held


async def test_lead_of_a_dead_holder_is_free_after_its_duration_by_the_observer_s_clock(
    first: Rival, second: Rival
) -> None:
    """Counted from when the observer first saw the last revision, not a moment earlier."""
    await first.try_to_take()
    second.clock.pass_ms(900)
    assert not await second.try_to_take()
    second.clock.pass_ms(DURATION_MS - 1)
    assert not await second.try_to_take()
    second.clock.pass_ms(1)

    assert await second.try_to_take()


@pytest.mark.parametrize("speed", [1.0, 0.85, 1.15])
async def test_two_never_hold_it_at_once_with_clocks_of_different_speed(
    first: Rival, second: Rival, speed: float
) -> None:
    """The holder falls silent before an observer takes over, though it renews no more and both watch closely."""
    await first.try_to_take()
    await second.lead.look()
    held_by = []
    for _ in range(3000):
        first.clock.pass_ms(1)
        second.clock.pass_ms(1 * speed)
        if not second.lead.is_ours:
            await second.try_to_take()
        held_by.append((first.lead.is_held, second.lead.is_held))

    assert (True, True) not in held_by
    assert (True, False) in held_by
    assert (False, True) in held_by


async def test_frozen_holder_finds_its_time_over_before_it_says_a_word(first: Rival, second: Rival) -> None:
    """Its own clock has gone on meanwhile; renewing tells it who has the lead now."""
    await first.try_to_take()
    await second.lead.look()
    for rival in (first, second):
        rival.clock.pass_ms(10 * DURATION_MS)
    assert await second.try_to_take()

    assert not first.lead.is_held
    assert not await first.lead.renew(first.claim())
    assert not first.lead.is_ours
    assert first.lead.claim is not None
    assert first.lead.claim.holder == "second"


async def test_holder_whose_time_is_over_speaks_again_if_nobody_took_it(first: Rival) -> None:
    """The broker was away from everybody: no new term is needed."""
    await first.try_to_take()
    first.bus.disconnect()
    first.clock.pass_ms(10 * DURATION_MS)
    with pytest.raises(Unavailable):
        await first.lead.renew(first.claim())
    assert first.lead.is_ours
    assert not first.lead.is_held
    first.bus.reconnect()

    assert await first.lead.renew(first.claim())
    assert first.lead.is_held


async def test_time_without_a_broker_is_not_held_against_the_holder(first: Rival, second: Rival) -> None:
    """An observer that was cut off waits for the whole duration again."""
    await first.try_to_take()
    await second.lead.look()
    second.clock.pass_ms(10 * DURATION_MS)
    second.lead.excuse()

    assert not await second.try_to_take()


async def test_released_lead_is_free_at_once(first: Rival, second: Rival) -> None:
    """Nobody waits for somebody who said goodbye."""
    await first.try_to_take()
    assert not await second.try_to_take()
    first.lead.lose()
    await first.lead.let_go(first.claim(epoch=4), said_to=7)

    assert not first.lead.is_held
    assert await second.try_to_take()


async def test_one_of_many_observers_wins(broker: MemoryBroker, first: Rival) -> None:
    """All see it fall free at the same time."""
    rivals = [Rival(broker, f"rival-{number}", number) for number in range(5)]
    await first.try_to_take()
    for rival in rivals:
        await rival.lead.look()
        rival.clock.pass_ms(DURATION_MS)
        await rival.lead.look()
    won = await asyncio.gather(*(rival.lead.take(rival.claim()) for rival in rivals))

    assert sum(won) == 1
    assert sum(rival.lead.is_held for rival in rivals) == 1


def lose_answer(rival: Rival) -> None:
    """The next write arrives, but its answer does not."""
    write = rival.bus.write_record

    async def without_answer(name: str, data: bytes, *, revision: int, timeout_s: float = 2.0) -> int | None:
        rival.bus.write_record = write  # type: ignore[method-assign]
        await write(name, data, revision=revision, timeout_s=timeout_s)
        raise Unavailable("no answer in time")

    rival.bus.write_record = without_answer  # type: ignore[method-assign]


async def test_renewal_whose_answer_was_lost_does_not_count_but_does_no_harm(first: Rival, second: Rival) -> None:
    """The holder's time runs on from the write before; the next renewal finds its own record and goes on from it."""
    await first.try_to_take()
    first.clock.pass_ms(700)
    lose_answer(first)
    with pytest.raises(Unavailable):
        await first.lead.renew(first.claim())
    first.clock.pass_ms(200)
    silent = not first.lead.is_held

    assert silent
    assert await first.lead.renew(first.claim())
    assert first.lead.is_held
    assert not await second.try_to_take()


async def test_a_renewal_behind_one_in_process_loses_nothing(first: Rival, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers refuse a second write while they know of a first that is not stored; the record is the holder's own."""
    await first.try_to_take()

    async def refused(*_: object, **__: object) -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(first.bus, "write_record", refused)
        with pytest.raises(Unavailable, match="is being written"):
            await first.lead.renew(first.claim())

    assert first.lead.is_ours
    assert await first.lead.renew(first.claim())


async def test_taking_whose_answer_was_lost_is_found_out(first: Rival, second: Rival) -> None:
    """The record names us, so we take it again; the other sees it taken."""
    lose_answer(first)
    await first.lead.look()
    with pytest.raises(Unavailable):
        await first.lead.take(first.claim())
    assert not first.lead.is_held

    assert not await second.try_to_take()
    assert await first.try_to_take()


async def test_release_after_a_renewal_whose_answer_was_lost(first: Rival, second: Rival) -> None:
    """The lead is let go all the same."""
    await first.try_to_take()
    lose_answer(first)
    with pytest.raises(Unavailable):
        await first.lead.renew(first.claim())
    await first.lead.let_go(first.claim(), said_to=None)

    assert await second.try_to_take()


async def test_release_of_a_lead_that_is_another_s_leaves_it_alone(first: Rival, second: Rival) -> None:
    """A late goodbye takes nothing away."""
    await first.try_to_take()
    await second.lead.look()
    second.clock.pass_ms(DURATION_MS)
    await second.try_to_take()
    await first.lead.let_go(first.claim(), said_to=None)

    assert await second.lead.renew(second.claim())


async def test_longer_hold_is_respected_by_observers(first: Rival, second: Rival) -> None:
    """Before a pause the holder asks for more time; the record says how much."""
    await first.try_to_take()
    longer = msgspec.structs.replace(first.claim(), lead_ms=5000)
    await first.lead.renew(longer)
    assert not await second.try_to_take()
    second.clock.pass_ms(4999)
    first.clock.pass_ms(3900)

    assert not await second.try_to_take()
    assert first.lead.is_held


async def test_record_that_no_scheduler_wrote_is_replaced(first: Rival) -> None:
    """It cannot be anybody's lead."""
    await first.bus.write_record(LEAD_RECORD, b"nonsense", revision=0)

    assert await first.try_to_take()


@pytest.mark.parametrize(
    ("tail", "seq", "may"),
    [
        (Tail("r", 10), 10, True),
        (Tail("r", 10), 9, False),  # Another release folded what lies between.
        (Tail("other", 10), 500, False),  # It may have said anything, of later inputs too.
        (Tail("other", 10, said_to=20), 20, True),
        (Tail("other", 10, said_to=20), 19, False),
        (Tail("r", 10, said_to=20), 15, True),
        (Tail("other", 0, said_to=0), 0, True),
    ],
)
def test_what_was_said_under_other_decisions_is_not_continued(tail: Tail, seq: int, may: bool) -> None:
    """A release goes on from its own states, and from others' where they said nothing since."""
    assert tail.may_be_continued(seq, "r") is may


def test_a_holder_that_never_had_a_state_hands_on_what_it_found() -> None:
    """It has said nothing, so its predecessor's words are still the last."""
    found = Tail("old", 3, 9, Progress(9, 90))
    claim = Claim(holder="", scheduler_id="s", epoch=2, lead_ms=1, release="new", said_to=0, before=found)

    assert claim.tail == found
    assert msgspec.structs.replace(claim, folded_from=9).tail == Tail("new", 9, 0, epoch=2)


async def test_nothing_is_said_before_the_record_says_since_when(first: Rival) -> None:
    """Else a successor could not tell whose decisions targets obeyed."""
    await first.try_to_take()
    silent = first.lead.is_held and not first.lead.may_speak
    await first.lead.renew(msgspec.structs.replace(first.claim(), folded_from=0))

    assert silent
    assert first.lead.may_speak


class EarlierClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A record as release 0.1 reads and writes it."""

    holder: str
    scheduler_id: str
    epoch: int
    duration_ms: int
    release: str
    folded_from: int | None = None
    published: Progress = Progress()

    def is_free(self, unchanged_ms: int) -> bool:
        """Whether a scheduler of 0.1 that has seen this record for so long takes the lead."""
        return not self.holder or unchanged_ms >= self.duration_ms


async def earlier_view(rival: Rival) -> EarlierClaim:
    """What a scheduler of 0.1 reads."""
    record = await rival.bus.read_record(LEAD_RECORD)
    assert record is not None
    return msgspec.json.decode(record.data, type=EarlierClaim)


async def test_a_standby_of_0_1_never_takes_what_this_release_has_held(first: Rival) -> None:
    """It would fold again what this release decided: not while the lead is held, nor later, nor once it is let go."""
    await first.try_to_take()
    held = await earlier_view(first)
    await first.lead.let_go(first.claim(), said_to=5)
    let_go = await earlier_view(first)

    assert not held.is_free(unchanged_ms=365 * 86_400_000)
    assert not let_go.is_free(unchanged_ms=365 * 86_400_000)


@pytest.mark.parametrize("holder", ["old", ""], ids=["held", "let go"])
async def test_a_record_of_0_1_is_honoured(first: Rival, holder: str) -> None:
    """The old active scheduler's lead lasts as long as it says, and is free at once when it let go."""
    claim = EarlierClaim(holder=holder, scheduler_id="old", epoch=3, duration_ms=DURATION_MS, release="0.1")
    await first.bus.write_record(LEAD_RECORD, msgspec.json.encode(claim), revision=0)
    at_once = await first.try_to_take()
    first.clock.pass_ms(DURATION_MS)

    assert at_once is (holder == "")
    assert await first.try_to_take()


async def test_what_a_record_of_0_1_does_not_tell_may_have_been_said(first: Rival) -> None:
    """Its holder spoke while it folded the tail, before it knew since when, and forgot what its predecessors left."""
    claim = EarlierClaim(holder="", scheduler_id="old", epoch=3, duration_ms=DURATION_MS, release="0.1")
    await first.bus.write_record(LEAD_RECORD, msgspec.json.encode(claim), revision=0)
    tail = await read_tail(first.bus)

    assert tail is not None
    assert (tail.epoch, tail.release) == (3, "0.1")
    assert not any(tail.may_be_continued(seq, "today") for seq in (0, 5, 10**9))


async def test_a_claim_that_is_new_is_news_at_once(first: Rival, second: Rival) -> None:
    """A newcomer begins to restore when it sees whose lead it is; the bound is for claims that never come."""
    waiting = asyncio.create_task(second.lead.news(3600.0))
    await asyncio.sleep(0)
    assert await first.try_to_take()
    assert not waiting.done()

    await second.lead.look()

    await asyncio.wait_for(waiting, 20.0)


async def test_taking_the_lead_is_news_and_seeing_the_same_claim_again_is_none(first: Rival) -> None:
    waiting = asyncio.create_task(first.lead.news(3600.0))
    await asyncio.sleep(0)
    assert await first.try_to_take()
    await asyncio.wait_for(waiting, 20.0)

    waiting = asyncio.create_task(first.lead.news(3600.0))
    await asyncio.sleep(0)
    await first.lead.look()
    await asyncio.sleep(0)

    assert not waiting.done()
    waiting.cancel()
