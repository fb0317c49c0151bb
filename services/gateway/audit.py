"""Log lines on refused keys and on administration: caller, act and result, and never content.

Unknown callers decide how often they are refused, so such lines are limited, and the next one counts those left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Scope

from services.gateway.admin_key import ADMIN_HEADER, is_admin_path
from services.gateway.keys import KEY_HEADER, key_hash, key_id
from services.gateway.rate_limits import Bucket
from shared import logs
from shared.errors import ThermoclineError

LINES_A_MINUTE = 120
"""Limit on lines about refusals, and the same on lines about malformed requests."""

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

_log = logs.get_logger("gateway.audit")


class LineLimit:
    """A rate limit on log lines; ``left_out`` counts those left out since the last one."""

    def __init__(self, per_minute: int = LINES_A_MINUTE, clock: Callable[[], float] = time.monotonic) -> None:
        """Allow ``per_minute`` lines a minute, and as many at once at the beginning.

        ``clock`` is monotonic, in seconds.
        """
        self._clock = clock
        self._bucket = Bucket(per_minute, float(per_minute), clock())
        self.left_out = 0

    def take(self) -> int | None:
        """Return how many lines were left out since the last one, if this line may be written; None if it may not."""
        now_s = self._clock()
        if self._bucket.wait_s(1, now_s) > 0:
            self.left_out += 1
            return None
        self._bucket.spend(1, now_s)
        told, self.left_out = self.left_out, 0
        return told


class LimitedLines(logging.Filter):
    """A filter for loggers of libraries that write a line for each malformed request."""

    def __init__(self, limit: LineLimit) -> None:
        """Count every line against ``limit``."""
        super().__init__()
        self._limit = limit

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop lines above the limit; the next line says how many were dropped."""
        told = self._limit.take()
        if told:
            record.msg = f"{record.msg} ({told} more such lines were left out)"
        return told is not None


class Audit:
    """The audit log of one gateway."""

    def __init__(self) -> None:
        """Limit lines about refusals to LINES_A_MINUTE; those about administration are not limited."""
        self._limit = LineLimit()

    def refused(self, scope: Scope, error: ThermoclineError) -> None:
        """Log a request that was refused for its missing or wrong key."""
        left_out = self._limit.take()
        if left_out is not None:
            _log.warning("key_refused", **_facts(scope), code=error.code, left_out=left_out)

    def administered(self, scope: Scope, status: int) -> None:
        """Log an answered request to the administration, at debug level if its method changes nothing."""
        say = _log.debug if scope["method"] in _SAFE else _log.info
        say("administered", **_facts(scope), status=status or 499)


def _facts(scope: Scope) -> dict[str, str]:
    """Return the act, the client's address and the key's id; of two keys, the one that such a path is opened with.

    The id is the one that lists of keys show: it reveals nothing of the key.
    """
    headers = Headers(scope=scope)
    bearer = headers.get("authorization", "").partition(" ")[2]
    key, admin = bearer or headers.get(KEY_HEADER, ""), headers.get(ADMIN_HEADER, "")
    shown = (admin or key) if is_admin_path(scope["path"]) else (key or admin)
    client = scope.get("client")
    return {
        "act": f"{scope['method']} {scope['path'][:256]}",
        "client": client[0] if client else "",
        "key": key_id(key_hash(shown.strip(" \t").encode("latin-1"))) if shown else "",
    }
