"""One trace as a table, from a file that ``--traces`` wrote: ``python -m tools.trace_table FILE [TRACE_ID]``.

Without an id it is the last trace in the file that has a whole request.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any

BAR = 40
"""Characters that the request's time is drawn with."""


def spans_by_trace(text: str) -> dict[str, list[dict[str, Any]]]:
    """The spans of every trace, traces in order of their first line."""
    traces: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        span = json.loads(line)
        traces.setdefault(span["context"]["trace_id"].removeprefix("0x"), []).append(span)
    return traces


def table(spans: list[dict[str, Any]]) -> str:
    """Spans in order of their beginning, with a bar for when each was, relative to the span of the HTTP request."""
    http = next(span for span in spans if span["name"] == "http")
    begin, whole = _at(http["start_time"]), _at(http["end_time"]) - _at(http["start_time"])
    rows = ["| span | process | starts, ms | takes, ms | when |", "|---|---|---:|---:|---|"]
    for span in sorted(spans, key=lambda span: (span is not http, _at(span["start_time"]), span["end_time"])):
        start, length = _at(span["start_time"]) - begin, _at(span["end_time"]) - _at(span["start_time"])
        before = min(BAR - 1, max(0, round(start / whole * BAR)))
        drawn = max(1, min(BAR - before, round(length / whole * BAR)))
        bar = "·" * before + "█" * drawn + "·" * (BAR - before - drawn)
        process = span["resource"]["attributes"]["service.instance.id"]
        rows.append(f"| {span['name']} | {process} | {start * 1e3:.1f} | {length * 1e3:.1f} | `{bar}` |")
    return "\n".join(rows)


def _at(text: str) -> float:
    """Seconds of OpenTelemetry's time in text."""
    return datetime.fromisoformat(text).timestamp()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("trace", nargs="?", default="")
    options = parser.parse_args()
    traces = spans_by_trace(options.file.read_text(encoding="utf-8"))
    whole = [name for name, spans in traces.items() if {"http", "decode"} <= {span["name"] for span in spans}]
    if options.trace not in traces and (options.trace or not whole):
        parser.error(f"{options.file} holds no such trace")
    print(table(traces[options.trace or whole[-1]]))


if __name__ == "__main__":
    main()
