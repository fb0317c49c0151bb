"""A trace as a table."""

from __future__ import annotations

import json
from typing import Any

from tools.trace_table import BAR, spans_by_trace, table


def line(name: str, trace: int, start_ms: int, end_ms: int, process: str = "gateway-0") -> str:
    """A span as it is in the file."""
    span: dict[str, Any] = {
        "name": name,
        "context": {"trace_id": f"0x{trace:032x}", "span_id": f"0x{start_ms + 1:016x}"},
        "start_time": f"2026-01-01T00:00:00.{start_ms:03d}000Z",
        "end_time": f"2026-01-01T00:00:00.{end_ms:03d}000Z",
        "resource": {"attributes": {"service.instance.id": process}},
    }
    return json.dumps(span)


def test_spans_are_in_order_below_the_request() -> None:
    """The request first, then what it consists of, each with a bar of where in the request it was."""
    text = "\n".join(
        (line("decode", 1, 300, 400, "worker-0"), line("other", 2, 0, 1), line("http", 1, 0, 400), line("q", 1, 0, 100))
    )

    rows = table(spans_by_trace(text)[f"{1:032x}"]).splitlines()[2:]

    assert [row.split(" | ")[0] for row in rows] == ["| http", "| q", "| decode"]
    assert rows[2].startswith("| decode | worker-0 | 300.0 | 100.0 |")
    assert rows[0].count("█") == BAR
    assert (rows[1].count("█"), rows[2].count("█")) == (BAR // 4, BAR // 4)
    assert rows[2].rstrip("` |").endswith("█")
