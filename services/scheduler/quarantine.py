"""Inputs that every scheduler leaves out of its fold, because the core raises for them or an operator ordered it.

Theory of operation (ADR 0030). An input for which the core raises would end every scheduler for ever, since each start
folds it again. So what is known of such inputs is in the stream, behind them:

* ``InputFailed``: the scheduler that holds the lead says that the core raised, and ends. The next one tries again.
* ``SkipInput``: an operator orders that an input is left out, such as one in which the core hangs.
* ``InputSkipped``: the decision. A scheduler that is about to restore as the active one takes it, after ``FAILURES``
  failures or an order.

State behind input n is the fold of all inputs up to n without those that the stream, up to n, says are left out. A fold
that begins at a snapshot reads the decisions behind it first (:func:`read_skips`), and does not use a snapshot for
which one came too late; a fold that meets a decision which it has not obeyed begins anew (``fold.SkipMissed``).

Leaving an input out must not contradict what targets were told. So no input is left out that a scheduler has come past
as the active one: no record of the lead, no output and no snapshot may be of that input or one behind it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from services.scheduler.core import CellState
from services.scheduler.fold import StepFailed, is_decision
from services.scheduler.leadership import Claim, Progress
from services.scheduler.snapshots import SnapshotStore
from shared import logs, subjects
from shared.bus.protocol import Bus, StreamMessage
from shared.codec import Input, decode_input, decode_published, encode
from shared.errors import CodecError, TransportError, Unavailable
from shared.messages.cell_events import InputFailed, InputSkipped, SkipInput
from shared.messages.requests import ReclaimRequest
from shared.messages.status import CellStatus, Degradation

FAILURES = 3
"""Failures of one input after which it is left out.

Each is of another process, from a stored snapshot. One may be chance (a flipped bit, memory that ran out), and a second
the machine's; by the third a standby on another machine had its turn, where there is one.
"""

MOST_AT_ONCE = 8
"""Inputs that are left out without an order among ``WITHIN`` successive ones.

Where more fail, the fault is in the state and not in them. Leaving out one after the other would lose everything.
"""

WITHIN = 10_000

MOST_REPEATED = 65_536
"""Outputs at the stream's end that are searched for the last cause: a take-over repeats at most this many."""

REASON_CHARS = 300

TOLD_MOST = 4
TOLD_NS = 24 * 3600 * 10**9
"""Time from the decision for which the last ``TOLD_MOST`` are listed as degradations: streams keep inputs as long."""

APPEND_S = 2.0

_log = logs.get_logger("quarantine")


@dataclass(slots=True)
class Skips:
    """What a part of the stream says about skipping earlier inputs, by their sequence."""

    decided: dict[int, InputSkipped] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    errors: dict[int, str] = field(default_factory=dict)  # Of the last failure.
    orders: dict[int, str] = field(default_factory=dict)  # Reason of the operator.

    def note(self, stored: StreamMessage) -> None:
        """Take in a message of the stream; messages of other subjects are ignored."""
        if stored.subject not in (subjects.skips_input(), subjects.skip_orders_input()):
            return
        try:
            message = decode_input(stored.data)
        except CodecError:
            return
        is_operator = stored.subject == subjects.skip_orders_input()
        if isinstance(message, InputSkipped) and is_decision(stored, message):
            self.decided.setdefault(message.seq, message)
        elif isinstance(message, InputFailed) and not is_operator and message.seq < stored.seq:
            self.failures[message.seq] += 1
            self.errors[message.seq] = message.error
        elif isinstance(message, SkipInput) and is_operator and message.seq < stored.seq:
            self.orders[message.seq] = message.reason

    def suit(self, state: CellState, position: int) -> bool:
        """Return whether a state behind input ``position`` obeys these decisions, so that it may be folded on."""
        return all(seq > position or seq in state.quarantined for seq in self.decided)

    def due(self) -> list[int]:
        """Return the sequences of inputs about which a decision is due, in order."""
        failed = {seq for seq, times in self.failures.items() if times >= FAILURES}
        return sorted((failed | set(self.orders)) - set(self.decided))

    def left_out_before(self, seq: int) -> int:
        """Return how many of the ``WITHIN`` inputs before ``seq`` are left out without an order."""
        return sum(seq - WITHIN <= other < seq and other not in self.orders for other in self.decided)


async def read_skips(bus: Bus, from_seq: int = 1) -> Skips:
    """Return failures, orders and decisions stored from input ``from_seq`` on.

    Raises Unavailable and TransportError.
    """
    skips = Skips()
    async for stored in bus.follow(subjects.INPUTS_STREAM, from_seq=from_seq, subject=subjects.SKIPS, live=False):
        skips.note(stored)
    return skips


async def note_failure(bus: Bus, failure: StepFailed, ours: Claim) -> None:
    """Count in the stream a failure of the holder of the lead, so that the count outlives the process.

    A failure that the broker does not store in time is not counted.
    """
    failed = InputFailed(seq=failure.seq, scheduler_id=ours.scheduler_id, error=_short(failure.error))
    try:
        await bus.append(
            subjects.skips_input(),
            encode(failed),
            message_id=f"failed-{failure.seq}-{ours.holder}",
            timeout_s=APPEND_S,
        )
    except (Unavailable, TransportError) as error:
        _log.warning("failure_not_counted", seq=failure.seq, reason=error.message)


async def decide(bus: Bus, published: Progress) -> Skips:
    """Decide on the inputs that are due, and return all that is known then.

    Only for the holder of the lead before it restores. ``published`` is how far outputs are known to be at the broker,
    by any process. Raises Unavailable and TransportError.
    """
    skips = await read_skips(bus)
    due = skips.due()
    snapshot_seq = await SnapshotStore(bus).newest_seq() if due else 0
    for seq in due:
        stored = await _stored(bus, seq)
        if stored is None:
            continue  # It has expired, and no fold comes to it any more.
        reason = skips.orders.get(seq) or f"failed {skips.failures[seq]} times: {skips.errors[seq]}"
        if snapshot_seq >= seq:
            _log.error("input_not_skipped", seq=seq, reason="a snapshot holds what it led to")
        elif published.covers(seq, stored.time_ns) or await _was_spoken_of(bus, seq):
            _log.error("input_not_skipped", seq=seq, reason="targets were told already what it or a later one led to")
        elif seq not in skips.orders and skips.left_out_before(seq) >= MOST_AT_ONCE:
            _log.error("input_not_skipped", seq=seq, reason=f"{MOST_AT_ONCE} others were lately: the state is at fault")
        else:
            skips.decided[seq] = decision = _decision(stored, reason)
            await bus.append(subjects.skips_input(), encode(decision), message_id=f"skipped-{seq}")
            _log.error("input_quarantined", seq=seq, subject=stored.subject, kind=decision.kind, reason=reason)
    return skips


def with_quarantined(status: CellStatus, state: CellState) -> CellStatus:
    """Return the status with the inputs that were left out lately among its degradations."""
    recent = [
        Degradation(
            component=status.scheduler_id,
            what="input",
            reason=f"input {seq} ({each.kind or 'unknown'} on {each.subject}) is in quarantine: {each.reason}",
        )
        for seq, each in state.quarantined.items()
        if state.now_ns - each.time_ns < TOLD_NS
    ]
    return msgspec.structs.replace(status, degraded=(*status.degraded, *recent[-TOLD_MOST:])) if recent else status


async def _stored(bus: Bus, seq: int) -> StreamMessage | None:
    async for stored in bus.follow(subjects.INPUTS_STREAM, from_seq=seq, live=False):
        return stored if stored.seq == seq else None
    return None


async def _was_spoken_of(bus: Bus, seq: int) -> bool:
    """Return whether any target may have been told an output of input ``seq`` or of a later one."""
    info = await bus.stream_info(subjects.OUTPUTS_STREAM)
    if info.last_seq < info.first_seq:
        return False
    first = max(info.first_seq, info.last_seq - MOST_REPEATED + 1)
    async for stored in bus.follow(subjects.OUTPUTS_STREAM, from_seq=first, live=False):
        try:
            if decode_published(stored.data).cause >= seq:
                return True
        except CodecError:
            continue  # No target can have read it either.
    return False


def _decision(stored: StreamMessage, reason: str) -> InputSkipped:
    """Return the decision, with the sender and subject that the input names, so that no process waits for them."""
    message: Input | None
    try:
        message = decode_input(stored.data)
    except CodecError:
        message = None
    asked = message.submit if isinstance(message, ReclaimRequest) else message
    names = ("gateway_id", "request_id", "worker_id", "storage_id", "incarnation", "timer_id")
    return InputSkipped(
        seq=stored.seq,
        subject=stored.subject,
        kind="" if message is None else type(message).__name__,
        reason=_short(reason),
        **{name: getattr(asked, name, "") for name in names},
    )


def _short(reason: str) -> str:
    flat = " ".join(reason.split())
    return flat if len(flat) <= REASON_CHARS else flat[: REASON_CHARS - 1] + "…"
