"""The gate lets a layer pass when it has landed, and nothing once a load has failed."""

from __future__ import annotations

import threading

import pytest

from services.worker.kv.layer_gate import LayerGate, LoadRejected


def test_a_released_layer_passes_and_later_ones_wait() -> None:
    """Releasing layer 1 releases layer 0 too; layer 2 runs into the timeout."""
    gate = LayerGate(timeout_s=0.01)
    gate.release(1)

    gate.wait(0)
    gate.wait(1)
    with pytest.raises(LoadRejected, match="layer 2"):
        gate.wait(2)
    assert gate.overdue


def test_a_waiter_is_woken_by_the_release() -> None:
    """The compute thread sleeps until the transfer thread is there."""
    gate = LayerGate(timeout_s=60)
    passed = threading.Event()

    def compute() -> None:
        gate.wait(0)
        passed.set()

    thread = threading.Thread(target=compute)
    thread.start()
    assert not passed.is_set()
    gate.release(0)
    thread.join(10)

    assert passed.is_set()


def test_a_rejection_stops_layers_that_have_landed_too() -> None:
    """What the pass computes is thrown away anyway, so it ends at the next layer."""
    gate = LayerGate(timeout_s=60)
    gate.release(1)
    gate.reject("checksum of layer 1")

    with pytest.raises(LoadRejected, match="checksum"):
        gate.wait(0)
    assert not gate.overdue


def test_waiting_is_measured() -> None:
    """Only the time of those who really had to wait."""
    now = iter([0, 5, 100, 130])
    gate = LayerGate(timeout_s=0.0, clock_ns=lambda: next(now))
    gate.release(0)

    gate.wait(0)
    assert gate.waited_ns == 0
    with pytest.raises(LoadRejected):
        gate.wait(1)

    assert gate.waited_ns == 30


def test_a_layer_can_be_overdue_with_nobody_waiting() -> None:
    """Time counts from the layer before it, or from the beginning."""
    now = [0]
    gate = LayerGate(timeout_s=1e-6, clock_ns=lambda: now[0])
    now[0] = 900
    gate.release(0)
    now[0] = 1800

    assert not gate.expire()
    assert gate.progress == (1, 900)
    now[0] = 2000
    assert gate.expire()
    assert gate.overdue
    assert gate.rejected == "the load of layer 1 took longer than 1e-06 s"
