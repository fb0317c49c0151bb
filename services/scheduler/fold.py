"""The fold over the stream as the shell and replay share it: decode, skip what is no input, step.

Both go through this one class, so that a message which the live scheduler skipped is skipped in replay too.
"""

from __future__ import annotations

import services.scheduler.policies  # noqa: F401  So that a cell can be told to use its policies and schedules.
from services.scheduler import core
from services.scheduler.core import CancelTimer, SetTimer, Stamped
from shared.bus.protocol import StreamMessage
from shared.codec import Input, Published, decode_input
from shared.errors import CodecError, InternalError, TransportError

Output = Published | SetTimer | CancelTimer


class Folded:
    """What one message led to: ``published`` are the outputs that go to targets, in order.

    ``input`` is None when the message could not be decoded; ``fault`` says why.
    """

    __slots__ = ("fault", "input", "outputs", "published")

    def __init__(self, message: Input | None, outputs: list[Output], fault: str = "") -> None:
        self.input = message
        self.outputs = outputs
        self.published: list[Published] = [one for one in outputs if not isinstance(one, SetTimer | CancelTimer)]
        self.fault = fault


class Fold:
    """The core's state and how far into the stream it has come.

    ``position`` is the last sequence consumed, which may be beyond ``state.last_seq`` when messages were skipped.
    """

    def __init__(
        self, state: core.CellState, *, position: int = 0, time_ns: int = 0, check_invariants_every: int = 0
    ) -> None:
        self.state = state
        self.position = position
        self.time_ns = time_ns
        self.skipped = 0
        self._check_every = check_invariants_every

    def apply(self, message: StreamMessage) -> Folded:
        """Consume the next message of the stream.

        Raises TransportError when it is not the next one: the stream lost messages that we have not seen.
        """
        if message.seq != self.position + 1:
            raise TransportError(f"the stream goes on with {message.seq} where {self.position + 1} was to come")
        try:
            decoded = decode_input(message.data)
        except CodecError as error:
            self._advance(message)
            self.skipped += 1
            return Folded(None, [], str(error))
        return self.apply_input(message, decoded)

    def apply_input(self, message: StreamMessage, decoded: Input) -> Folded:
        """As :meth:`apply` with the input already decoded; what-if replay substitutes one here."""
        outputs = list(core.step(self.state, Stamped(message.seq, message.time_ns, decoded)))
        self._advance(message)
        if self._check_every and message.seq % self._check_every == 0:
            core.check_invariants(self.state)
        return Folded(decoded, outputs)

    def _advance(self, message: StreamMessage) -> None:
        self.position = message.seq
        self.time_ns = message.time_ns


def load_state(encoded: bytes) -> core.CellState:
    """Decode a snapshot's state. Raises InternalError whatever is wrong with the bytes."""
    try:
        return core.decode_state(encoded)
    except InternalError:
        raise
    except Exception as error:
        # A snapshot of another release may fail in any way; the caller falls back to an older one.
        raise InternalError(f"the state cannot be decoded: {error!r}") from error
