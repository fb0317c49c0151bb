"""The lifecycles of requests, waits and transfers, as tables: the core follows them and the docs draw them."""

from __future__ import annotations

from enum import StrEnum

from shared.errors import DeadlineExceeded, IllegalTransition, RequestCancelled


class RequestState(StrEnum):
    """The state of a request. GONE is never stored: such a request is forgotten."""

    WAITING = "waiting"  # In a queue; owns no pages.
    PREFILLING = "prefilling"  # Admitted to a worker; chunks of its prompt are being computed.
    DECODING = "decoding"  # Its prompt is computed; the worker goes on by itself.
    PREEMPTING = "preempting"  # Ordered to stop for lack of pages or after a failed load; pages still in use.
    ABORTING = "aborting"  # Ordered to end for its caller; pages still in use.
    RESUMING = "resuming"  # Its worker died; its gateway was asked for the tokens that it has.
    GONE = "gone"


class RequestEvent(StrEnum):
    """Events of a request's lifecycle."""

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
"""Every legal transition; what is missing here cannot happen."""

ADMITTED = (_S.PREFILLING, _S.DECODING, _S.PREEMPTING, _S.ABORTING)
"""States in which a request is known to a worker and owns pages."""


def next_state(state: RequestState, event: RequestEvent) -> RequestState:
    """Return the state that ``event`` leads to. Raises IllegalTransition when the table has no entry."""
    try:
        return TRANSITIONS[state, event]
    except KeyError as error:
        raise IllegalTransition(f"a {state.value} request cannot take {event.value}") from error


class WaitKind(StrEnum):
    """The reason for which a waiting request waits."""

    NOWHERE = "nowhere"  # It is in no queue: it does not wait, or no worker takes requests.
    TURN = "turn"  # Ready: it stands in its worker's queue.
    PRODUCER = "producer"  # Another request computes what both share.
    LOAD = "load"  # A part of its prefix is being loaded to the device.
    FETCH = "fetch"  # A part of its prefix is being fetched to host memory.
    RUN = "run"  # Hidden states of its prefix are being fetched, for it or for another.


class WaitEvent(StrEnum):
    """Events that change the kind of a wait."""

    PLACED = "placed"  # It was put into a worker's queue.
    FOR_PRODUCER = "for_producer"
    FOR_LOAD = "for_load"
    FOR_FETCH = "for_fetch"
    FOR_RUN = "for_run"
    WOKEN = "woken"  # The reason of its deferral is over, or not worth waiting for any more.
    MOVED = "moved"  # It was taken out of its worker's queue: it goes to another, or is over.
    ADMITTED = "admitted"


_K, _V = WaitKind, WaitEvent

DEFERRED: dict[WaitKind, WaitEvent] = {
    _K.PRODUCER: _V.FOR_PRODUCER,
    _K.LOAD: _V.FOR_LOAD,
    _K.FETCH: _V.FOR_FETCH,
    _K.RUN: _V.FOR_RUN,
}
"""Kinds of waits in which a request is out of the ready order, each with the event that begins it."""

WAIT_TRANSITIONS: dict[tuple[WaitKind, WaitEvent], WaitKind] = {
    (_K.NOWHERE, _V.PLACED): _K.TURN,
    **{(_K.TURN, event): kind for kind, event in DEFERRED.items()},
    (_K.TURN, _V.MOVED): _K.NOWHERE,
    (_K.TURN, _V.ADMITTED): _K.NOWHERE,
    **{(kind, _V.WOKEN): _K.TURN for kind in DEFERRED},
    **{(kind, _V.MOVED): _K.NOWHERE for kind in DEFERRED},
}
"""Every legal transition of a request that waits; what is missing here cannot happen."""


def next_wait(kind: WaitKind, event: WaitEvent) -> WaitKind:
    """Return what a request waits for after ``event``. Raises IllegalTransition when the table has no entry."""
    try:
        return WAIT_TRANSITIONS[kind, event]
    except KeyError as error:
        raise IllegalTransition(f"a request that waits for {kind.value} cannot take {event.value}") from error


class TransferState(StrEnum):
    """The state of an order that moves KV or hidden states, until the worker or storage answers it."""

    UNDER_WAY = "under_way"
    CALLED_OFF = "called_off"  # Its result is not needed any more; it may still read and write its pages.
    LATE = "late"  # The same, because its deadline passed: the storage gets no further order before it answers.


class TransferEvent(StrEnum):
    """Events that change the state of a transfer, other than its answer."""

    CALL_OFF = "call_off"
    EXPIRE = "expire"


TRANSFER_TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (TransferState.UNDER_WAY, TransferEvent.CALL_OFF): TransferState.CALLED_OFF,
    (TransferState.UNDER_WAY, TransferEvent.EXPIRE): TransferState.LATE,
    (TransferState.CALLED_OFF, TransferEvent.CALL_OFF): TransferState.CALLED_OFF,
    (TransferState.LATE, TransferEvent.CALL_OFF): TransferState.LATE,
}
"""Every legal transition of backups, loads, saves, fetches and leases of hidden states."""


def next_transfer_state(state: TransferState, event: TransferEvent) -> TransferState:
    """Return the state that ``event`` leads to. Raises IllegalTransition when the table has no entry."""
    try:
        return TRANSFER_TRANSITIONS[state, event]
    except KeyError as error:
        raise IllegalTransition(f"a transfer that is {state.value} cannot take {event.value}") from error


FAILURE_CODES = {"cancelled": RequestCancelled.code, "deadline": DeadlineExceeded.code}
"""Finish reasons that end a request from outside, and their error codes where no worker is left to end it."""
