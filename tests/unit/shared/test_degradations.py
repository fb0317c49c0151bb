"""A heartbeat stays small, however much is wrong."""

from __future__ import annotations

from shared.degradations import REASON_CHARS, TOLD_MOST, bounded, line
from shared.messages.status import Degradation


def test_what_is_told_is_bounded() -> None:
    """In number, and each on one line of so many characters."""
    told = bounded(Degradation(component="s", what="disk", reason=f"{n}\n" + "x" * 9_999) for n in range(100))

    assert len(told) == TOLD_MOST
    assert {len(each.reason) for each in told} == {REASON_CHARS}
    assert told[7].reason.startswith("7 xxx")


def test_a_line_says_who_what_why_and_by_which_setting() -> None:
    """The setting only where there is one."""
    disk = Degradation(component="storage", what="disk", reason="it is full", setting="--disk-kv-bytes")

    assert line(disk) == "storage, disk: it is full (--disk-kv-bytes)"
    assert line(Degradation(component="w", what="worker", reason="silent")) == "w, worker: silent"
