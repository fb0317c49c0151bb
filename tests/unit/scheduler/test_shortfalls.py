"""What the cell lacks, in its status: the last word of each process that is there."""

from __future__ import annotations

import pytest

from services.scheduler.shortfalls import Shortfalls
from shared.messages.status import CellStatus, Degradation, Heartbeat, Kind, WorkerStatus

SILENCE_NS = 5_000
DISK = Degradation(component="s0", what="disk", reason="in use by process 7", setting="--disk-dir")
TENANTS = Degradation(component="g0", what="tenants", reason="line 3", setting="--tenants")


def beat(kind: Kind, name: str, *degraded: Degradation, is_gone: bool = False, incarnation: str = "one") -> Heartbeat:
    return Heartbeat(kind=kind, id=name, incarnation=incarnation, degraded=degraded, is_gone=is_gone)


def a_status(*storages: str, workers: tuple[str, ...] = ()) -> CellStatus:
    return CellStatus(
        scheduler_id="scheduler", epoch=1, seq=1, model="m", page_size=16, queued=0, running=0, max_queued=1,
        max_context=1, storages=storages,
        workers=tuple(WorkerStatus(worker_id=name, incarnation="one", running=0, waiting=0) for name in workers),
    )  # fmt: skip


def told(shortfalls: Shortfalls, status: CellStatus, now_ns: int = 0, *, wanted: bool = True) -> list[tuple[str, str]]:
    found = shortfalls.told(status, now_ns, is_storage_wanted=wanted).degraded
    return [(each.component, each.what) for each in found]


def test_the_last_word_of_each_process_counts() -> None:
    """What is not said again is over."""
    shortfalls = Shortfalls(SILENCE_NS)
    shortfalls.note(beat("storage", "s0", DISK), 0)
    shortfalls.note(beat("gateway", "g0", TENANTS), 0)
    before = told(shortfalls, a_status("s0"))
    shortfalls.note(beat("storage", "s0"), 1)

    assert before == [("s0", "disk"), ("g0", "tenants")]
    assert told(shortfalls, a_status("s0")) == [("g0", "tenants")]


def test_a_member_that_has_not_been_heard_is_told_for_that() -> None:
    """Nothing is known of what it lacks, and silence is not health."""
    shortfalls = Shortfalls(SILENCE_NS)

    assert told(shortfalls, a_status("s0", workers=("w0",))) == [("s0", "storage"), ("w0", "worker")]
    shortfalls.note(beat("storage", "s0"), 0)
    shortfalls.note(beat("worker", "w0"), 0)
    assert told(shortfalls, a_status("s0", workers=("w0",))) == []
    assert told(shortfalls, a_status("s0", workers=("w0",)), SILENCE_NS) == [("s0", "storage"), ("w0", "worker")]


def test_a_worker_of_an_earlier_life_has_not_been_heard() -> None:
    """What its successor of the same name says is not its word."""
    shortfalls = Shortfalls(SILENCE_NS)
    shortfalls.note(beat("worker", "w0", incarnation="another"), 0)

    assert told(shortfalls, a_status("s0", workers=("w0",))) == [("s0", "storage"), ("w0", "worker")]


@pytest.mark.parametrize(("wanted", "expected"), [(True, [("scheduler", "storage")]), (False, [])])
def test_a_cell_without_a_storage_is_degraded_if_it_wants_one(wanted: bool, expected: list[tuple[str, str]]) -> None:
    """What a storage says that is no member (any more) is not told."""
    shortfalls = Shortfalls(SILENCE_NS)
    shortfalls.note(beat("storage", "s0", DISK), 0)

    assert told(shortfalls, a_status(), wanted=wanted) == expected


def test_the_word_of_an_end_ends_what_was_said() -> None:
    """Of that incarnation alone."""
    shortfalls = Shortfalls(SILENCE_NS)
    shortfalls.note(beat("gateway", "g0", TENANTS), 0)
    shortfalls.note(beat("gateway", "g0", is_gone=True, incarnation="another"), 1)
    before = told(shortfalls, a_status("s0"), wanted=False)
    shortfalls.note(beat("gateway", "g0", is_gone=True), 2)

    assert ("g0", "tenants") in before
    assert ("g0", "tenants") not in told(shortfalls, a_status("s0"), wanted=False)
