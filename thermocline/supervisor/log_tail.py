"""Finds in a child's log what an operator needs to see when it failed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_READ_BYTES = 64 * 1024

# What the name of the log file says already.
_SAID_BY_THE_FILE = ("component", "service", "id")

# How a service that has no log yet complains of its settings, and how argparse does.
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
    """One line of a log for people: a JSON event as words, with its exception on lines of its own."""
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
    """Why a service refused to start: from its last ``refused_to_start`` event, or from a bad command line.

    ``text`` is the end of its log: JSON objects, one a line, and whatever else was printed.
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
