"""A request's life, and what it waits for, as tables: the machine follows them and the docs draw them."""

from __future__ import annotations

from enum import StrEnum

from shared.errors import DeadlineExceeded, IllegalTransition, RequestCancelled


class RequestState(StrEnum):
    """Where a request is. GONE is never stored: a request that gets there is forgotten."""

    WAITING = "waiting"  # In a queue; owns no pages.
    PREFILLING = "prefilling"  # Admitted to a worker; chunks of its prompt are being computed.
    DECODING = "decoding"  # Its prompt is computed; the worker goes on by itself.
    PREEMPTING = "preempting"  # Told to stop for lack of pages or after a failed load; pages still in use.
    ABORTING = "aborting"  # Told to end for its caller; pages still in use.
    RESUMING = "resuming"  # Its worker died; its gateway was asked for the tokens that it has.
    GONE = "gone"


class RequestEvent(StrEnum):
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


class WaitKind(StrEnum):
    """What a waiting request waits for."""

    NOWHERE = "nowhere"  # It is in no queue: it does not wait, or no worker takes requests.
    TURN = "turn"  # Ready: it stands in its worker's queue.
    PRODUCER = "producer"  # Another request computes what both share.
    LOAD = "load"  # A part of its prefix is being loaded to the device.
    FETCH = "fetch"  # A part of its prefix is being fetched to host memory.
    RUN = "run"  # Hidden states of its prefix are being fetched, for it or for another.


class WaitEvent(StrEnum):
    """What changes it."""

    PLACED = "placed"  # It was put into a worker's queue.
    FOR_PRODUCER = "for_producer"
    FOR_LOAD = "for_load"
    FOR_FETCH = "for_fetch"
    FOR_RUN = "for_run"
    WOKEN = "woken"  # What it stood aside for is there, or is not worth waiting for any more.
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
"""Every legal move of a request that waits; what is missing here cannot happen."""


def next_wait(kind: WaitKind, event: WaitEvent) -> WaitKind:
    """Return what a request waits for after ``event``; raises IllegalTransition when the table has no entry."""
    try:
        return WAIT_TRANSITIONS[kind, event]
    except KeyError as error:
        raise IllegalTransition(f"a request that waits for {kind.value} cannot take {event.value}") from error


class TransferState(StrEnum):
    """Where an order to a worker or a storage is that moves KV or hidden states, until it is answered and forgotten."""

    UNDER_WAY = "under_way"
    CALLED_OFF = "called_off"  # What it brings is not needed any more; it may still read and write its pages.
    LATE = "late"  # The same, because its deadline passed: its storage is asked for nothing before it answers.


class TransferEvent(StrEnum):
    """What moves it on, but for the answer."""

    CALL_OFF = "call_off"
    EXPIRE = "expire"


TRANSFER_TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (TransferState.UNDER_WAY, TransferEvent.CALL_OFF): TransferState.CALLED_OFF,
    (TransferState.UNDER_WAY, TransferEvent.EXPIRE): TransferState.LATE,
    (TransferState.CALLED_OFF, TransferEvent.CALL_OFF): TransferState.CALLED_OFF,
    (TransferState.LATE, TransferEvent.CALL_OFF): TransferState.LATE,
}
"""Every legal move of backups, loads, saves, fetches and leases of hidden states."""


def next_transfer_state(state: TransferState, event: TransferEvent) -> TransferState:
    """Where ``event`` leads from ``state``; raises IllegalTransition when the table has no entry."""
    try:
        return TRANSFER_TRANSITIONS[state, event]
    except KeyError as error:
        raise IllegalTransition(f"a transfer that is {state.value} cannot take {event.value}") from error


FAILURE_CODES = {"cancelled": RequestCancelled.code, "deadline": DeadlineExceeded.code}
"""Finish reasons that a request is made to end with, and the code when no worker is left to end it."""
