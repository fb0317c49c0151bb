"""One request of a workload, and the protocol of workloads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from thermocline.simulate.tokens import Span

SHARED, QUESTION, OUTPUT = 0, 1, 2
_KINDS = 3


def name(kind: int, number: int) -> int:
    """Return the name of span ``number`` of a kind; no two kinds share a name."""
    return number * _KINDS + kind


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: ``spans`` is the prompt, ``answer`` the span of the model's answer.

    ``time_s`` is its arrival, from the start of the workload; None is as soon as a place is free. ``session`` is the
    workload's own data for :meth:`Workload.follow_up`.
    """

    spans: tuple[Span, ...]
    answer: Span
    time_s: float | None = None
    session: Any = None
    returns_in_s: float = 0.0  # The caller's hint when the next request will come; 0 is none.

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in all spans of the prompt."""
        return sum(span.tokens for span in self.spans)


class Workload(Protocol):
    """A stream of requests, used once. It keeps only the state of open sessions."""

    def requests(self) -> Iterator[Asked]:
        """Yield requests that follow no answer: in order of time, or all without a time."""

    def follow_up(self, asked: Asked) -> tuple[float, Asked] | None:
        """Return (pause in seconds, next request) after this request's answer; None at the end of a session.

        By default every request is a session of its own.
        """
        return None
