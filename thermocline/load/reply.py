"""The reply to one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from thermocline.load.prompts import Said

TRANSPORT = frozenset({"connection_refused", "connect_timeout", "connection_broken", "stream_ended_early", "timeout"})
"""Errors of a server that is gone; with any other error it has answered."""


@dataclass(slots=True)
class Reply:
    """A reply, or a failure. Times are seconds of the run's clock; ``due_s`` is the intended time of sending.

    ``first_s`` is 0 without a token. ``gaps_s`` are between successive messages with tokens. ``cached_tokens`` is None
    where the server does not say. ``error`` is "" for a whole answer.
    """

    number: int
    due_s: float
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""
    message: str = ""
    retries: int = 0
    is_cut: bool = False
    said: Said = field(default_factory=Said)

    @property
    def ttft_s(self) -> float:
        """TTFT from the intended start, so that late sending is not hidden (coordinated omission)."""
        return self.first_s - self.due_s

    @property
    def end_to_end_s(self) -> float:
        """Time from the intended start to the end of the stream."""
        return self.ended_s - self.due_s

    @property
    def token_s(self) -> float | None:
        """Mean time per token after the first; None for an answer of one token."""
        return (self.last_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None
