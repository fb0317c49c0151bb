"""The demo's tables of measured figures. Pure but for the console."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from thermocline.client import Answer
from thermocline.client.figures import broker_ms, quantile


@dataclass
class Pass:
    """All answers of one pass over the workload; ``right[i]`` says whether ``answers[i]`` is the known answer."""

    name: str
    answers: list[Answer] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1; 0 for no answers."""
        return sum(self.right) / max(1, len(self.right))

    @property
    def cached_fraction(self) -> float:
        """Share of all prompt tokens that were reused, 0 to 1."""
        return sum(a.cached_tokens for a in self.answers) / max(1, sum(a.prompt_tokens for a in self.answers))


def print_passes(console: Console, passes: list[Pass]) -> None:
    """Print one row per pass: accuracy, reuse, TTFT, time."""
    table = Table(title="Answers, with the prefix cache and without")
    for column in ("pass", "asked", "right", "tokens", "reused", "TTFT p50", "TTFT p99", "time"):
        table.add_column(column, justify="left" if column == "pass" else "right", no_wrap=True)
    for one in passes:
        ttft = [a.ttft_s * 1e3 for a in one.answers]
        table.add_row(
            one.name,
            str(len(one.answers)),
            f"{one.accuracy:.0%}",
            f"{sum(a.prompt_tokens for a in one.answers):,}",
            f"{one.cached_fraction:.0%}",
            _figure(statistics.median(ttft), "ms"),
            _figure(quantile(ttft, 0.99), "ms"),
            _figure(one.seconds, "s"),
        )
    console.print(table)


def print_sources(console: Console, asked: list[Answer]) -> None:
    """Print TTFT by the tier that held most of the prefix."""
    table = Table(title="Time to first token by the tier that held the prefix")
    for column in ("prefix was", "requests", "tokens reused", "TTFT median", "TTFT p99"):
        table.add_column(column, justify="left" if column == "prefix was" else "right", no_wrap=True)
    for source in ("recomputed", "device", "host", "disk"):
        answers = [a for a in asked if a.source == source]
        if not answers:
            table.add_row(source, "0", "-", "-", "-")
            continue
        ttft = [a.ttft_s * 1e3 for a in answers]
        reused = sum(a.cached_tokens for a in answers)
        median, slowest = (_figure(value, "ms") for value in (statistics.median(ttft), quantile(ttft, 0.99)))
        table.add_row(source, str(len(answers)), f"{reused:,}", median, slowest)
    console.print(table)


def _figure(value: float, unit: str) -> str:
    """Return a figure so short that the tables fit 80 columns, which a log or a pipe has."""
    return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def print_broker(console: Console, alone: list[Answer]) -> None:
    """Print the part of TTFT before the first step, for requests that were sent one at a time."""
    shares = [(broker_ms(a), a.ttft_s * 1e3) for a in alone if a.timing_ms and a.ttft_s]
    if not shares:
        return
    times = [broker for broker, _ in shares]
    fraction = statistics.median(broker / ttft for broker, ttft in shares)
    median = statistics.median(times)
    console.print(
        f"Gateway (with tokenising), broker and scheduler took {median:.2f} ms, {fraction:.0%} of TTFT\n"
        f"(median of {len(times)} requests sent one at a time; the longest took {max(times):.2f} ms).\n"
    )
