"""When requests are sent, and from when their latency counts, under virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.unit.thermocline.load.virtual_time import VirtualTime
from thermocline.load.driver import GIVE_UP_AFTER, Driver, Outcome, Pace
from thermocline.load.prompts import Said
from thermocline.load.reply import Reply
from thermocline.load.talker import Prepared
from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads import Asked

MANY = 4096


class Server:
    """Takes ``seconds`` for an answer; ``error_of`` says what a request sent at a time fails with."""

    def __init__(
        self, clock: VirtualTime, seconds: float = 1.0, error_of: Callable[[float], str] = lambda _: ""
    ) -> None:
        self.clock = clock
        self.in_flight = 0
        self.most_in_flight = 0
        self.ended = 0
        self.said: list[dict[int, Said]] = []
        self._seconds = seconds
        self._error_of = error_of

    def prepare(self, asked: Asked, said: Mapping[int, Said]) -> Prepared:
        self.said.append(dict(said))
        return Prepared(b"{}", asked.prompt_tokens, False)

    async def send(self, prepared: Prepared, number: int, due_s: float) -> Reply:
        reply = Reply(number, due_s, self.clock.now_s(), error=self._error_of(self.clock.now_s() - 100))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if not reply.error or reply.error == "timeout":
            await self.clock.sleep_until(self.clock.now_s() + self._seconds)
            reply.error = reply.error or self._error_of(self.clock.now_s() - 100)
        self.in_flight -= 1
        self.ended += 1
        reply.first_s = reply.last_s = reply.ended_s = self.clock.now_s()
        reply.said = Said([number], f"answer {number}")
        return reply


class Questions:
    """Requests that wait for nothing, or conversations of ``turns`` with a pause between."""

    def __init__(self, turns: int = 1, pause_s: float = 0.0, times: tuple[float, ...] = ()) -> None:
        self._turns = turns
        self._pause_s = pause_s
        self._times = times

    def requests(self) -> Iterator[Asked]:
        for number in range(len(self._times) or 1000):
            time_s = self._times[number] if self._times else None
            yield Asked((Span(3 * number, 10),), Span(3 * number + 2, 1), time_s, session=1)

    def follow_up(self, asked: Asked) -> tuple[float, Asked] | None:
        if asked.session == self._turns:
            return None
        spans = (*asked.spans, asked.answer, Span(asked.answer.name + 3000, 10))
        return self._pause_s, Asked(spans, Span(asked.answer.name + 30_000, 1), session=asked.session + 1)


async def drive(server: Server, questions: Questions, pace: Pace) -> Outcome:
    driver = Driver(questions, server, server.clock, pace, lambda reply: None)
    return await server.clock.run(driver.run())


def sent(outcome: Outcome) -> list[float]:
    """When each request was sent, by number."""
    return [reply.sent_s - outcome.began_s for reply in sorted(outcome.replies, key=lambda one: one.number)]


async def test_an_open_loop_waits_for_no_answer() -> None:
    """Requests are sent at their times though none has been answered."""
    server = Server(VirtualTime(), seconds=100.0)

    outcome = await drive(server, Questions(), Pace(4, MANY, times=iter([0.5, 1.0, 3.0, 3.0])))

    assert sent(outcome) == [0.5, 1.0, 3.0, 3.0]
    assert [round(reply.ttft_s, 6) for reply in outcome.replies] == [100.0] * 4


async def test_time_in_which_nothing_could_be_sent_counts() -> None:
    """A request beyond the bound on those in flight is sent late, and its latency counts from when it was due."""
    server = Server(VirtualTime(), seconds=10.0)

    outcome = await drive(server, Questions(), Pace(3, 1, times=iter([0.0, 1.0, 2.0])))

    assert sent(outcome) == [0.0, 10.0, 20.0]
    assert [reply.ttft_s for reply in outcome.replies] == [10.0, 19.0, 28.0]


async def test_a_closed_loop_keeps_its_places_full_and_no_more() -> None:
    """The next is sent when one is answered, and counts from then."""
    server = Server(VirtualTime(), seconds=2.0)

    outcome = await drive(server, Questions(), Pace(5, 2))

    assert server.most_in_flight == 2
    assert sent(outcome) == [0.0, 0.0, 2.0, 2.0, 4.0]
    assert {reply.ttft_s for reply in outcome.replies} == {2.0}


async def test_recorded_times_are_divided_by_the_scale() -> None:
    """Of a workload that has times of its own."""
    outcome = await drive(Server(VirtualTime()), Questions(times=(0.0, 8.0)), Pace(9, MANY, time_scale=4.0))

    assert sent(outcome) == [0.0, 2.0]


async def test_a_conversation_goes_on_with_what_was_really_said() -> None:
    """Its next turn is due a pause after the answer, and repeats all answers before it."""
    server = Server(VirtualTime(), seconds=1.0)

    outcome = await drive(server, Questions(turns=3, pause_s=8.0), Pace(3, 1, time_scale=2.0))

    assert sent(outcome) == [0.0, 5.0, 10.0]
    assert [reply.ttft_s for reply in outcome.replies] == [1.0, 1.0, 1.0]
    followed = [[said.text for said in each.values()] for each in server.said if each]
    assert followed == [["answer 0"], ["answer 0", "answer 1"]]


async def test_turns_of_conversations_count_as_requests() -> None:
    """No more are sent than were asked for, however many turns are left."""
    outcome = await drive(Server(VirtualTime()), Questions(turns=50), Pace(7, 2))

    assert sorted(reply.number for reply in outcome.replies) == list(range(7))


async def test_a_conversation_ends_with_an_error() -> None:
    """Its later turns would have nothing to go on with."""
    server = Server(VirtualTime(), error_of=lambda now_s: "queue_full" if now_s == 0 else "")

    outcome = await drive(server, Questions(turns=2, pause_s=5.0), Pace(3, 1, times=iter([0.0, 1.0, 2.0])))

    assert [reply.error for reply in outcome.replies] == ["queue_full", "", ""]
    assert sent(outcome) == [0.0, 1.0, 7.0]
    assert server.said[-1] == {5: Said([1], "answer 1")}


@pytest.mark.parametrize("times", [(float(n) for n in range(1000)), None], ids=["open", "closed"])
async def test_nothing_is_sent_after_the_end(times: Iterator[float] | None) -> None:
    """What is under way then is waited for."""
    outcome = await drive(Server(VirtualTime(), seconds=1.0), Questions(), Pace(1000, 1, times=times, seconds=1.5))

    assert sent(outcome) == [0.0, 1.0]
    assert outcome.ended_s - outcome.began_s == 2.0


@pytest.mark.parametrize("error", ["connection_refused", "timeout"])
async def test_a_server_that_is_gone_is_given_up(error: str) -> None:
    """Soon, with the time of it, and with what was under way counted."""
    server = Server(VirtualTime(), seconds=1.0, error_of=lambda now_s: error if now_s >= 10 else "")

    outcome = await drive(server, Questions(), Pace(1000, MANY, times=iter(0.25 * n for n in range(1000))))

    assert outcome.gone_s == 10.0
    assert outcome.ended_s - outcome.began_s < 20
    failures = [reply for reply in outcome.replies if reply.error]
    assert GIVE_UP_AFTER <= len(failures) < 2 * GIVE_UP_AFTER
    assert outcome.abandoned == server.in_flight
    assert len(outcome.replies) == server.ended


async def test_a_crash_that_takes_all_that_is_under_way_is_not_yet_the_end() -> None:
    """A server that is back before others were sent in vain goes on being measured."""
    server = Server(VirtualTime(), seconds=5.0, error_of=lambda now_s: "timeout" if now_s < 1 else "")
    times = [0.0] * (3 * GIVE_UP_AFTER) + [6.0]

    outcome = await drive(server, Questions(), Pace(len(times), MANY, times=iter(times)))

    assert outcome.gone_s is None
    assert [reply.error for reply in outcome.replies] == ["timeout"] * (3 * GIVE_UP_AFTER) + [""]


async def test_a_server_that_refuses_is_not_gone() -> None:
    """Somebody answered, so all requests are sent."""
    server = Server(VirtualTime(), error_of=lambda now_s: "queue_full")

    outcome = await drive(server, Questions(), Pace(100, 1))

    assert outcome.gone_s is None
    assert len(outcome.replies) == 100
