"""The connections of one server: bounded, and none may take for ever over the head of a request.

Where there are as many as may be, the one that has been idle for longest makes way: between two requests a client loses
nothing by it but the time of connecting again.
"""

from __future__ import annotations

from typing import Protocol

from services.gateway.listening_metrics import CONNECTIONS, FULL, IDLE


class Connection(Protocol):
    """What is asked of a connection."""

    def make_way(self) -> None:
        """Close: nothing is under way on it."""


class Connections:
    """At most ``most`` of them, whose heads of requests must be complete within ``head_s`` of their first byte."""

    def __init__(self, most: int, head_s: float) -> None:
        self.head_s = head_s
        self._most = most
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # For longest first.

    def __len__(self) -> int:
        return len(self._open)

    @property
    def idle(self) -> int:
        """How many of them are."""
        return len(self._idle)

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for it, if need be because an idle one makes way. It is idle itself until it asks."""
        if len(self._open) >= self._most:
            longest = next(iter(self._idle), None)
            if longest is None:
                FULL.inc()
                return False
            IDLE.inc()
            self.forget(longest)
            longest.make_way()
        self._open.add(connection)
        self._idle[connection] = None
        CONNECTIONS.set(len(self._open))
        return True

    def asks(self, connection: Connection) -> None:
        """Note that a request has begun to arrive."""
        self._idle.pop(connection, None)

    def rests(self, connection: Connection) -> None:
        """Note that a request is answered, and the next has not begun."""
        if connection in self._open:
            self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """Forget a closed connection; idempotent."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        CONNECTIONS.set(len(self._open))
