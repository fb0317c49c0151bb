"""Replies and reports that tests make by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from thermocline.load.dialect import Dialect
from thermocline.load.driver import Outcome
from thermocline.load.figures import Slo, figures, rows
from thermocline.load.reply import Reply
from thermocline.load.report import Client, Hardware, Report

DIALECT = Dialect(
    model="m",
    api="tokens",
    is_extended=True,
    returns_tokens=True,
    words_per_token=1.0,
    vocabulary_first=8,
    vocabulary_end=300,
    max_context=None,
)
HARDWARE = Hardware(processor="p", cores=2, memory_bytes=2**30, load_average_1min=0.5)


def answered(number: int, due_s: float, ttft_ms: float, *, tokens: int = 3, itl_ms: float = 10.0, **more: Any) -> Reply:
    """An answer of equally spaced tokens, sent when it was due."""
    first_s = due_s + ttft_ms / 1e3
    last_s = first_s + (tokens - 1) * itl_ms / 1e3
    fields: dict[str, Any] = {
        "sent_s": due_s,
        "first_s": first_s,
        "last_s": last_s,
        "ended_s": last_s,
        "gaps_s": array("d", [itl_ms / 1e3] * (tokens - 1)),
        "prompt_tokens": 100,
        "output_tokens": tokens,
    }
    return Reply(number, due_s, **(fields | more))


def failed(number: int, due_s: float, error: str) -> Reply:
    return Reply(number, due_s, due_s, ended_s=due_s, error=error, message=error)


def report(replies: Sequence[Reply], *, label: str = "run", seconds: float = 10.0, **more: Any) -> Report:
    """Of replies whose clock began at 0."""
    outcome, slo = Outcome(list(replies), 0.0, seconds), more.pop("slo", Slo())
    fields: dict[str, Any] = {
        "label": label,
        "date": "2026-01-02T03:04:05Z",
        "command": "thermocline load --workload unshared",
        "seed": 1,
        "workload": "unshared",
        "settings": {"rate": 2.0},
        "server": DIALECT,
        "client": Client(cpu_part=0.1, versions={}, hardware=HARDWARE),
        "slo": slo,
        "figures": figures(outcome, slo),
        "requests": rows(outcome),
    }
    return Report(**(fields | more))
