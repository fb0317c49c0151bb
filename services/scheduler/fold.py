"""The fold over the stream, shared by shell and replay: decode, skip what is not an input, step.

Both use this one class, so that a message which the live scheduler skipped is skipped in replay too. The decision to
skip an input that can be decoded is in the stream, behind that input: every fold reads such decisions ahead
(:mod:`services.scheduler.quarantine`), and finds out here where one came too late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.scheduler import core
from services.scheduler.core import CancelTimer, SetTimer, Stamped
from services.scheduler.outside import load_installed
from shared import logs, subjects
from shared.bus.protocol import StreamMessage
from shared.codec import Input, Published, decode_input
from shared.errors import CodecError, InternalError, TransportError
from shared.messages.cell_events import InputSkipped

Output = Published | SetTimer | CancelTimer

_log = logs.get_logger("fold")


class StepFailed(InternalError):
    """The core raised for an input. Its state may be half changed: it must not be folded on or published from."""

    code = "step_failed"

    def __init__(self, stored: StreamMessage, kind: str, error: BaseException) -> None:
        """Name the input ``stored``, the ``kind`` of its message, and the ``error`` that the core raised."""
        super().__init__(f"input {stored.seq} ({kind} on {stored.subject}) cannot be folded: {error!r}")
        self.seq = stored.seq
        self.error = repr(error)


class SkipMissed(InternalError):
    """An input was folded that the stream, later on, says is left out: this fold must begin again before it."""

    code = "skip_missed"


class Folded:
    """The outcome of one message: ``outputs`` in order, and ``published``, those of them that go to targets.

    ``input`` is None when the message was skipped; ``fault`` says why.
    """

    __slots__ = ("fault", "input", "outputs", "published")

    def __init__(self, message: Input | None, outputs: list[Output], fault: str = "") -> None:
        """Keep ``message`` as ``input``, and pick the outputs that go to targets."""
        self.input = message
        self.outputs = outputs
        self.published: list[Published] = [one for one in outputs if not isinstance(one, SetTimer | CancelTimer)]
        self.fault = fault


class Fold:
    """The core's state and its position in the stream.

    ``position`` is the last sequence consumed, which may be beyond ``state.last_seq`` when messages were skipped.
    """

    def __init__(
        self,
        state: core.CellState,
        *,
        position: int = 0,
        time_ns: int = 0,
        check_invariants_every: int = 0,
        skips: Mapping[int, InputSkipped] | None = None,
    ) -> None:
        """``skips`` are the decisions to leave inputs out that the stream holds behind ``position``."""
        self.state = state
        self.position = position
        self.time_ns = time_ns
        self.skipped = 0
        self._check_every = check_invariants_every
        self._skips = skips or {}
        load_installed()

    def apply(self, message: StreamMessage) -> Folded:
        """Consume the next message of the stream.

        Raises TransportError when it is not the next one: the stream lost messages that were not folded. Raises
        StepFailed or SkipMissed, after which this fold cannot go on.
        """
        if message.seq != self.position + 1:
            raise TransportError(f"the stream goes on with {message.seq} where {self.position + 1} was to come")
        decision = self._skips.get(message.seq)
        if decision is not None:
            return self._skip(message, f"it is in quarantine: {decision.reason}")
        try:
            decoded = decode_input(message.data)
        except CodecError as error:
            return self._skip(message, str(error))
        if isinstance(decoded, InputSkipped):
            if not is_decision(message, decoded):
                return self._skip(message, "no scheduler can have decided that")
            if decoded.seq not in self._skips and decoded.seq not in self.state.quarantined:
                raise SkipMissed(f"input {decoded.seq} was folded, and input {message.seq} says that it is left out")
        return self._apply(message, decoded)

    def _apply(self, message: StreamMessage, decoded: Input) -> Folded:
        try:
            outputs = list(core.step(self.state, Stamped(message.seq, message.time_ns, decoded)))
            if self._check_every and message.seq % self._check_every == 0:
                core.check_invariants(self.state)
        except (Exception, SystemExit) as error:  # Code from outside may do either.
            raise StepFailed(message, type(decoded).__name__, error) from error
        self._advance(message)
        return Folded(decoded, outputs)

    def _skip(self, message: StreamMessage, reason: str) -> Folded:
        self._advance(message)
        self.skipped += 1
        return Folded(None, [], reason)

    def _advance(self, message: StreamMessage) -> None:
        self.position = message.seq
        self.time_ns = message.time_ns


def is_decision(stored: StreamMessage, decoded: InputSkipped) -> bool:
    """Return whether a scheduler stored this, about an earlier input: the broker keeps that subject for them."""
    return stored.subject == subjects.skips_input() and decoded.seq < stored.seq


def _warn(told: str) -> None:
    _log.warning("policy_begins_anew", reason=told)


def load_state(encoded: bytes | memoryview, announce: Callable[[str], None] = _warn) -> core.CellState:
    """Decode a snapshot's state. ``announce`` is called for each policy that begins anew; the default logs a warning.

    Raises PolicyMissing where a policy's code is not here, and InternalError for any fault of the bytes.
    """
    load_installed()
    try:
        return core.decode_state(encoded, announce)
    except InternalError:
        raise
    except Exception as error:
        # A snapshot of another release may fail in any way; the caller falls back to an older one.
        raise InternalError(f"the state cannot be decoded: {error!r}") from error
