"""What a step says of the requests that end in it."""

from __future__ import annotations

from services.worker.reports import FINISHED_BYTES, Reporter
from shared.messages.base import unpack_int32
from shared.messages.worker_events import FinishedToo, RequestFinished


def ends(reporter: Reporter) -> list[list[tuple[str, list[int]]]]:
    """Names and outputs of the ends that each event tells of."""
    found = []
    for event in reporter.take(1).events:
        if isinstance(event, RequestFinished):
            told: list[RequestFinished | FinishedToo] = [event, *event.others]
            found.append([(one.request_id, unpack_int32(one.output)) for one in told])
    return found


def test_ends_of_a_step_are_one_event() -> None:
    """In their order; what ends in the next step is another."""
    reporter = Reporter("w", "i")
    for name in ("a", "b", "c"):
        reporter.finished(name, 1, "length", [1, 2])
    first = ends(reporter)
    reporter.finished("d", 1, "stop", [3])

    assert first == [[("a", [1, 2]), ("b", [1, 2]), ("c", [1, 2])]]
    assert ends(reporter) == [[("d", [3])]]


def test_an_end_stays_behind_what_was_said_before_it() -> None:
    """Other events are not overtaken."""
    reporter = Reporter("w", "i")
    reporter.finished("a", 1, "length", [1])
    reporter.preempted("b", 1, [])
    reporter.finished("c", 1, "length", [2])

    assert ends(reporter) == [[("a", [1])], [("c", [2])]]


def test_long_answers_do_not_share_an_event() -> None:
    """So that no message grows with the number of requests."""
    reporter = Reporter("w", "i")
    half = [7] * (FINISHED_BYTES // 4 // 2)
    for name in ("a", "b", "c", "d", "e"):
        reporter.finished(name, 1, "length", half)

    assert [[name for name, _ in told] for told in ends(reporter)] == [["a", "b"], ["c", "d"], ["e"]]
