"""Requests in order of time, within a bounded window."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from thermocline.trace import arrival_order
from thermocline.trace.arrival_order import OrderedTrace, ordered


def trace_of(folder: Path, times: list[int]) -> Path:
    """Write a trace whose requests are named by their place in the file."""
    path = folder / "trace.jsonl"
    lines = [
        {"timestamp": time, "input_length": 5, "output_length": 1, "hash_ids": [place]}
        for place, time in enumerate(times)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("bound", ["HELD_REQUESTS", "HELD_BLOCKS"])
def test_what_is_held_back_is_bounded(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the log's length: by requests, and by their blocks."""
    monkeypatch.setattr(arrival_order, bound, 10)
    taken = 0

    def requests() -> Iterator[tuple[float, int, int]]:
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield float(number), 1, number

    most = max(taken - given for given, _ in enumerate(ordered(requests())))
    assert most == 11


def test_a_reversed_trace_is_read_in_order(tmp_path: Path) -> None:
    """Within the window nothing is late; equal times stay in the order of the file."""
    trace = OrderedTrace(trace_of(tmp_path, [9, 7, 7, 3, 0]))

    assert [(each.timestamp, each.hash_ids[0]) for each in trace] == [(0, 4), (3, 3), (7, 1), (7, 2), (9, 0)]
    assert (trace.late, trace.warning) == (0, None)


def test_what_the_window_does_not_reach_is_counted_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as sent with the one before, so that time never goes back."""
    monkeypatch.setattr(arrival_order, "HELD_REQUESTS", 2)
    monkeypatch.setattr(arrival_order, "MOST_LATE_SHARE", 0.5)
    trace = OrderedTrace(trace_of(tmp_path, [5, 6, 7, 8, 1, 9]))

    assert [each.timestamp for each in trace] == [5, 6, 6, 7, 8, 9]
    assert trace.late == 1
    assert trace.warning is not None
    assert "1 requests come more than 2 lines after later ones" in trace.warning
    assert "trace import" in trace.warning


def test_a_trace_with_too_many_late_requests_is_refused(tmp_path: Path) -> None:
    """Its order says little about when its requests came."""
    with pytest.raises(InvalidRequest, match=r"is out of order: 41 of its first .*`trace import` sort; sort the file"):
        list(OrderedTrace(trace_of(tmp_path, list(range(5000, 0, -1)))))
