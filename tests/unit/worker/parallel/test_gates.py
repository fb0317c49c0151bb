"""A layer's loads and attention in every rank of a group."""

from __future__ import annotations

from collections import deque
from copy import copy
from functools import partial

import pytest

from services.worker.kv.layer_gate import LayerGate, LoadRejected
from services.worker.parallel.gates import TellingGate, ToldGate
from services.worker.parallel.orders import LayersLanded, StopRank
from shared.errors import InvariantViolated


def gates(gate: LayerGate, layers: int = 3) -> tuple[TellingGate, ToldGate, deque[LayersLanded]]:
    """Rank 0's gate and another rank's, and the orders between them."""
    orders: deque[LayersLanded] = deque()
    return TellingGate(gate, 7, layers, orders.append), ToldGate(7, orders.popleft), orders


def test_another_rank_passes_a_layer_after_rank_0_has() -> None:
    """One order for each layer, and none is left."""
    gate = LayerGate(timeout_s=1)
    gate.release(2)
    telling, told, orders = gates(gate)

    for layer in range(3):
        telling.wait(layer)
        assert len(orders) == 1
        told.wait(layer)

    telling.settle()
    assert not orders


def test_a_failed_load_lets_every_rank_finish_and_is_raised_afterwards() -> None:
    """Nobody is left in a collective; what was computed is not used."""
    gate = LayerGate(timeout_s=1)
    gate.release(0)
    telling, told, orders = gates(gate)
    telling.wait(0)
    told.wait(0)
    gate.reject("checksum")

    for layer in (1, 2):
        telling.wait(layer)
        told.wait(layer)

    assert not orders
    with pytest.raises(LoadRejected, match="checksum"):
        telling.settle()


def test_an_order_that_is_not_about_this_step_is_never_taken_for_a_release() -> None:
    """Of another step, or something else."""
    for order in (LayersLanded(number=6, layers=3), StopRank()):
        told = ToldGate(7, partial(copy, order))
        with pytest.raises(InvariantViolated):
            told.wait(0)
