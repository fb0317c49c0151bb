"""Decode steps; the next is launched before the host has read the tokens of this one, so that no GPU waits.

The device writes each token where the next step reads it, so the host need not know it to launch that step. It reads
the tokens of step n while step n+1 computes. Only plain steps are launched so: single rows of requests whose tokens are
chosen as the logits are (``sampler.may_be_unread``). All other work waits until the step under way is read: orders,
chunks, tokens that a grammar holds back.

A request may turn out to have ended when the step behind its last token is under way. That step's results for it are
discarded: its token is void, and its KV lies behind the end, where no page counts as computed. The end is reported only
when that step is done (:attr:`StepsAhead.held`), because the scheduler then reuses the pages.

Whenever something is not as expected - a launch that fails, logits without a token - the step under way is given up and
taken in the ordinary order, which computes the same values into the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker import metrics
from services.worker.compute import Computed, StepComputer
from services.worker.engine.sample_row import Sampled
from services.worker.engine.unread_tokens import Following, UnreadTokens
from services.worker.hidden_saving import HiddenSaving
from services.worker.kv.settled import raise_if_failed
from services.worker.outcome import Outcome
from services.worker.steps import Work
from shared import logs

_log = logs.get_logger("worker")

MOST_RESTED = 256
"""Most steps taken in the ordinary order after one was given up, before another is launched ahead."""


@dataclass(slots=True)
class _Launched:
    """A step under way. ``started_ns``: when the device could begin with it."""

    work: Sequence[Work]
    tokens: UnreadTokens
    started_ns: int


class StepsAhead:
    """Launches decode steps ahead, two on the device at the most. Used by the compute thread only."""

    def __init__(self, computer: StepComputer, saving: HiddenSaving, clock_ns: Callable[[], int]) -> None:
        """Begin with no step under way; while ``saving`` is not idle none is launched.

        ``clock_ns`` gives the times at which steps begin.
        """
        self._computer, self._saving, self._clock_ns = computer, saving, clock_ns
        self._under_way: _Launched | None = None
        self._rest = 0  # Steps to take in the ordinary order before another is launched.
        self._next_rest = 1
        self._well = 0  # Steps that went well since one was given up.

    @property
    def is_under_way(self) -> bool:
        """Whether a step is on the device whose tokens are unread."""
        return self._under_way is not None

    @property
    def held(self) -> frozenset[str]:
        """Ended requests whose KV the step under way still writes: their ends are not reported yet."""
        work = () if self._under_way is None else self._under_way.work
        return frozenset(item.request.request_id for item in work if not item.request.is_decoding)

    def begin(self, work: Sequence[Work]) -> bool:
        """Launch a step of ``work``, whose tokens the host knows.

        Return False where it must be taken in the ordinary order. No step is under way before.
        """
        if self._rest:
            self._rest -= 1
            return False
        self._under_way = self._launch(work, None)
        return self.is_under_way

    def advance(self, *, may_launch: bool) -> tuple[Outcome, int] | None:
        """Launch the next step, if it ``may_launch``, then read the one under way.

        Return its outcome and when it began. None where it must be taken again, in the ordinary order; no step is under
        way then. Raises DeviceFailed, and what waiting for the device raises.
        """
        now = self._under_way
        assert now is not None
        self._under_way = self._launch_behind(now) if may_launch else None
        done = self._read(now)
        if done is None:
            self._give_up("no token could be read")
            return None
        self._well += 1
        if self._well >= self._next_rest:
            self._next_rest = 1
        if self._under_way is not None:
            self._under_way.started_ns = self._clock_ns()
        return Outcome(done=done), now.started_ns

    def _launch_behind(self, now: _Launched) -> _Launched | None:
        """Launch the step behind ``now``, of all requests that are known to go on."""
        going_on = [
            (row, Work(item.request, item.end, item.end + 1, samples=True, is_chunk=False))
            for row, item in enumerate(now.work)
            if _goes_on(item)
        ]
        if not going_on:
            return None
        after = Following(now.tokens, tuple(row for row, _ in going_on))
        return self._launch([item for _, item in going_on], after)

    def _launch(self, work: Sequence[Work], after: Following | None) -> _Launched | None:
        """Launch a step; return None where it cannot be launched ahead, or launching failed."""
        if not self._saving.is_idle:
            return None
        started_ns = self._clock_ns()
        try:
            tokens = self._computer.launch(work, after)
        except Exception as error:
            raise_if_failed(error)
            self._give_up(repr(error))
            return None
        if tokens is None:
            return None
        if after is not None:
            metrics.STEPS_AHEAD.inc()
        return _Launched(work, tokens, started_ns)

    def _read(self, step: _Launched) -> list[Computed] | None:
        """Return the tokens of the requests that have not ended meanwhile; None where one has no token."""
        try:
            tokens, are_right = step.tokens.read()
        except Exception as error:
            raise_if_failed(error)
            _log.warning("step_ahead_failed", reason=repr(error))
            return None
        live = [row for row, item in enumerate(step.work) if item.request.is_decoding]
        if not all(are_right[row] for row in live):
            return None
        metrics.TOKENS_DISCARDED.inc(len(step.work) - len(live))
        return [Computed(step.work[row], (Sampled(tokens[row]),)) for row in live]

    def _give_up(self, reason: str) -> None:
        """Take some steps in the ordinary order, more each time that one is given up.

        When this returns no step is under way, and nothing is written any more.
        """
        _log.info("step_ahead_given_up", reason=reason, steps=self._next_rest)
        self._under_way = None
        self._rest, self._next_rest, self._well = self._next_rest, min(2 * self._next_rest, MOST_RESTED), 0
        self._computer.settle()


def _goes_on(item: Work) -> bool:
    """Return whether a request certainly has another token behind that of ``item``, and page room to compute on it."""
    request = item.request
    is_last = len(request.answer.tokens) + 1 >= request.answer.max_tokens
    return request.is_decoding and not is_last and item.end < request.capacity
