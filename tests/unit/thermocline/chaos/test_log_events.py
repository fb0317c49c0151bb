"""Logs are looked through for errors, and for defects that no fault explains."""

import json
from pathlib import Path

from thermocline.chaos.log_events import look_through


def write(path: Path, *lines: object) -> None:
    """Events as JSON, anything else as it is."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def test_errors_are_counted_and_are_no_defects(tmp_path: Path) -> None:
    """A process that cannot reach its broker may say so."""
    ended = {"level": "error", "event": "process_failed", "exception": "shared.errors.Unavailable: no broker"}
    write(tmp_path / "worker-0.log", ended, ended, {"level": "info", "event": "joining"})

    found = look_through(tmp_path.glob("*.log"))

    assert found.errors == {"worker-0 process_failed": 2}
    assert found.defects == []


def test_a_broken_invariant_is_a_defect_wherever_it_was_written(tmp_path: Path) -> None:
    """As an event's exception, or by Python itself; the log's earlier part counts too."""
    event = {"level": "error", "event": "process_failed", "exception": "shared.errors.InvariantViolated: page 3"}
    write(tmp_path / "scheduler.log", event)
    write(tmp_path / "storage.earlier.log", "Task exception was never retrieved")
    write(tmp_path / "nats.log", "KeyError is the broker's own affair")

    defects = look_through(tmp_path.glob("*.log")).defects

    assert [defect.partition(":")[0] for defect in defects] == ["scheduler", "storage"]
