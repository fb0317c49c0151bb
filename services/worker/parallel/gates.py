"""Loads and attention in a group: no rank reads a layer before its pages are on that rank's device.

Rank 0 makes all loads, so it has the gate. When its own attention passes a layer it tells the others how many layers
are loaded. A load that fails must not end the pass in one rank alone, because the others would wait in a collective
forever: the pass continues in all ranks over undefined pages, and its result is discarded at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.worker.engine.forward_meta import LayerGate
from services.worker.kv.layer_gate import LoadRejected
from services.worker.parallel.orders import LayersLanded
from shared.errors import InvariantViolated


class TellingGate:
    """The gate of rank 0 in one step, which tells the other ranks what is loaded."""

    def __init__(self, gate: LayerGate, number: int, layers: int, tell: Callable[[LayersLanded], None]) -> None:
        """Wait for ``gate`` in step ``number``, and ``tell`` the other ranks how far it is.

        The model has ``layers`` layers: after a failed load all of them count as loaded, so that no rank waits any
        more.
        """
        self._gate, self._number, self._layers, self._tell = gate, number, layers, tell
        self._told = 0
        self._rejected: LoadRejected | None = None

    def wait(self, layer: int) -> None:
        """Wait for the layer's loads, and tell the other ranks. A failure is kept for :meth:`settle`."""
        if layer < self._told:
            return
        landed = layer + 1
        try:
            self._gate.wait(layer)
        except LoadRejected as error:
            self._rejected, landed = error, self._layers
        self._told = landed
        self._tell(LayersLanded(number=self._number, layers=landed))

    @property
    def is_rejected(self) -> bool:
        """Whether a load has failed, so that layers from now on attend to undefined pages."""
        return self._rejected is not None

    def settle(self) -> None:
        """Raise LoadRejected, after the pass, if a load failed, so that the pass's results must not be used."""
        if self._rejected is not None:
            raise self._rejected


class ToldGate:
    """The gate of another rank, which waits for messages of rank 0."""

    def __init__(self, number: int, receive: Callable[[], Any]) -> None:
        """Begin step ``number`` with no layer loaded; ``receive`` waits for the next order and returns it."""
        self._number, self._receive = number, receive
        self._landed = 0

    def wait(self, layer: int) -> None:
        """Return when the layer's loads are complete.

        Raises ChannelClosed when rank 0 is gone, which bounds the wait as rank 0's own gate is bounded.
        """
        while self._landed <= layer:
            order = self._receive()
            if not isinstance(order, LayersLanded) or order.number != self._number:
                raise InvariantViolated(f"step {self._number} waits for layer {layer} and got {order}")
            self._landed = max(self._landed, order.layers)
