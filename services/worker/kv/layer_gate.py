"""Attention of layer l waits for the loads of layer l, and for nothing else (Strata: layer-wise overlap).

One gate serves all loads of one batch. The transfer thread releases layers in order; the compute thread waits
in the attention function. A load that fails verification closes the gate for good, because nothing that this
forward pass computes from then on will be used.
"""

from __future__ import annotations

import threading

from shared.errors import TransportError


class LoadRejected(TransportError):
    """A load of this batch failed or was overdue; the forward pass is to be repeated without its request."""


class LayerGate:
    """``timeout_s`` bounds the wait for one layer."""

    def __init__(self, layers: int, *, timeout_s: float) -> None:
        self._layers = layers
        self._timeout_s = timeout_s
        self._released = 0
        self._reason: str | None = None
        self.overdue = False  # Whether a wait took too long.
        self._changed = threading.Condition()

    def release(self, layer: int) -> None:
        """The pages of all layers up to ``layer`` are on the device."""
        with self._changed:
            self._released = max(self._released, layer + 1)
            self._changed.notify_all()

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
            self._changed.wait_for(lambda: self._reason is not None or self._released > layer, self._timeout_s)
            if self._reason is None and self._released <= layer:
                self.overdue = True
                self._reason = f"the load of layer {layer} took longer than {self._timeout_s} s"
            if self._reason is not None:
                raise LoadRejected(self._reason)
