"""Copies from devices take no more than their share of the time."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from services.storage.copy_share import CopyShare
from services.storage.pools import Pools
from shared.errors import TransportError
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.storage_plans import AttachDevicePool

MakePool = Callable[[KvGeometry, int], PoolHandle]


class Clock:
    """Virtual time, which passes while somebody sleeps or copies."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def copying(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(("share", "pauses"), [(0.5, [1.0, 3.0]), (0.25, [3.0, 9.0]), (0.8, [0.25, 0.75])])
def test_after_a_copy_the_link_is_left_alone(share: float, pauses: list[float]) -> None:
    """For as long as makes the copy its share of the time."""
    clock = Clock()
    turns = CopyShare(share, clock, clock.sleep)

    for seconds in (1.0, 3.0, 2.0):
        turns.run(lambda took=seconds: clock.copying(took))  # type: ignore[misc]

    assert clock.slept == pytest.approx(pauses)


def test_a_pause_that_is_over_delays_nobody() -> None:
    """Time in which nobody wanted to copy counts."""
    clock = Clock()
    turns = CopyShare(0.5, clock, clock.sleep)
    turns.run(lambda: clock.copying(1.0))
    clock.now_s += 5.0

    turns.run(lambda: clock.copying(1.0))

    assert clock.slept == []


def test_a_copy_that_fails_has_used_its_time() -> None:
    """Its error comes through, and the next one is not held up for ever."""
    clock = Clock()
    turns = CopyShare(0.5, clock, clock.sleep)

    def breaks() -> None:
        clock.copying(2.0)
        raise TransportError("the device pool is closed")

    with pytest.raises(TransportError):
        turns.run(breaks)
    turns.run(lambda: clock.copying(1.0))

    assert clock.slept == [2.0]


def test_copies_take_turns() -> None:
    """However many threads copy, the share is of all of them together."""
    turns = CopyShare(0.99)
    most, running, lock = [0], [0], threading.Lock()

    def copy() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        with lock:
            running[0] -= 1

    def copy_often() -> None:
        for _ in range(50):
            turns.run(copy)

    threads = [threading.Thread(target=copy_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most == [1]


def test_a_shared_device_pool_is_copied_whole(shm_prefix: str, make_device_pool: MakePool) -> None:
    """The same bytes as without a share, and the pool behind it is the worker's."""
    geometry = KvGeometry(layers=2, kv_heads=1, head_dim=4, page_size=4, dtype="float16")
    order = AttachDevicePool(worker_id="w", worker_incarnation="i", handle=make_device_pool(geometry, 6))
    copies = []
    for share in (1.0, 0.5):
        pools = Pools(shm_prefix, 100_000, backup_share=share)
        pools.attach(order)
        device = pools.device("w", "i")
        into = np.zeros((6, geometry.layers, 2 * geometry.half_bytes), dtype=np.uint8)
        device.copy_run((1, 0, 4), into)
        copies.append(into)
        assert device.handle == order.handle
        device.close()

    assert copies[0].any()
    assert (copies[0] == copies[1]).all()
