"""What a storage tells of the workers of its node that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing

import pytest

from services.storage.neighbours import Neighbours
from shared import subjects
from shared.bus.protocol import Delivery
from shared.codec import decode
from shared.memory.life import LifeSign
from shared.messages.status import Heartbeat
from tests.memory_bus import MemoryBroker, MemoryBus

GONE = Heartbeat(kind="worker", id="w0", incarnation="one", is_gone=True)


class Scene:
    """A storage's watch by a clock of the test, and what a scheduler hears of it."""

    def __init__(self, bus: MemoryBus, listener: MemoryBus, prefix: str) -> None:
        self.bus = bus
        self.now_s = 100.0
        self.neighbours = Neighbours(bus, "s0", prefix, clock_s=lambda: self.now_s)
        self._listener = listener
        self._heard: list[tuple[str, Heartbeat]] = []

    async def start(self) -> None:
        await self._listener.subscribe(subjects.HEARTBEATS, self._hear)

    async def look(self) -> None:
        await self.neighbours.look()

    async def heard(self) -> list[tuple[str, Heartbeat]]:
        """Everything since the last call: what was published before this mark, which is heard behind it."""
        mark = f"tc.heartbeat.mark.{self.now_s}"
        await self._listener.publish(mark, b"")
        async with asyncio.timeout(20):
            while not self._heard or self._heard[-1][0] != mark:
                await asyncio.sleep(0)
        found, self._heard = self._heard[:-1], []
        return found

    async def _hear(self, delivery: Delivery) -> None:
        heartbeat = decode(delivery.data, Heartbeat) if delivery.data else GONE
        self._heard.append((delivery.subject, heartbeat))


@pytest.fixture
async def scene(broker: MemoryBroker, shm_prefix: str) -> AsyncIterator[Scene]:
    made = Scene(broker.connect("storage"), broker.connect("scheduler"), shm_prefix)
    await made.start()
    with closing(made.neighbours):
        yield made


async def died(scene: Scene, prefix: str, kind: str = "worker") -> None:
    """Somebody was seen alive, and has ended since."""
    with LifeSign.show(prefix, kind, "w0", "one"):  # type: ignore[arg-type]
        await scene.look()


async def test_the_end_of_a_worker_is_told_on_the_subject_of_the_storage(scene: Scene, shm_prefix: str) -> None:
    """The next look says it, and while it lived nothing was said. A broker may let a storage speak nowhere else."""
    await died(scene, shm_prefix)
    before = await scene.heard()

    await scene.look()

    assert before == []
    assert await scene.heard() == [(subjects.heartbeat("storage", "s0"), GONE)]


async def test_it_is_told_again_after_half_a_second_one_two_and_four(scene: Scene, shm_prefix: str) -> None:
    """Five times in all, and never after that."""
    await died(scene, shm_prefix)
    told_after: list[float] = []
    for tenth in range(100):
        scene.now_s = 100.0 + tenth / 10
        await scene.look()
        told_after += [tenth / 10] * len(await scene.heard())

    assert told_after == [0.0, 0.5, 1.0, 2.0, 4.0]


async def test_without_a_broker_it_is_told_once_that_is_back(scene: Scene, shm_prefix: str) -> None:
    """What could not be said is said again with the rest, and nothing fails."""
    await died(scene, shm_prefix)
    scene.bus.disconnect()
    await scene.look()
    lost = await scene.heard()
    scene.bus.reconnect()
    scene.now_s += 0.5
    await scene.look()

    assert lost == []
    assert await scene.heard() == [(subjects.heartbeat("storage", "s0"), GONE)]


async def test_others_than_workers_are_not_told_of(scene: Scene, shm_prefix: str) -> None:
    """Nobody else is a neighbour."""
    await died(scene, shm_prefix, "gateway")
    await scene.look()

    assert await scene.heard() == []


async def test_workers_of_another_prefix_are_not_told_of(scene: Scene, shm_prefix: str) -> None:
    """They are another cell's."""
    await died(scene, f"{shm_prefix}-2")
    await scene.look()

    assert await scene.heard() == []


async def test_what_waits_to_be_told_again_is_bounded(
    scene: Scene, shm_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest words stay."""
    monkeypatch.setattr("services.storage.neighbours.DUE_MOST", 3)
    await died(scene, shm_prefix)
    await scene.look()
    first = await scene.heard()
    scene.now_s += 10
    await scene.look()

    assert first == []
    assert len(await scene.heard()) == 3
