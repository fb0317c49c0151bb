"""A tracer that keeps its spans, for tests of what is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shared.tracing import Attributes

TRACE = f"{0xABC:032x}"


@dataclass
class RecordedSpan:
    """A span; ``end_ns`` is 0 until it has ended. It satisfies ``tracing.OpenSpan``."""

    name: str
    parent: str
    traceparent: str
    start_ns: int = 0
    end_ns: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def trace_id(self) -> str:
        return self.traceparent.split("-")[1]

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        self.attributes.update(attributes)
        self.end_ns, self.error = 1, error


class RecordedSpans:
    """Satisfies ``tracing.Tracer``. Spans without a parent are of the trace ``TRACE``."""

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def begin(self, name: str, parent: str, attributes: Attributes) -> RecordedSpan:
        trace_id = parent.split("-")[1] if parent else TRACE
        span = RecordedSpan(name, parent, f"00-{trace_id}-{len(self.spans) + 1:016x}-01", attributes=dict(attributes))
        self.spans.append(span)
        return span

    def record(self, name: str, parent: str, start_ns: int, end_ns: int, attributes: Attributes) -> str:
        span = self.begin(name, parent, attributes)
        span.start_ns, span.end_ns = start_ns, end_ns
        return span.traceparent

    def close(self) -> None:
        """Nothing is held back."""

    @property
    def times(self) -> dict[str, tuple[int, int]]:
        """Start and end by name."""
        return {span.name: (span.start_ns, span.end_ns) for span in self.spans}
