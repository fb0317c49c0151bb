"""Loads and attention in a group: no rank reads a layer before its pages are on that rank's device.

Rank 0 makes all loads, so it has the gate. When its own attention passes a layer it tells the others how many have
landed. A load that fails must not end the pass in one rank alone, because the others would wait in a collective for
ever: the pass goes on everywhere over whatever the pages hold, and is thrown away at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.worker.engine.forward_meta import LayerGate
from services.worker.kv.layer_gate import LoadRejected
from services.worker.parallel.orders import LayersLanded
from shared.errors import InvariantViolated


class TellingGate:
    """The gate of rank 0 in one step: waits for ``gate`` and tells the other ranks."""

    def __init__(self, gate: LayerGate, number: int, layers: int, tell: Callable[[LayersLanded], None]) -> None:
        self._gate, self._number, self._layers, self._tell = gate, number, layers, tell
        self._told = 0
        self._rejected: LoadRejected | None = None

    def wait(self, layer: int) -> None:
        """See :class:`~services.worker.engine.forward_meta.LayerGate`; never raises what the load failed with."""
        if layer < self._told:
            return
        landed = layer + 1
        try:
            self._gate.wait(layer)
        except LoadRejected as error:
            self._rejected, landed = error, self._layers
        self._told = landed
        self._tell(LayersLanded(number=self._number, layers=landed))

    def settle(self) -> None:
        """Call it after the pass. Raises LoadRejected if what it computed is not to be used."""
        if self._rejected is not None:
            raise self._rejected


class ToldGate:
    """The gate of another rank: waits for what rank 0 tells. ``receive`` returns the next order."""

    def __init__(self, number: int, receive: Callable[[], Any]) -> None:
        self._number, self._receive = number, receive
        self._landed = 0

    def wait(self, layer: int) -> None:
        """Wait. Raises ChannelClosed when rank 0 is gone, which bounds the wait as the gate there is bounded."""
        while self._landed <= layer:
            order = self._receive()
            if not isinstance(order, LayersLanded) or order.number != self._number:
                raise InvariantViolated(f"step {self._number} waits for layer {layer} and got {order}")
            self._landed = max(self._landed, order.layers)
