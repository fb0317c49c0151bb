"""Calls to a store that may be slow, broken or gone: bounded in time, in number and in retries.

A call holds one of a bounded number of slots, asks the circuit breaker (:mod:`services.storage.core.circuit_breaker`),
and is repeated after a transient failure (:mod:`services.storage.core.retrying`) until its deadline, past which it
never goes on. Callers await it on their own event loop, or block: then the request runs on a loop in a thread of its
own.
"""

from __future__ import annotations

import asyncio
import atexit
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from services.storage import measures
from services.storage.backends.store_errors import Fault, fault_of
from services.storage.core.circuit_breaker import BreakerState, CircuitBreaker, Verdict
from services.storage.core.retrying import RetryPolicy
from shared import logs
from shared.errors import CapacityError, TransportError

T = TypeVar("T")

FAILURES_TO_OPEN = 5
COOL_DOWN_S = 10.0
FAIR_TRIAL_S = 0.25
"""Shortest time of a call whose timing out counts against the store."""

ENDING_S = 1.0
"""How long closing waits for requests that it has cut off."""

SETTLE_S = 0.1

WRITING = ("put", "delete")

_log = logs.get_logger("storage")

_GAUGE: dict[BreakerState, int] = {"closed": 0, "half_open": 1, "open": 2}


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """The store's answer. ``outcome`` is the metric's word for it: ok, missing, exists, too_large."""

    outcome: str
    value: T


Attempt = Callable[[], Coroutine[Any, Any, Answer[T]]]


class GuardedCalls:
    """One store's calls, bounded in time, number and retries. Awaited and blocking calls have slots of their own."""

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        slots: int,
        policy: RetryPolicy | None = None,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Start the thread that runs the requests of blocking callers; :meth:`close` ends it.

        ``name`` is the store's, for messages and the thread. No call takes longer than ``timeout_s`` seconds, retries
        and the wait for a slot included. Of awaited writes, of other awaited calls, and of blocking ones, at most
        ``slots`` run at once. Without a ``policy`` or a ``breaker`` the default one is used. ``clock`` (seconds),
        ``chance`` (uniform in [0, 1)) and ``pause`` are arguments for tests.
        """
        self._name = name
        self._timeout_s = timeout_s
        # Requests that wait for a read must not stand behind uploads, which no request waits for.
        self._writing, self._reading, self._blocking = (asyncio.Semaphore(slots) for _ in range(3))
        self._slot_count = slots
        self._policy = policy or RetryPolicy()
        self._breaker = breaker or CircuitBreaker(failures_to_open=FAILURES_TO_OPEN, cool_down_s=COOL_DOWN_S)
        self._breaker_lock = threading.Lock()
        self._has_answered = False
        self._last_failure = "it has not been asked yet"
        self._full = ""  # Why the last write found no room.
        self._clock = clock
        self._chance = chance
        self._pause = pause
        self._closing = threading.Event()
        self._begin_lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-requests", daemon=True)
        self._thread.start()
        _settle_at_exit(self)
        self._measured = self._breaker.state
        measures.REMOTE_BREAKER.set(_GAUGE[self._measured])

    @property
    def timeout_s(self) -> float:
        """Longest time that any call takes."""
        return self._timeout_s

    @property
    def fault(self) -> str:
        """Why the store counts as unreachable or full; "" while it answers and takes objects.

        It has to answer once to count as reachable, and then the breaker decides, so that a failure among answers says
        nothing. It is full from a write that found no room to one that succeeds.
        """
        with self._breaker_lock:
            is_answering = self._has_answered and self._breaker.state == "closed"
            return self._full if is_answering else self._last_failure

    def call(self, verb: str, attempt: Attempt[T], *, timeout_s: float) -> T:
        """Do the same as :meth:`ask`, for a caller that blocks its thread."""
        # Closing sees every call that begins before it, and none begins after it.
        with self._begin_lock:
            self._check_open(verb)
            call = self._call(verb, attempt, timeout_s, self._blocking)
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        return future.result()

    async def ask(self, verb: str, attempt: Attempt[T], *, timeout_s: float) -> T:
        """Run ``attempt`` until it answers, within ``timeout_s`` and the store's own bound, whichever is less.

        It runs on the caller's event loop, always the same one; cancelling it ends the request. Raises TransportError
        when there is no answer, CapacityError when the store is full.
        """
        return await self._call(verb, attempt, timeout_s, self._writing if verb in WRITING else self._reading)

    def close(self) -> None:
        """Refuse new calls, wait for those that block (each has its bound), and end the loop; idempotent."""
        with self._begin_lock:
            if self._closing.is_set():
                return
            self._closing.set()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(timeout=self._timeout_s + ENDING_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=self._timeout_s)
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=ENDING_S / 2) if late else None
        await asyncio.sleep(0)  # Callers of calls that ended a moment ago get their answers.
        self._loop.stop()

    def _check_open(self, verb: str) -> None:
        if self._closing.is_set():
            raise self._refusal(verb, "closed", f"{self._name} is closed")

    async def _call(self, verb: str, attempt: Attempt[T], timeout_s: float, lane: asyncio.Semaphore) -> T:
        begun_s = self._clock()
        allowed_s = min(timeout_s, self._timeout_s)
        await self._enter(lane, verb, allowed_s)
        try:
            self._check_open(verb)
            answer = await self._ask_admitted(verb, attempt, begun_s, begun_s + allowed_s)
        finally:
            lane.release()
            measures.REMOTE_SECONDS.labels(verb).observe(max(0.0, self._clock() - begun_s))
        measures.REMOTE_REQUESTS.labels(verb, answer.outcome).inc()
        if verb == "put" and answer.outcome in ("ok", "replaced"):
            self._note_full("")
        return answer.value

    async def _enter(self, lane: asyncio.Semaphore, verb: str, allowed_s: float) -> None:
        if not lane.locked():
            await lane.acquire()  # At once.
            return
        try:
            async with asyncio.timeout(max(0.0, allowed_s)):
                await lane.acquire()
        except TimeoutError:
            text = f"all {self._slot_count} connections of {self._name} are in use"
            raise self._refusal(verb, "busy", text) from None

    async def _ask_admitted(self, verb: str, attempt: Attempt[T], begun_s: float, deadline_s: float) -> Answer[T]:
        term, is_probe = self._admit(verb)
        verdict: Verdict = "failed"
        reason = ""
        granted_s = deadline_s - self._clock()
        try:
            answer = await self._run(verb, attempt, begun_s, deadline_s, is_probe)
            verdict = "succeeded"
            return answer
        except CapacityError as error:
            verdict = "succeeded"  # A store that says it is full has answered, and can still be read.
            self._note_full(error.message)
            raise
        except _OutOfTime as error:
            # The store is not to blame if the time was short, or was spent waiting for other calls.
            verdict = "failed" if granted_s >= min(FAIR_TRIAL_S, self._timeout_s) else "released"
            reason = str(error)
            raise TransportError(reason) from error.__cause__
        except TransportError as error:
            reason = error.message
            raise
        except asyncio.CancelledError:
            verdict = "released"  # The answer is not wanted any more.
            raise
        finally:
            self._report(term, verdict, reason)

    async def _run(
        self, verb: str, attempt: Attempt[T], begun_s: float, deadline_s: float, is_probe: bool
    ) -> Answer[T]:
        failed = 0
        while True:
            try:
                return await _within(attempt, deadline_s - self._clock())
            except TransportError:
                raise
            except Exception as error:
                fault, cause = fault_of(error), error
            failed += 1
            now_s = self._clock()
            if fault.kind == "transient":
                delay_s = self._policy.next_delay_s(failed, now_s=now_s, deadline_s=deadline_s, chance=self._chance())
                # A probe asks once: if that fails, the store is as gone as it was.
                if delay_s is not None and not is_probe:
                    await self._pause(delay_s)
                    if not self._closing.is_set():
                        measures.REMOTE_RETRIES.labels(verb).inc()
                        continue
            raise self._failure(verb, fault, failed, now_s - begun_s) from cause

    def _failure(self, verb: str, fault: Fault, failed: int, after_s: float) -> Exception:
        outcome = {"timed_out": "timed_out", "full": "full"}.get(fault.kind, "failed")
        measures.REMOTE_REQUESTS.labels(verb, outcome).inc()
        text = f"{self._name}: {verb} failed after {failed} attempts and {after_s:.3f} s: {fault.text}"
        if fault.kind == "full":
            return CapacityError(text)
        return _OutOfTime(text) if fault.kind == "timed_out" else TransportError(text)

    def _refusal(self, verb: str, why: str, text: str, retry_after_s: float = 0.0) -> TransportError:
        measures.REMOTE_REQUESTS.labels(verb, why).inc()
        return TransportError(text, retry_after_ms=int(retry_after_s * 1000))

    def _admit(self, verb: str) -> tuple[int, bool]:
        with self._breaker_lock:
            now_s = self._clock()
            term = self._breaker.admit(now_s)
            state, remaining_s = self._breaker.state, self._breaker.remaining_s(now_s)
            self._measure(state)
        if term is None:
            text = f"{self._name} did not answer lately and is not asked now"
            raise self._refusal(verb, "refused", text, remaining_s)
        return term, state == "half_open"

    def _note_full(self, reason: str) -> None:
        with self._breaker_lock:
            was_full, self._full = self._full, reason
        if reason and not was_full:
            _log.warning("remote_full", store=self._name, reason=reason)
        if was_full and not reason:
            _log.info("remote_has_room_again", store=self._name)

    def _report(self, term: int, verdict: Verdict, reason: str) -> None:
        with self._breaker_lock:
            before = self._breaker.state
            self._breaker.report(term, verdict, self._clock())
            self._has_answered = self._has_answered or verdict == "succeeded"
            if verdict == "failed":
                self._last_failure = reason or self._last_failure
            after = self._breaker.state
            self._measure(after)
        if before == "closed" and after == "open":
            _log.warning("remote_left_alone", store=self._name, reason=reason)
        if before == "half_open" and after == "closed":
            _log.info("remote_answers_again", store=self._name)

    def _measure(self, state: BreakerState) -> None:
        if state != self._measured:
            self._measured = state
            measures.REMOTE_BREAKER.set(_GAUGE[state])


async def _within(attempt: Attempt[T], remaining_s: float) -> Answer[T]:
    if remaining_s <= 0.0:
        raise TimeoutError
    async with asyncio.timeout(remaining_s):
        return await attempt()


class _OutOfTime(Exception):
    """The deadline passed; becomes a TransportError after the breaker was informed."""


_open: weakref.WeakSet[GuardedCalls] = weakref.WeakSet()


def _settle_at_exit(calls: GuardedCalls) -> None:
    if not _open:
        atexit.unregister(_settle)
        atexit.register(_settle)
    _open.add(calls)


def _settle() -> None:
    """Wait for the library's threads, so that the interpreter ends after them.

    They release an answer a moment after it was given, and abort the process if the interpreter is gone by then (a race
    that pyo3-async-runtimes leaves to its users).
    """
    for calls in list(_open):
        calls.close()
    time.sleep(SETTLE_S)
