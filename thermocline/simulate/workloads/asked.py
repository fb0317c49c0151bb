"""One request of a workload, and what a workload is."""

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
    """``spans`` is the prompt; ``answer`` is the span that the model will say.

    ``time_s`` is when it arrives, from the start of the workload; None where it comes as soon as there is room.
    ``session`` is whatever the workload wants to see again when the answer is there.
    """

    spans: tuple[Span, ...]
    answer: Span
    time_s: float | None = None
    session: Any = None
    returns_in_s: float = 0.0  # What its caller says of when it will go on; 0 is nothing.

    @property
    def prompt_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)


class Workload(Protocol):
    """Streams requests. A workload is asked once and keeps only what sessions under way need."""

    def requests(self) -> Iterator[Asked]:
        """Yield requests that wait for no answer: in order of time, or all without one."""

    def follow_up(self, asked: Asked) -> tuple[float, Asked] | None:
        """Return what comes after this request was answered, and how many seconds later."""
