"""What one HTTP request holds while it is answered, given back exactly once."""

from __future__ import annotations

from services.gateway import metrics
from services.gateway.disconnect import DisconnectWatch
from services.gateway.gateway import Gateway
from services.gateway.pending import Generation
from shared.errors import RequestCancelled


class Ticket:
    """Slots, and later a generation with its watch. Taken before the body is read, which it thereby bounds too."""

    def __init__(self, gateway: Gateway) -> None:
        """Takes one slot. Raises TooManyConnections, or Unavailable while the gateway is closed."""
        gateway.check_open()
        gateway.slots.take(1)
        self._gateway = gateway
        self._slots = 1
        self._generation: Generation | None = None
        self._watch: DisconnectWatch | None = None
        self._is_closed = False

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close when an exception leaves the block; else whoever answers owns the ticket by now."""
        if kind is not None:
            self.close()

    def extend(self, choices: int) -> None:
        """Hold ``choices`` slots in all. Raises TooManyConnections."""
        self._gateway.slots.take(choices - self._slots)
        self._slots = choices

    def hold(self, generation: Generation, watch: DisconnectWatch | None = None) -> None:
        """Own a generation, and what watches its client, until closed."""
        self._generation, self._watch = generation, watch

    def close(self) -> None:
        """Cancel what still runs and give everything back; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch is not None:
            self._watch.close()
        if self._generation is not None:
            reason = self._generation.abandoned or RequestCancelled("", code="client_disconnected")
            self._gateway.dispatcher.end(self._generation, reason.code)
            self._gateway.recent.end(self._generation)
            metrics.observe_end(self._generation, self._gateway.clock())
        self._gateway.slots.give_back(self._slots)
