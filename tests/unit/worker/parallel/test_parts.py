"""Pages in parts are, put together, the pages of a worker with one rank."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from services.storage.pools import open_device_pool
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.kv.planes import HeadsKept
from services.worker.kv.row_checks import RowChecks
from services.worker.parallel.group_pool import GroupPool, PartOfPool, attach_part
from services.worker.parallel.parts_mover import PartsMover
from shared.errors import InvariantViolated, TransportError
from shared.memory import DevicePoolView, HostPoolView, unlink_all
from shared.messages.pools import KvGeometry
from tests.run_name import shm_prefix
from tests.unit.worker.parallel.layouts import layout_of, pool_of
from tests.unit.worker.pools import fill_page, identity_of, made_loads, neighbour_load

GEOMETRY = KvGeometry(layers=3, kv_heads=4, head_dim=8, page_size=16, dtype="float32")
PREFIX = shm_prefix("parts")
PAGES = 8


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No segment outlives a test."""
    yield
    unlink_all(PREFIX)


def group_pool(ranks: int) -> GroupPool:
    """A pool whose parts are all in this process."""
    kept = [HeadsKept(GEOMETRY.kv_heads, GEOMETRY.head_dim, GEOMETRY.head_dim)] * GEOMETRY.layers
    return pool_of(layout_of(kept, ranks, GEOMETRY.page_size), PAGES, PREFIX)


def heads_of(part: PartOfPool) -> slice:
    assert part.heads is not None
    return slice(part.heads.start, part.heads.stop)


def host_pool(labels: list[str]) -> HostPoolView:
    """Pages 0, 1, ... sealed with these labels."""
    host = HostPoolView.create(PREFIX, GEOMETRY, PAGES)
    for page, label in enumerate(labels):
        fill_page(host, page, label)
    return host


def memory_of(host: HostPoolView) -> PageMemory:
    return PageMemory(PageLayout.page_first(GEOMETRY, PAGES), array=host.flat_pages())


def checks_of(host: HostPoolView, pages: list[int], labels: list[str]) -> RowChecks:
    identities = np.frombuffer(b"".join(map(identity_of, labels)), dtype=np.uint8).reshape(-1, 16)
    return RowChecks(host.checksums[pages], identities, np.ones(len(pages), dtype=bool))


def mover_of(pool: GroupPool) -> PartsMover:
    return PartsMover(GEOMETRY, pool.parts, BatchedMover)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_a_group_loads_and_backs_up_is_what_one_rank_would_have(ranks: int) -> None:
    """Host pages through a group's device and back are the same to the bit, sealed with the same checksums."""
    host = host_pool(["a", "b", "c"])
    pool = group_pool(ranks)
    mover = mover_of(pool)
    wrong = mover.load(
        memory_of(host), range(3), numbers(0, 1, 2), numbers(5, 2, 7), checks_of(host, [0, 1, 2], ["a", "b", "c"])
    )
    mover.drain()
    again = HostPoolView.create(PREFIX, GEOMETRY, PAGES)
    view = open_device_pool(pool.handle())
    for device, page, label in ((5, 0, "a"), (2, 1, "b"), (7, 2, "c")):
        view.copy_run((device, page, 1), again.pages)
        again.seal_page(page, identity_of(label))

    assert not wrong.wrong().any()
    assert (again.pages[:3] == host.pages[:3]).all()
    assert (again.checksums[:3] == host.checksums[:3]).all()
    view.close()
    pool.close()


def test_what_a_group_computed_is_restored_by_one_rank_and_the_other_way_round() -> None:
    """A page written by ranks, backed up, loaded by a single worker, and the reverse: equal head by head."""
    pool, single = group_pool(2), DevicePool.create(GEOMETRY, PAGES, device="cpu", shm_prefix=PREFIX)
    rng = np.random.default_rng(1)
    content = rng.standard_normal((3, 2, PAGES, 16, 4, 8), dtype=np.float32)
    for part in pool.parts:
        part.pool.tensor.numpy()[...] = content[..., heads_of(part), :]
    host = HostPoolView.create(PREFIX, GEOMETRY, PAGES)
    view = open_device_pool(pool.handle())

    view.copy_run((0, 0, PAGES), host.pages)
    everything = np.arange(PAGES, dtype=np.int32)
    BatchedMover(single).load(memory_of(host), range(3), everything, everything)

    assert (single.tensor.numpy() == content).all()
    other = group_pool(4)
    DevicePoolView.attach(single.handle()).copy_run((0, 0, PAGES), host.pages)
    mover_of(other).load(memory_of(host), range(3), everything, everything)
    for part in other.parts:
        assert (part.pool.tensor.numpy() == content[..., heads_of(part), :]).all()


@pytest.mark.parametrize("ranks", [2, 8])
def test_storing_is_the_reverse_of_loading(ranks: int) -> None:
    """Heads that several ranks have are read once."""
    host, into = host_pool(["a", "b"]), HostPoolView.create(PREFIX, GEOMETRY, PAGES)
    mover = mover_of(group_pool(ranks))
    mover.load(memory_of(host), range(3), numbers(0, 1), numbers(3, 4))

    mover.store(memory_of(into), range(3), numbers(3, 4), numbers(6, 0))

    assert (into.pages[6] == host.pages[0]).all()
    assert (into.pages[0] == host.pages[1]).all()


def test_a_row_that_fails_its_checksum_reaches_no_rank() -> None:
    """The other pages are written, and the bad one is named."""
    host = host_pool(["a", "b"])
    host.pages[1, 2, 77] ^= 1
    pool = group_pool(2)

    wrong = mover_of(pool).load(
        memory_of(host), range(3), numbers(0, 1), numbers(0, 1), checks_of(host, [0, 1], ["a", "b"])
    )

    assert wrong.wrong().tolist() == [False, True]
    for part in pool.parts:
        assert part.pool.bytes_view()[2, :, 0].any()
        assert not part.pool.bytes_view()[2, :, 1].any()


def test_rank_0_writes_the_part_of_another_process_and_removes_its_name() -> None:
    """What a killed rank leaves behind goes with the group."""
    own = DevicePool.create(GEOMETRY, PAGES, device="cpu", shm_prefix=PREFIX)
    part = attach_part(own.handle())

    part.tensor[1] = 3.0

    assert (own.tensor[1] == 3.0).all()
    part.close()
    with pytest.raises(TransportError):
        attach_part(own.handle())


def test_nobody_takes_a_pool_in_parts_for_one_in_a_piece() -> None:
    """Neither inside the worker nor outside; and parts that leave a head out are refused."""
    pool = group_pool(2)

    with pytest.raises(InvariantViolated):
        pool.memory()
    with pytest.raises(TransportError, match="2 ranks"):
        DevicePoolView.attach(pool.handle())
    handle = pool.handle()
    with pytest.raises(TransportError, match="4 heads"):
        open_device_pool(msgspec.structs.replace(handle, parts=handle.parts[:1] * 2))


@pytest.mark.parametrize("borrowing", [1, 2])
@pytest.mark.parametrize("lending", [1, 2, 4, 8])
def test_a_group_lends_its_pages_to_neighbours(lending: int, borrowing: int) -> None:
    """A single worker and another group find in them, to the bit, what a worker with one rank would lend."""
    host = host_pool(["a", "b", "c"])
    theirs, ours = group_pool(lending), group_pool(borrowing)
    mover_of(theirs).load(memory_of(host), range(3), numbers(0, 1, 2), numbers(5, 2, 7))
    loads = made_loads(GEOMETRY, PAGES, mover_of(ours))
    loads.neighbours.attach("w1", "inc-1", theirs.handle())

    result = loads.start([neighbour_load([7, 5], [0, 6])]).finish()

    again = HostPoolView.create(PREFIX, GEOMETRY, PAGES)
    view = open_device_pool(ours.handle())
    view.copy_run((0, 0, 1), again.pages)
    view.copy_run((6, 1, 1), again.pages)
    assert (result.failures, result.pages) == ([], 2)
    assert (again.pages[0] == host.pages[2]).all()
    assert (again.pages[1] == host.pages[0]).all()
    loads.close()


def test_a_group_of_which_a_part_is_gone_lends_nothing() -> None:
    """The load fails and says whose fault it was; what was mapped of it is let go."""
    theirs, ours = group_pool(2), group_pool(1)
    handle = theirs.handle()
    theirs.parts[1].pool.close()
    loads = made_loads(GEOMETRY, PAGES, mover_of(ours))
    loads.neighbours.attach("w1", "inc-1", handle)

    with pytest.raises(TransportError, match="segment"):
        loads.neighbours.find("w1", "inc-1")
    loads.close()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_kv_that_is_put_by_slots_is_in_every_part(ranks: int) -> None:
    """Each rank has its heads of it, those that several ranks have as well; other slots are untouched."""
    pool = group_pool(ranks)
    slots = torch.tensor([3, 40, 17])
    kv = torch.randn(2, GEOMETRY.kv_heads, len(slots), GEOMETRY.head_dim)

    pool.put_kv(1, slots, kv)

    for half in (0, 1):
        assert torch.equal(pool.rows(1, half, slots), kv[half].transpose(0, 1).flatten(1))
        for part in pool.parts:
            own = part.pool.rows(1, half, slots)
            assert torch.equal(own, kv[half, heads_of(part)].transpose(0, 1).flatten(1))
    assert sum(int(part.pool.tensor.count_nonzero()) for part in pool.parts) == max(1, ranks // 4) * kv.numel()
    pool.close()
