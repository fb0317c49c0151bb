"""What runs within a client's environment: its cases, one after the other. Needs nothing but Python.

Each case is told by one line of JSON. A case that ``refuses`` expects the client to raise for a status of a refusal;
the message then says why.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

BASE_URL = os.environ.get("CLIENTS_BASE_URL", "")
MODEL = os.environ.get("CLIENTS_MODEL", "")
KEY = "no-key-needed"
QUESTION = "What is the weather in Paris?"
# A model without sense would write the digits of an unbounded number for ever.
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}

REFUSALS = (400, 403, 422, 501)
"""Statuses of what is known here and not served; an unknown path (404) is no refusal."""

_cases: list[tuple[str, bool, Callable[[], Any]]] = []


def case(says: str, *, refuses: bool = False) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function without arguments, async or not. It raises where the client does not get what it needs."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _cases.append((says, refuses, function))
        return function

    return add


def check(is_so: object, what: str) -> None:
    """Raise AssertionError with ``what`` unless it is so."""
    if not is_so:
        raise AssertionError(what)


def run() -> None:
    """All cases of this process, in order."""
    for says, refuses, function in _cases:
        began_s = time.monotonic()
        outcome, detail = "works", ""
        try:
            result = asyncio.run(function()) if inspect.iscoroutinefunction(function) else function()
            detail = str(result or "")
            if refuses:
                outcome, detail = "fails", f"it was to be refused, and gave {detail[:200]}"
        except Exception as error:
            status = getattr(error, "status_code", None) or getattr(error, "code", None)
            is_refusal = status in REFUSALS
            outcome = "refused" if refuses and is_refusal else "fails"
            detail = f"{type(error).__name__}: {error}"
            if outcome == "fails":
                traceback.print_exc()
        seconds = round(time.monotonic() - began_s, 2)
        print(json.dumps({"case": says, "outcome": outcome, "detail": detail[:500], "seconds": seconds}), flush=True)
