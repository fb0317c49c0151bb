"""Finds the lines of a failed child's log that an operator needs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_READ_BYTES = 64 * 1024

# Fields that the name of the log file implies.
_SAID_BY_THE_FILE = ("component", "service", "id")

# Errors about settings, from a service before it has a log, and from argparse.
_COMPLAINT = re.compile(r"^(?:thermocline )?(?:gateway|scheduler|storage|worker): (?:error: )?(.+)$")


def tail(log: Path, lines: int = 20) -> str:
    """Return the last ``lines`` lines of ``log``, or "" if there is none. Reads 64 KiB at most."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def readable(line: str) -> str:
    """Return a log line as text: a JSON event as words, with its exception on further lines."""
    try:
        event = json.loads(line)
    except ValueError:
        return line
    if not isinstance(event, dict) or "event" not in event:
        return line
    words = [str(event.pop(key)) for key in ("timestamp", "level", "event") if key in event]
    exception = event.pop("exception", "")
    words += [f"{key}={value}" for key, value in event.items() if key not in _SAID_BY_THE_FILE]
    return "\n".join([" ".join(words), *str(exception).splitlines()])


def refusal_reason(text: str) -> str | None:
    """Return why a service refused to start: from its last ``refused_to_start`` event, or from a bad command line.

    ``text`` is the end of its log: JSON objects, one per line, and other output. None if there is no reason.
    """
    for line in reversed(text.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            complaint = _COMPLAINT.match(line)
            if complaint:
                return complaint[1]
            continue
        if isinstance(event, dict) and event.get("event") == "refused_to_start":
            return str(event.get("reason", ""))
    return None
