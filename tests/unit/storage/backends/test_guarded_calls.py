"""Calls to a store under virtual time: retries, deadlines, the breaker, slots."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from structlog.testing import capture_logs

from services.storage import measures
from services.storage.backends.guarded_calls import Answer, GuardedCalls
from services.storage.core.circuit_breaker import CircuitBreaker
from services.storage.core.retrying import RetryPolicy
from shared.errors import CapacityError, TransportError

BUSY = "status code: 503 Service Unavailable"
FOREVER_S = 60.0

Make = Callable[..., GuardedCalls]


class VirtualTime:
    """A clock that moves when somebody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []

    async def pause(self, delay_s: float) -> None:
        self.pauses.append(delay_s)
        self.now_s += delay_s


class Store:
    """Answers with what is scripted, an exception or a value, and counts."""

    def __init__(self, time: VirtualTime, *script: object, seconds: float = 0.0) -> None:
        self._time = time
        self._script = list(script)
        self._seconds = seconds
        self.asked = 0

    async def __call__(self) -> Answer[object]:
        self.asked += 1
        self._time.now_s += self._seconds
        said = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if isinstance(said, Exception):
            raise said
        return Answer("ok", said)


@pytest.fixture
def virtual() -> VirtualTime:
    return VirtualTime()


@pytest.fixture
def make(virtual: VirtualTime) -> Iterator[Make]:
    """Make calls that fail twice before the breaker opens for ten seconds; chance is always a half."""
    made = []

    def make(**settings: Any) -> GuardedCalls:
        breaker = CircuitBreaker(failures_to_open=2, cool_down_s=10.0)
        usual: dict[str, Any] = {"timeout_s": FOREVER_S, "slots": 1}
        usual["policy"] = RetryPolicy(attempts=3, base_s=1, cap_s=8)
        calls = GuardedCalls(
            "test://",
            breaker=breaker,
            clock=lambda: virtual.now_s,
            chance=lambda: 0.5,
            pause=virtual.pause,
            **(usual | settings),
        )
        made.append(calls)
        return calls

    yield make
    for calls in made:
        calls.close()


def count(verb: str, outcome: str) -> float:
    counted: float = measures.REMOTE_REQUESTS.labels(verb, outcome)._value.get()
    return counted


def test_a_transient_failure_is_repeated_after_a_drawn_delay(make: Make, virtual: VirtualTime) -> None:
    """Two 503 are waited out, each delay half its ceiling, and the answer of the third attempt counts."""
    store = Store(virtual, GenericError(BUSY), GenericError(BUSY), "answer")
    before = count("get", "ok")

    answer = make().call("get", store, timeout_s=FOREVER_S)

    assert (answer, store.asked, virtual.pauses) == ("answer", 3, [0.5, 1.0])
    assert count("get", "ok") == before + 1


def test_attempts_end(make: Make, virtual: VirtualTime) -> None:
    """After the policy's attempts the call fails, with the library's error as its cause."""
    store = Store(virtual, GenericError(BUSY))

    with pytest.raises(TransportError, match="after 3 attempts") as raised:
        make().call("get", store, timeout_s=FOREVER_S)

    assert store.asked == 3
    assert isinstance(raised.value.__cause__, GenericError)


def test_what_will_not_go_away_is_not_repeated(make: Make, virtual: VirtualTime) -> None:
    """A refusal of our credentials is told at once."""
    store = Store(virtual, PermissionDeniedError("status code: 403 Forbidden"))

    with pytest.raises(TransportError, match="403"):
        make().call("put", store, timeout_s=FOREVER_S)

    assert store.asked == 1


def test_no_attempt_begins_past_the_deadline(make: Make, virtual: VirtualTime) -> None:
    """Attempts of two seconds and a deadline of three: the second attempt would begin in time, the third not."""
    store = Store(virtual, GenericError(BUSY), seconds=2.0)

    with pytest.raises(TransportError):
        make().call("get", store, timeout_s=3.0)

    assert store.asked == 2


def test_the_stores_own_bound_holds_too(make: Make, virtual: VirtualTime) -> None:
    """A caller who has more time than the store is given gets the store's."""
    store = Store(virtual, GenericError(BUSY), seconds=2.0)

    with pytest.raises(TransportError):
        make(timeout_s=1.0).call("get", store, timeout_s=FOREVER_S)

    assert store.asked == 1


def test_a_full_store_is_a_capacity_error_and_not_an_outage(make: Make, virtual: VirtualTime) -> None:
    """Being full is an answer: however often, the store can still be read."""
    calls = make()
    for _ in range(5):
        with pytest.raises(CapacityError, match="507"):
            calls.call("put", Store(virtual, GenericError("status code: 507 Insufficient Storage")), timeout_s=1)

    assert calls.call("get", Store(virtual, "answer"), timeout_s=1) == "answer"


def test_after_failures_in_a_row_calls_fail_without_asking(make: Make, virtual: VirtualTime) -> None:
    """The third call is refused at once and told when to come back; after the cool-down one attempt goes out."""
    store = Store(virtual, GenericError(BUSY))
    calls = make(policy=RetryPolicy(attempts=1))
    for _ in range(2):
        with pytest.raises(TransportError):
            calls.call("get", store, timeout_s=FOREVER_S)

    with pytest.raises(TransportError, match="not asked now") as refused:
        calls.call("get", store, timeout_s=FOREVER_S)
    assert (store.asked, refused.value.retry_after_ms) == (2, 10_000)
    assert measures.REMOTE_BREAKER._value.get() == 2

    virtual.now_s += 10.0
    assert calls.call("get", Store(virtual, "answer"), timeout_s=FOREVER_S) == "answer"
    assert measures.REMOTE_BREAKER._value.get() == 0


def test_a_probe_is_one_attempt(make: Make, virtual: VirtualTime) -> None:
    """What answers a probe with a failure is not asked again, whatever the policy allows."""
    calls = make()
    for _ in range(2):
        with pytest.raises(TransportError):
            calls.call("get", Store(virtual, GenericError(BUSY)), timeout_s=FOREVER_S)
    virtual.now_s += 10.0
    store = Store(virtual, GenericError(BUSY))

    with pytest.raises(TransportError, match="after 1 attempts"):
        calls.call("get", store, timeout_s=FOREVER_S)

    assert store.asked == 1


def hanging(started: threading.Event, ended: threading.Event) -> Callable[[], Coroutine[Any, Any, Answer[str]]]:
    """An attempt that never answers, and says when it began and when it was cancelled."""

    async def attempt() -> Answer[str]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return Answer("ok", "never")

    return attempt


def test_a_store_that_hangs_is_turned_away_from(make: Make) -> None:
    """The caller comes back although the attempt never would, and the attempt is cancelled."""
    ended = threading.Event()

    with pytest.raises(TransportError, match="no answer in time"):
        make().call("get", hanging(threading.Event(), ended), timeout_s=0.05)

    assert ended.wait(10.0)


def test_a_caller_with_too_little_time_does_not_blame_the_store(make: Make, virtual: VirtualTime) -> None:
    """Time-outs of calls that had next to no time do not open the breaker."""
    calls = make()
    for _ in range(5):
        with pytest.raises(TransportError, match="no answer in time"):
            calls.call("get", hanging(threading.Event(), threading.Event()), timeout_s=0.01)

    assert calls.call("get", Store(virtual, "answer"), timeout_s=FOREVER_S) == "answer"


class Slow:
    """A call in a thread of its own that has begun, and is answered when it is let."""

    def __init__(self, calls: GuardedCalls, verb: str) -> None:
        self.answers: list[str] = []
        self._started, self._release = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: self.answers.append(calls.call(verb, self._attempt, timeout_s=FOREVER_S))
        )
        self._thread.start()
        assert self._started.wait(10.0)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._release.set)

    def hold(self, gate: threading.Event) -> None:
        """The loop does nothing more until ``gate`` is set."""
        self._loop.call_soon_threadsafe(gate.wait, 10.0)

    def join(self) -> None:
        self._thread.join(10.0)

    async def _attempt(self) -> Answer[str]:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        await self._release.wait()
        return Answer("ok", "late")


def test_slots_are_bounded(make: Make, virtual: VirtualTime) -> None:
    """While the only slot is taken, another call ends within its time and asks nothing."""
    calls, store = make(), Store(virtual, "answer")
    first = Slow(calls, "get")

    with pytest.raises(TransportError, match="all 1 connections"):
        calls.call("get", store, timeout_s=0.01)

    assert store.asked == 0
    first.release()
    first.join()
    assert first.answers == ["late"]


def test_close_waits_for_calls_under_way_and_refuses_others(make: Make, virtual: VirtualTime) -> None:
    """What began before the end is finished, what comes after is refused, and closing twice is closing once."""
    calls = make(slots=2)
    call = Slow(calls, "put")
    closing = threading.Thread(target=calls.close)
    closing.start()
    call.release()
    closing.join(10.0)
    call.join()

    calls.close()

    assert call.answers == ["late"]
    with pytest.raises(TransportError, match="is closed"):
        calls.call("get", Store(virtual, "answer"), timeout_s=FOREVER_S)


def test_an_answer_that_comes_as_the_loop_ends_reaches_its_caller(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is over when closing looks for calls under way, and its caller has not heard yet."""
    calls, gate, queued, submit = make(slots=2), threading.Event(), threading.Event(), asyncio.run_coroutine_threadsafe
    call = Slow(calls, "put")

    def noted(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        future = submit(work, loop)
        queued.set()
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", noted)
    call.hold(gate)
    call.release()
    closing = threading.Thread(target=calls.close)
    closing.start()
    assert queued.wait(10.0)
    gate.set()
    closing.join(10.0)
    call.join()

    assert call.answers == ["late"]


def test_a_full_store_is_told_of_until_it_takes_an_object(make: Make, virtual: VirtualTime) -> None:
    """It is read meanwhile; an object that is there already shows no room. The log has each change once."""
    calls = make()
    full, read = Store(virtual, GenericError("status code: 507 Insufficient Storage")), Store(virtual, "answer")

    async def there() -> Answer[object]:
        return Answer("exists", "there")

    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(CapacityError):
                calls.call("put", full, timeout_s=FOREVER_S)
        calls.call("get", read, timeout_s=FOREVER_S)
        calls.call("put", there, timeout_s=FOREVER_S)
        while_full = calls.fault
        calls.call("put", Store(virtual, "new"), timeout_s=FOREVER_S)

    assert "507" in while_full
    assert calls.fault == ""
    assert [log["event"] for log in logs] == ["remote_full", "remote_has_room_again"]
