"""Attention of layer l waits for the loads of layer l, and for nothing else (Strata: layer-wise overlap).

One gate serves all loads of one batch. The transfer thread releases layers in order; the compute thread waits in the
attention function. A load that fails verification closes the gate permanently, because nothing that this forward pass
computes from then on will be used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared.errors import TransportError


class LoadRejected(TransportError):
    """A load of this batch failed or was overdue; the forward pass is to be repeated without its request."""


class LayerGate:
    """A gate between loading and attention."""

    def __init__(self, *, timeout_s: float, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Begin with no layer released; the time for the first one is counted from now.

        ``timeout_s`` bounds the wait for one layer, and ``clock_ns`` measures waits.
        """
        self._timeout_s = timeout_s
        self._clock_ns = clock_ns
        self._released = 0
        self._released_ns = clock_ns()
        self._reason: str | None = None
        self.overdue = False  # Whether a wait took too long.
        self.waited_ns = 0  # Time that the computing thread has spent waiting.
        self._changed = threading.Condition()

    def release(self, layer: int) -> None:
        """Release the pages of all layers up to ``layer``: they are on the device."""
        with self._changed:
            self._released = max(self._released, layer + 1)
            self._released_ns = self._clock_ns()
            self._changed.notify_all()

    @property
    def progress(self) -> tuple[int, int]:
        """Number of released layers, and when the last of them was released (or the gate made, before any), ns."""
        with self._changed:
            return self._released, self._released_ns

    def expire(self) -> bool:
        """Close the gate if the next layer has taken too long, even if none waits for it; return whether it did."""
        with self._changed:
            is_overdue = self._clock_ns() - self._released_ns > self._timeout_s * 1e9
            if is_overdue and self._reason is None:
                self._give_up(self._released)
                self._changed.notify_all()
            return is_overdue

    def reject(self, reason: str) -> None:
        """Close the gate: every wait raises from now on."""
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()

    @property
    def rejected(self) -> str | None:
        """Why the gate is closed, or None."""
        return self._reason

    def wait(self, layer: int) -> None:
        """Return when ``layer`` is released. Raises LoadRejected when the gate is closed or the wait too long."""
        # A lock-free look first: most waits are for layers that landed long ago.
        if self._released > layer and self._reason is None:
            return
        with self._changed:
            if self._reason is None:
                began_ns = self._clock_ns()
                self._changed.wait_for(lambda: self._reason is not None or self._released > layer, self._timeout_s)
                self.waited_ns += max(0, self._clock_ns() - began_ns)
            if self._reason is None and self._released <= layer:
                self._give_up(layer)
            if self._reason is not None:
                raise LoadRejected(self._reason)

    def _give_up(self, layer: int) -> None:
        self.overdue = True
        self._reason = f"the load of layer {layer} took longer than {self._timeout_s} s"
