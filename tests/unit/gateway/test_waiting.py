"""Slots, pending choices, timeouts, notices and readiness: the pure parts of waiting."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.cell import FRESH_S, CellView
from services.gateway.notices import NoticeCursor
from services.gateway.pending import MAX_STREAM_BACKLOG_TOKENS, Choice, Generation, PendingTable, Slots
from services.gateway.timeouts import DEADLINE_SLACK_S, WaitLimits, needs_probe, needs_search, overdue
from shared.errors import DeadlineExceeded, InternalError, QueueFull, RequestCancelled, TooManyConnections
from shared.messages.gateway_notices import GatewayNotice, RequestFailed
from shared.messages.status import CellStatus
from shared.messages.tokens import TokenItem
from shared.messages.worker_events import KernelFacts
from tests.scripted_cell import submit
from tests.unit.gateway.scripted_cell import cell_status, idle_workers

LIMITS = WaitLimits(request_s=100, first_token_s=10, idle_s=5, probe_s=2)


def choice(deadline_ms: int = 0) -> Choice:
    return Choice(msgspec.structs.replace(submit("r", [1]), deadline_ms=deadline_ms), 0, 0, now_s=0.0)


def token(index: int = 0, **fields: object) -> TokenItem:
    return TokenItem(request_id="r", attempt=1, index=index, tokens=(1,), **fields)  # type: ignore[arg-type]


def test_slots_are_all_or_nothing() -> None:
    """What does not fit takes none, and the error says when to come back."""
    slots = Slots(4)
    slots.take(3)
    with pytest.raises(TooManyConnections) as refusal:
        slots.take(2)
    slots.take(1)

    assert slots.used == 4
    assert (refusal.value.status, refusal.value.retry_after_ms > 0) == (429, True)


def test_slots_are_idle_when_all_are_back() -> None:
    """Which is what a graceful end waits for."""
    slots = Slots(4)
    slots.take(2)
    assert not slots.idle.is_set()
    slots.give_back(2)

    assert slots.idle.is_set()


@pytest.mark.parametrize(
    ("reason", "kind"), [("deadline", DeadlineExceeded), ("cancelled", RequestCancelled), ("error", InternalError)]
)
def test_bad_ends_are_failures(reason: str, kind: type) -> None:
    """The worker's own words are kept for errors."""
    one = choice()
    one.accept("w", token(finish=reason, error="boom"), 1.0)

    assert type(one.failure) is kind
    assert one.is_settled
    if reason == "error":
        assert one.failure is not None
        assert one.failure.message == "boom"


def test_the_first_failure_stays() -> None:
    """Later ones are consequences."""
    one = choice()
    one.fail(QueueFull("first"))
    one.fail(InternalError("second"))

    assert isinstance(one.failure, QueueFull)


def test_a_choice_that_failed_takes_no_tokens() -> None:
    """Nobody waits for them."""
    one = choice()
    one.fail(QueueFull("x"))
    one.accept("w", token(), 1.0)

    assert one.assembly.tokens == []


def test_a_client_far_behind_is_abandoned() -> None:
    """What waits for a slow reader is bounded."""
    one = choice()
    generation = Generation([one], is_streaming=True)
    many = TokenItem(request_id="r", attempt=1, index=0, tokens=(1,) * (MAX_STREAM_BACKLOG_TOKENS + 1))
    one.accept("w", many, 1.0)

    assert generation.abandoned is not None
    assert generation.abandoned.code == "client_too_slow"


async def test_an_answer_wakes_for_what_it_waits_for() -> None:
    """A stream for every token, a whole answer for its end alone."""
    streaming, whole = choice(), choice()
    stream, body = Generation([streaming], is_streaming=True), Generation([whole])
    streaming.accept("w", token(), 1.0)
    whole.accept("w", token(), 1.0)

    assert await stream.changed(0.001) == [streaming]
    assert await stream.changed(0.001) is None
    assert await body.changed(0.001) is None
    whole.accept("w", token(1, finish="stop"), 1.0)
    await body.finished(1.0)


async def test_waiting_for_a_whole_answer_is_bounded() -> None:
    """Even when nothing at all happens."""
    with pytest.raises(DeadlineExceeded):
        await Generation([choice()]).finished(0.001)


def test_the_pending_table_iterates_over_a_snapshot() -> None:
    """Choices may end while a sweep goes over them."""
    table = PendingTable()
    generation = Generation([choice()])
    table.add(generation)
    for _ in table:
        table.remove(generation)

    assert len(table) == 0


@pytest.mark.parametrize(
    ("now_s", "has_token", "code"),
    [
        (9.9, False, None),
        (10.1, False, "first_token_timeout"),
        (10.1, True, None),
        (14.2, True, "idle_timeout"),
        (100.1, True, "request_timeout"),
    ],
)
def test_every_wait_ends(now_s: float, has_token: bool, code: str | None) -> None:
    """For the first token, between tokens, and for the whole answer."""
    one = choice()
    if has_token:
        one.accept("w", token(), 9.1)
    error = overdue(one, now_s, LIMITS)

    assert (error.code if error else None) == code


def test_a_missed_deadline_is_caught_after_its_slack() -> None:
    """The scheduler and the worker come first."""
    one = choice(deadline_ms=1000)

    assert overdue(one, 1.0 + DEADLINE_SLACK_S, LIMITS) is None
    found = overdue(one, 1.1 + DEADLINE_SLACK_S, LIMITS)
    assert found is not None
    assert found.code == "deadline_exceeded"


def test_a_quiet_choice_is_probed_now_and_then() -> None:
    """Only when its worker is known, and not again right after a probe."""
    one = choice()
    assert not needs_probe(one, 50.0, LIMITS)
    one.accept("w", token(), 1.0)

    assert not needs_probe(one, 2.9, LIMITS)
    assert needs_probe(one, 3.1, LIMITS)
    one.probed_s = 3.1
    assert not needs_probe(one, 5.0, LIMITS)


def searches(one: Choice, until_s: float) -> list[float]:
    """When a choice is searched for, looked at twice a second."""
    found = []
    for half_seconds in range(int(until_s * 2) + 1):
        now_s = half_seconds / 2
        if needs_search(one, now_s, LIMITS):
            one.searched_s = now_s
            found.append(now_s)
    return found


def test_a_silent_choice_is_searched_for_less_and_less_often() -> None:
    """Also one that no worker was heard of for: few questions for one that only waits in the queue."""
    assert searches(choice(), 200.0) == [2.5, 5.5, 11.5, 23.5, 47.5, 95.5, 191.5]


def test_a_choice_that_was_heard_of_is_searched_for_as_well() -> None:
    """Its next attempt may run on a worker of which nothing arrived. A token begins the wait anew."""
    one = choice()
    one.accept("w", token(), 10.0)

    assert searches(one, 20.0) == [12.5, 15.5]
    one.accept("w", token(1), 20.5)
    assert not needs_search(one, 22.5, LIMITS)
    assert needs_search(one, 23.0, LIMITS)


def test_a_choice_that_is_over_is_not_searched_for() -> None:
    """Nobody waits for it."""
    one = choice()
    one.fail(QueueFull("x"))

    assert not needs_search(one, 50.0, LIMITS)


def test_an_answer_without_news_is_no_progress() -> None:
    """A worker that is asked and says that there is nothing yet does not end the wait for a token."""
    one = choice()
    one.accept("w", token(), 1.0)
    one.accept("w", TokenItem(request_id="r", attempt=1, index=1, tokens=()), 4.0, asked=True)

    assert one.progress_s == 1.0
    error = overdue(one, 6.5, LIMITS)
    assert error is not None
    assert error.code == "idle_timeout"


def test_notices_are_placed_by_number() -> None:
    """Next, repeated, or with a gap before it."""
    cursor = NoticeCursor(last=3, term=(1, 3))

    assert [cursor.place(notice(number)) for number in (3, 4, 5)] == ["repeated", "next", "gap"]


@pytest.mark.parametrize("cause", [50, 2])
def test_numbers_that_begin_anew_are_no_repetitions(cause: int) -> None:
    """A scheduler that lost its state, or its streams, begins at 1; the stream tells what may lie in between."""
    cursor = NoticeCursor(last=3, term=(1, 40))
    of_old = msgspec.structs.replace(notice(4), cause=40)
    anew = [msgspec.structs.replace(notice(number), cause=cause, epoch=2) for number in (1, 2, 4)]
    places = [cursor.place(each) for each in anew]
    cursor.take(anew[0])

    assert places == ["gap", "gap", "gap"]
    assert [cursor.place(each) for each in (anew[0], anew[1], of_old)] == ["repeated", "next", "repeated"]


def notice(number: int) -> GatewayNotice:
    word = RequestFailed(request_id="r", code="queue_full", message="")
    return GatewayNotice(gateway_id="gw", number=number, epoch=1, cause=number, word=word)


def status(workers: int = 1, model: str = "", draining: int = 0) -> CellStatus:
    return cell_status(model=model, workers=idle_workers(workers, draining))


def test_readiness_needs_a_broker_a_scheduler_and_a_worker() -> None:
    """Each missing one is named."""
    cell = CellView("fingerprint")
    assert cell.reasons_not_ready(0.0, is_connected=True) == ["the scheduler has not been heard of"]
    cell.hear(status(), 1.0)

    assert cell.reasons_not_ready(1.0, is_connected=True) == []
    assert "broker" in cell.reasons_not_ready(1.0, is_connected=False)[0]
    assert "last heard" in cell.reasons_not_ready(1.1 + FRESH_S, is_connected=True)[0]
    cell.hear(status(workers=0), 2.0)
    assert cell.reasons_not_ready(2.0, is_connected=True) == ["no worker has joined"]
    cell.hear(status(model="other"), 3.0)
    assert "another model" in cell.reasons_not_ready(3.0, is_connected=True)[0]
    cell.hear(status(model="fingerprint"), 4.0)
    assert cell.reasons_not_ready(4.0, is_connected=True) == []
    cell.is_draining = True
    assert "shutting down" in cell.reasons_not_ready(4.0, is_connected=True)[0]


def test_a_gateway_tells_other_kernels_from_another_model() -> None:
    """So that an upgrade of a running cell does not look like a wrong folder."""
    kernels = KernelFacts(files="files", epoch=2, release="0.3.0")
    cell = CellView("fingerprint", kernels)
    cell.hear(cell_status(model="other", workers=idle_workers(1), kernels=KernelFacts(files="files", epoch=3)), 1.0)
    (other_kernels,) = cell.reasons_not_ready(1.0, is_connected=True)
    cell.hear(cell_status(model="other", workers=idle_workers(1)), 2.0)
    (unknown,) = cell.reasons_not_ready(2.0, is_connected=True)
    cell.hear(cell_status(model="other", workers=idle_workers(1), kernels=KernelFacts(files="g", epoch=2)), 3.0)
    (another_model,) = cell.reasons_not_ready(3.0, is_connected=True)

    assert "this gateway's are of release 0.3.0 (numerics epoch 2), the cell's of numerics epoch 3" in other_kernels
    assert "those of the cell are of a release that does not name its numerics epoch" in unknown
    assert another_model == "the cell serves another model than this gateway"


def test_a_cell_whose_workers_all_drain_is_not_ready() -> None:
    """Requests would wait for a worker that has not joined yet; one that stays is enough."""
    cell = CellView("fingerprint")
    cell.hear(status(workers=2, draining=2), 1.0)
    reasons = cell.reasons_not_ready(1.0, is_connected=True)
    cell.hear(status(workers=2, draining=1), 1.0)

    assert reasons == ["every worker is about to leave"]
    assert cell.reasons_not_ready(1.0, is_connected=True) == []
