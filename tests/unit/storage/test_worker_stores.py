"""Which workers are asked to copy, and when pages of a call that nobody answered are free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.storage.worker_stores import ENDING_S, KNOWN_MOST, PROBE_AGAIN_S, WorkerStores
from shared import subjects
from shared.codec import decode, encode
from shared.errors import InternalError, TransportError
from shared.messages.base import pack_int32
from shared.messages.page_stores import PagesStored, StorePages
from shared.messages.pools import KvGeometry, PoolHandle, PoolPart
from tests.memory_bus import MemoryBroker

PROBE = StorePages(worker_incarnation="i", storage_id="s", storage_incarnation="si", pool="p", transfer_id=1)
CALL = msgspec.structs.replace(PROBE, device_pages=pack_int32([1]), host_pages=pack_int32([2]))
ON_GPU = PoolHandle(
    kind="cuda_ipc", layout="layer_first", name="", nbytes=1, pages=1,
    geometry=KvGeometry(layers=1, kv_heads=1, head_dim=1, page_size=1, dtype="float32"),
)  # fmt: skip


class Scene:
    """A storage's side, a clock of the test, and a worker that answers by ``worker``, if there is one."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.now_s = 100.0
        self.gone = False
        self.slept: list[float] = []
        self.asked: list[StorePages] = []
        self.worker: Callable[[StorePages], PagesStored] | None = lambda _: PagesStored()
        self.answering = asyncio.Event()
        self.answering.set()
        self._bus = broker.connect("worker")
        self.stores = WorkerStores(
            broker.connect("storage"), lambda *_: self.gone, lambda: self.now_s, answer_s=20, sleep=self._sleep
        )

    async def start(self) -> None:
        await self._bus.serve(subjects.rpc("worker", "store", "w"), self._answer, at_once=8)

    async def serves(self, device: PoolHandle = ON_GPU) -> bool:
        return await self.stores.serves("w", device, PROBE)

    async def _answer(self, data: bytes) -> bytes:
        self.asked.append(decode(data, StorePages))
        await self.answering.wait()
        if self.worker is None:
            raise InternalError("no")
        return encode(self.worker(self.asked[-1]))

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


@pytest.fixture
async def scene(broker: MemoryBroker) -> Scene:
    made = Scene(broker)
    await made.start()
    return made


async def test_a_worker_that_copies_is_asked_once_whether_it_does(scene: Scene) -> None:
    """And by a call that names no pages."""
    assert [await scene.serves() for _ in range(3)] == [True] * 3

    assert scene.asked == [PROBE]


async def test_pools_that_no_worker_copies_from_alone_are_not_asked_about(scene: Scene) -> None:
    """Shared memory, which this storage reads as well as anybody, and pools of several GPUs."""
    part = PoolPart(first_head=0, kv_heads=1, name="", nbytes=1)

    for device in (msgspec.structs.replace(ON_GPU, kind="shm"), msgspec.structs.replace(ON_GPU, parts=(part,))):
        assert not await scene.serves(device)

    assert scene.asked == []


@pytest.mark.parametrize("way", ["refused", "silent", "absent"])
async def test_one_that_does_not_copy_is_asked_again_later(scene: Scene, broker: MemoryBroker, way: str) -> None:
    """One of an earlier release, whose subject nobody serves, is the same: nothing is in doubt."""
    if way == "absent":
        scene.stores = WorkerStores(broker.connect("storage"), lambda *_: False, lambda: scene.now_s)
        scene._bus.disconnect()
    elif way == "silent":
        scene.worker = None
    else:
        scene.worker = lambda _: PagesStored(refused="the host pool is not pinned")
    assert not await scene.serves()
    before = len(scene.asked)

    assert not await scene.serves()

    assert len(scene.asked) == before
    scene.now_s += PROBE_AGAIN_S
    scene._bus.reconnect()
    scene.worker = lambda _: PagesStored()
    assert await scene.serves()


async def test_answers_are_what_became_of_the_call(scene: Scene) -> None:
    """A worker that refuses once is not asked for a while."""
    assert await scene.serves()
    assert await scene.stores.store("w", CALL) == "stored"
    scene.worker = lambda _: PagesStored(error="out of memory")
    with pytest.raises(TransportError, match="out of memory"):
        await scene.stores.store("w", CALL)
    assert await scene.serves()
    scene.worker = lambda _: PagesStored(refused="the host pool is not pinned")

    assert await scene.stores.store("w", CALL) == "refused"

    assert not await scene.serves()


@pytest.mark.parametrize("way", ["late", "error"])
async def test_pages_of_a_silent_worker_are_in_doubt_until_it_answers(scene: Scene, way: str) -> None:
    """It is asked the same again, and meanwhile nothing else."""
    assert await scene.serves()
    if way == "late":
        scene.stores._answer_s = 0.01
        scene.answering.clear()
    else:
        scene.worker = None
    assert await scene.stores.store("w", CALL) == "silent"
    settled = asyncio.create_task(scene.stores.settle("w", CALL))
    while len(scene.slept) < 3:
        await asyncio.sleep(0)
    assert not settled.done()
    assert not await scene.serves()

    scene.worker = lambda _: PagesStored()
    scene.answering.set()
    await asyncio.wait_for(settled, 20)

    assert set(map(msgspec.json.encode, scene.asked[1:])) == {msgspec.json.encode(CALL)}
    assert await scene.serves()


async def test_pages_of_a_worker_that_has_ended_are_free_a_moment_later(scene: Scene) -> None:
    """When the driver has ended what its kernels were writing."""
    scene.worker = None
    assert await scene.stores.store("w", CALL) == "silent"
    settled = asyncio.create_task(scene.stores.settle("w", CALL))
    while len(scene.slept) < 2:
        await asyncio.sleep(0)

    scene.gone = True
    await asyncio.wait_for(settled, 20)

    assert scene.slept[-1] == ENDING_S


async def test_an_earlier_incarnation_is_forgotten(scene: Scene) -> None:
    """A worker that comes back is asked anew."""
    assert await scene.serves()
    scene.worker = lambda _: PagesStored(refused="no")
    again = msgspec.structs.replace(PROBE, worker_incarnation="j")

    assert not await scene.stores.serves("w", ON_GPU, again)

    state: Any = scene.stores
    assert list(state._known) == [("w", "j")]


async def test_workers_that_are_no_more_are_forgotten(scene: Scene) -> None:
    """Each may have had a name of its own; one that is still there is asked again, and copies as before."""
    assert await scene.serves()
    for number in range(2 * KNOWN_MOST):
        name = f"w{number}"
        await scene.stores.serves(name, ON_GPU, msgspec.structs.replace(PROBE, worker_incarnation=name))

    assert len(scene.stores._known) == KNOWN_MOST
    assert await scene.serves()
    assert len(scene.asked) == 2
