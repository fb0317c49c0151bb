"""A request's life as a table. The table is data: the machine follows it and the docs draw it."""

from __future__ import annotations

from enum import Enum

from shared.errors import DeadlineExceeded, IllegalTransition, RequestCancelled


class RequestState(Enum):
    """Where a request is. GONE is never stored: a request that gets there is forgotten."""

    WAITING = "waiting"  # In a queue; owns no pages.
    PREFILLING = "prefilling"  # Admitted to a worker; chunks of its prompt are being computed.
    DECODING = "decoding"  # Its prompt is computed; the worker goes on by itself.
    PREEMPTING = "preempting"  # Told to stop for lack of pages or after a failed load; pages still in use.
    ABORTING = "aborting"  # Told to end for its caller; pages still in use.
    RESUMING = "resuming"  # Its worker died; its gateway was asked for the tokens that it has.
    GONE = "gone"


class RequestEvent(Enum):
    """What can happen to a request."""

    ADMIT = "admit"  # Pages were allocated and AdmitRequest was sent.
    PREFILLED = "prefilled"  # The last chunk of its prompt was computed.
    PREEMPT = "preempt"  # PreemptRequest was sent.
    PREEMPTED = "preempted"  # The worker forgot it and it starts again.
    ABORT = "abort"  # AbortRequest was sent.
    FINISHED = "finished"  # The worker ended it.
    WORKER_LOST = "worker_lost"  # Its worker is gone and another may take over.
    RESUME = "resume"  # The gateway answered.
    DROP = "drop"  # It ended without a worker: refused, cancelled, past its deadline, out of attempts.


_S, _E = RequestState, RequestEvent

TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (_S.WAITING, _E.ADMIT): _S.PREFILLING,
    (_S.WAITING, _E.DROP): _S.GONE,
    (_S.PREFILLING, _E.PREFILLED): _S.DECODING,
    (_S.PREFILLING, _E.PREEMPT): _S.PREEMPTING,
    (_S.PREFILLING, _E.PREEMPTED): _S.WAITING,
    (_S.PREFILLING, _E.ABORT): _S.ABORTING,
    (_S.PREFILLING, _E.FINISHED): _S.GONE,
    (_S.PREFILLING, _E.WORKER_LOST): _S.RESUMING,
    (_S.PREFILLING, _E.DROP): _S.GONE,
    (_S.DECODING, _E.PREEMPT): _S.PREEMPTING,
    (_S.DECODING, _E.PREEMPTED): _S.WAITING,
    (_S.DECODING, _E.ABORT): _S.ABORTING,
    (_S.DECODING, _E.FINISHED): _S.GONE,
    (_S.DECODING, _E.WORKER_LOST): _S.RESUMING,
    (_S.DECODING, _E.DROP): _S.GONE,
    (_S.PREEMPTING, _E.PREEMPTED): _S.WAITING,
    (_S.PREEMPTING, _E.FINISHED): _S.GONE,
    (_S.PREEMPTING, _E.WORKER_LOST): _S.RESUMING,
    (_S.PREEMPTING, _E.DROP): _S.GONE,
    (_S.ABORTING, _E.FINISHED): _S.GONE,
    (_S.ABORTING, _E.DROP): _S.GONE,
    (_S.RESUMING, _E.RESUME): _S.WAITING,
    (_S.RESUMING, _E.DROP): _S.GONE,
}
"""Every legal move; what is missing here cannot happen."""

ADMITTED = (_S.PREFILLING, _S.DECODING, _S.PREEMPTING, _S.ABORTING)
"""States in which a request is known to a worker and owns pages."""


def next_state(state: RequestState, event: RequestEvent) -> RequestState:
    """Where ``event`` leads from ``state``; raises IllegalTransition when the table has no entry."""
    try:
        return TRANSITIONS[state, event]
    except KeyError as error:
        raise IllegalTransition(f"a {state.value} request cannot take {event.value}") from error


FAILURE_CODES = {"cancelled": RequestCancelled.code, "deadline": DeadlineExceeded.code}
"""Finish reasons that a request is made to end with, and the code when no worker is left to end it."""
