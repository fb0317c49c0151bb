"""Logs of a cell's processes: one JSON object a line, which names its process, and never a reason to end."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from shared import logs
from shared.metrics import REGISTRY


class Disk(io.StringIO):
    """A stream that takes nothing while it is full."""

    is_full = False

    def write(self, text: str) -> int:
        """Take ``text``, or raise OSError."""
        self._check()
        return super().write(text)

    def flush(self) -> None:
        """Raise OSError while the stream is full."""
        self._check()

    def events(self) -> list[dict[str, Any]]:
        """Everything that was written; each line that is not empty must be one JSON object."""
        return [json.loads(line) for line in self.getvalue().splitlines() if line]

    def _check(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """The standard error of a process of a cell, called storage s1."""
    stream, earlier, level = Disk(), structlog.get_config(), logging.root.level
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logs, "_is_of_service", False)
    logs.configure("storage", "s1")
    yield stream
    structlog.configure(**earlier)
    structlog.contextvars.clear_contextvars()
    logging.root.setLevel(level)


def lost() -> float:
    """Lines that this process has counted as lost."""
    return REGISTRY.get_sample_value("thermocline_log_lines_lost_total") or 0.0


def test_lines_without_room_are_lost_and_counted(disk: Disk) -> None:
    """A full disk raises nothing into code that logs; once there is room, the log says how many are missing."""
    log, before = logs.get_logger("tests"), lost()
    disk.is_full = True
    log.warning("first")
    log.error("second")
    disk.is_full = False
    log.info("third")
    log.info("fourth")

    events = disk.events()
    assert [event["event"] for event in events] == ["log_lines_lost", "third", "fourth"]
    assert (events[0]["lines"], events[0]["level"], events[0]["service"]) == (2, "warning", "storage")
    assert lost() - before == 2


def test_a_line_that_was_cut_off_spoils_no_other(disk: Disk) -> None:
    """A part of a line may have been written when the disk was full; what follows begins a line of its own."""
    disk.is_full = True
    logs.get_logger("tests").warning("first")
    disk.is_full = False
    disk.write('{"event": "fir')
    logs.get_logger("tests").info("second")

    cut, *others = [line for line in disk.getvalue().splitlines() if line]
    assert cut == '{"event": "fir'
    assert [json.loads(line)["event"] for line in others] == ["log_lines_lost", "second"]


def test_lines_are_lost_at_once(tmp_path: Path) -> None:
    """Standard error has a buffer, which would keep them to be written later, in full or in part; the log has none."""
    program = """
import resource
from shared import logs
logs.configure("storage", "s1")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
for _ in range(3):
    logs.get_logger("tests").warning("lost")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
logs.get_logger("tests").info("written")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    path = tmp_path / "storage.log"
    with path.open("wb") as log:
        subprocess.run([sys.executable, "-c", program], stderr=log, env=environment, check=True, timeout=60)

    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    assert [(event["event"], event.get("lines")) for event in events] == [("log_lines_lost", 3), ("written", None)]


def test_every_thread_names_its_process(disk: Disk) -> None:
    """A thread has a context of its own, and its events the service and id all the same."""
    logs.bind(request_id="r1")
    thread = threading.Thread(target=lambda: logs.get_logger("tests").info("loaded"))
    thread.start()
    thread.join()
    logs.get_logger("tests").info("asked")

    loaded, asked = disk.events()
    assert (loaded["service"], loaded["id"], "request_id" in loaded) == ("storage", "s1", False)
    assert (asked["service"], asked["id"], asked["request_id"]) == ("storage", "s1", "r1")


def test_lines_of_libraries_are_events(disk: Disk) -> None:
    """A library's warning is one JSON object, with its logger's name, its level and its traceback."""
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("asyncio").exception("it failed after %d tries", 3)
    logging.getLogger("asyncio").info("nothing to see")
    logging.getLogger("asyncio").log(35, "a level of its own")

    first, second = disk.events()
    assert (first["event"], first["component"], first["message"]) == (
        "library_message",
        "asyncio",
        "it failed after 3 tries",
    )
    assert (first["level"], first["service"], first["id"]) == ("error", "storage", "s1")
    assert "ValueError: why" in first["exception"]
    assert (second["level"], second["message"]) == ("warning", "a level of its own")
