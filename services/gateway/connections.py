"""The connections of one server: their number is bounded, and so is the time that the head of a request may take.

At the bound, the connection that has been idle for longest is closed: between two requests its client loses only the
time of connecting again.
"""

from __future__ import annotations

from typing import Protocol

from services.gateway.listening_metrics import CONNECTIONS, FULL, IDLE


class Connection(Protocol):
    """The part of a connection that :class:`Connections` calls."""

    def make_way(self) -> None:
        """Close the connection; no request is in progress on it."""


class Connections:
    """The open connections of one server, and which of them are idle."""

    def __init__(self, most: int, head_s: float) -> None:
        """Admit up to ``most`` connections at a time.

        ``head_s`` are the seconds from a request's first byte within which its head must be complete; connections read
        it here and keep the time themselves.
        """
        self.head_s = head_s
        self._most = most
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # Idle for longest first.

    def __len__(self) -> int:
        """Return the number of open connections, idle ones included."""
        return len(self._open)

    @property
    def idle(self) -> int:
        """Number of connections without a request in progress."""
        return len(self._idle)

    def admit(self, connection: Connection) -> bool:
        """Add a connection, idle until its first request, closing an idle one if need be; False if all are busy."""
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
        """Note that a request has begun to arrive on it."""
        self._idle.pop(connection, None)

    def rests(self, connection: Connection) -> None:
        """Note that its request is answered, and the next has not begun."""
        if connection in self._open:
            self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """Forget a closed connection; idempotent."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        CONNECTIONS.set(len(self._open))
