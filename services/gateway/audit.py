"""What the log says of who was refused and of what was administered: caller, act and result, and never content.

Strangers decide how often they are refused, so such lines are bounded, and the next one says how many were left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Scope

from services.gateway.keys import key_hash, key_id
from services.gateway.rate_limits import Bucket
from shared import logs
from shared.errors import ThermoclineError

LINES_A_MINUTE = 120
"""At most, of refusals; of malformed requests as many."""

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

_log = logs.get_logger("gateway.audit")


class LineLimit:
    """Which lines are written; ``left_out`` are those since the last one."""

    def __init__(self, per_minute: int = LINES_A_MINUTE, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bucket = Bucket(per_minute, float(per_minute), clock())
        self.left_out = 0

    def take(self) -> int | None:
        """How many were left out since the last line, which this one may say; None where it is left out itself."""
        now_s = self._clock()
        if self._bucket.wait_s(1, now_s) > 0:
            self.left_out += 1
            return None
        self._bucket.spend(1, now_s)
        told, self.left_out = self.left_out, 0
        return told


class LimitedLines(logging.Filter):
    """For loggers of libraries that write a line for each malformed request."""

    def __init__(self, limit: LineLimit) -> None:
        super().__init__()
        self._limit = limit

    def filter(self, record: logging.LogRecord) -> bool:
        told = self._limit.take()
        if told:
            record.msg = f"{record.msg} ({told} more such lines were left out)"
        return told is not None


class Audit:
    """One gateway's."""

    def __init__(self) -> None:
        self._limit = LineLimit()

    def refused(self, scope: Scope, error: ThermoclineError) -> None:
        """Log a request without a key, or with one that opens nothing here."""
        left_out = self._limit.take()
        if left_out is not None:
            _log.warning("key_refused", **_facts(scope), code=error.code, left_out=left_out)

    def administered(self, scope: Scope, status: int) -> None:
        """Log an answered request of the administration; those that change nothing are for debugging."""
        say = _log.debug if scope["method"] in _SAFE else _log.info
        say("administered", **_facts(scope), status=status or 499)


def _facts(scope: Scope) -> dict[str, str]:
    """Who and what. Keys by the name that lists have of them: it tells nothing of a key."""
    headers = Headers(scope=scope)
    bearer = headers.get("authorization", "").partition(" ")[2].strip()
    bearer = bearer or headers.get("x-admin-key", "") or headers.get("x-api-key", "")
    client = scope.get("client")
    return {
        "act": f"{scope['method']} {scope['path'][:256]}",
        "client": client[0] if client else "",
        "key": key_id(key_hash(bearer.encode("utf-8", "replace"))) if bearer else "",
    }
