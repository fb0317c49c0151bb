"""Quotas of cached bytes: whose KV counts, what goes first, and what is not admitted."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.scheduler.core import check_invariants, decode_state, encode_state
from services.scheduler.core.cache.residency import DEVICE, HOST
from services.scheduler.core.quotas.quota_accounts import NOBODY, Account
from shared.errors import InvariantViolated
from shared.messages.cell_events import CellConfigured, FlushCache
from shared.messages.requests import CacheQuota
from shared.messages.storage_plans import DiskQuota, FetchChunks, SaveChunks
from tests.stateful.cell_model import CellModel, geometry, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of, worker_runs
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, host_tokens, prompt, put_on_disk
from tests.unit.scheduler.core.promoting import SMALL, filled, on_device, promotions

PAGE_BYTES = geometry(4).page_bytes


def quota(owner: str = "a", *, device: int = 0, host: int = 0, disk: int = 0) -> CacheQuota:
    """So many pages of 4 tokens in each pool."""
    return CacheQuota(
        owner=owner, device_bytes=device * PAGE_BYTES, host_bytes=host * PAGE_BYTES, disk_bytes=disk * PAGE_BYTES
    )


def run(
    cell: CellModel, kind: int, salt: str = "", its: CacheQuota | None = None, tokens: int = 40, **options: Any
) -> None:
    """Let a prompt of its own kind be answered; its pages, all of its tokens', are cached then."""
    cell.serve([kind] * tokens, max_tokens=1, salt=salt, quota=its, **options)


def test_an_owner_never_has_fewer_pages_than_none(make_cell: MakeCell) -> None:
    """A page that is counted off twice is a fault of the core, and is told at once."""
    cell = make_cell(pages=24)
    run(cell, 1, salt="a", its=quota(device=20))

    with pytest.raises(InvariantViolated, match="an owner has -1 pages in device/worker-0"):
        cell.state.quotas.charge(1, "device/worker-0", -pages(cell)["device/worker-0"] - 1)


def settle(cell: CellModel) -> None:
    """Some steps in which nothing else happens."""
    for _ in range(8):
        cell.feed(CellConfigured(config=cell.state.config))
        cell.drain()


def kinds(cell: CellModel, tier: str) -> list[int]:
    """First tokens of what is on the device, or in host memory."""
    nodes = [node for node in cell.state.tree.nodes.values() if node.parent]
    return sorted({node.tokens[0] for node in nodes if (node.device if tier == DEVICE else node.host)})


def pages(cell: CellModel, owner: str = "a") -> dict[str, int]:
    """What is counted of an owner, by pool."""
    known = cell.state.quotas
    return known.accounts[known.numbers[owner]].pages


def test_nobody_is_counted_where_nobody_has_a_quota(make_cell: MakeCell) -> None:
    """No node has an owner, and nothing is kept of anybody."""
    cell = make_cell(pages=24, host_pages=60)
    run(cell, 1, key_id="ab" * 16)
    run(cell, 2, salt="a", key_id="ab" * 16)

    assert not cell.state.quotas.accounts
    assert not cell.state.quotas.above
    assert cell.state.tree.owners == {}
    assert not any(node.owner for node in cell.state.tree.nodes.values())


def test_on_a_device_what_is_above_a_quota_goes_first(make_cell: MakeCell) -> None:
    """Though another tenant's KV, which is within its own, was used longer ago."""
    cell = make_cell(pages=32, page_size=4)
    run(cell, 1, salt="b", its=quota("b", device=10))
    run(cell, 2, salt="a", its=quota(device=20))
    run(cell, 3, salt="a", its=quota(device=20))

    run(cell, 4, salt="a", its=quota(device=20))

    assert kinds(cell, DEVICE) == [1, 3, 4]
    assert pages(cell) == {"device/worker-0": 20}


def test_what_a_request_is_about_to_take_counts(make_cell: MakeCell) -> None:
    """Its tenant is within its quota before; what it computes would be more, so its own KV makes room."""
    cell = make_cell(pages=21)
    run(cell, 1, salt="b", its=quota("b", device=10))
    run(cell, 2, salt="a", its=quota(device=12))

    cell.submit([3] * 40, max_tokens=1, salt="a", quota=quota(device=12))

    assert kinds(cell, DEVICE) == [1]
    cell.drain()
    assert kinds(cell, DEVICE) == [1, 3]


def test_so_does_what_it_decodes_into(make_cell: MakeCell) -> None:
    """A running request that needs more pages gets those of its own tenant's KV first."""
    cell = make_cell(pages=10)
    run(cell, 1, salt="b", its=quota("b", device=10), tokens=8)
    run(cell, 2, salt="a", its=quota(device=6), tokens=8)
    cell.submit([3] * 16, max_tokens=14, ignore_eos=True, salt="a", quota=quota(device=6))
    assert kinds(cell, DEVICE) == [1, 2]
    cell.drain()

    assert cell.state.counters["leases_extended"] > 0
    assert kinds(cell, DEVICE) == [1, 3]


def test_without_quotas_the_policy_decides(make_cell: MakeCell) -> None:
    """The same requests: what was used longest ago goes, whoever has most."""
    cell = make_cell(pages=21)
    run(cell, 1, salt="b")
    run(cell, 2, salt="a")
    run(cell, 3, salt="a")

    assert kinds(cell, DEVICE) == [2, 3]


def test_a_request_above_any_quota_is_computed(make_cell: MakeCell) -> None:
    """It gets pages of the whole device, those of others included, and what is above goes as soon as it ends."""
    cell = make_cell(pages=64, page_size=4)
    run(cell, 1, salt="b", its=quota("b", device=10))
    cell.submit([2] * 240, max_tokens=1, salt="a", quota=quota(device=1), request_id="large")

    assert cell.admitted[-1].request_id == "large"
    cell.drain()
    settle(cell)

    assert kinds(cell, DEVICE) == []
    assert pages(cell) == {}


def test_what_is_above_goes_though_nobody_needs_room(make_cell: MakeCell) -> None:
    """A quota is a bound: a half-empty device is no reason to have more than that."""
    cell = make_cell(pages=1_000)
    for kind in (1, 2, 3):
        run(cell, kind, salt="a", its=quota(device=100), tokens=400)
    settle(cell)

    assert kinds(cell, DEVICE) == [3]
    assert pages(cell) == {"device/worker-0": 100}


def test_only_as_much_goes_as_is_above(make_cell: MakeCell) -> None:
    """A long node is cut, and its front, which more prompts may share, stays."""
    cell = make_cell(pages=1_000)
    run(cell, 1, salt="a", its=quota(device=200), tokens=1_000)
    settle(cell)

    assert pages(cell)["device/worker-0"] == 1_000 // 4 - 256 // 4  # The least that is worth cutting off.


def test_a_lowered_quota_takes_effect_with_the_next_request(make_cell: MakeCell) -> None:
    """In host memory as well, and for all namespaces of the tenant; None lifts it."""
    cell = make_cell(pages=12, host_pages=60)
    for kind, salt in ((1, "a"), (2, "a, further"), (3, "a")):
        run(cell, kind, salt=salt, its=quota(host=60))
    assert pages(cell)["host/storage"] == 20

    run(cell, 4, salt="a", its=quota(host=10, device=10))
    settle(cell)

    assert pages(cell) == {"host/storage": 10, "device/worker-0": 10}
    run(cell, 5, salt="a")
    run(cell, 6, salt="a")
    assert pages(cell)["host/storage"] == 30
    assert cell.state.quotas.above == {}


def test_a_host_pool_takes_no_more_than_a_quota(make_cell: MakeCell) -> None:
    """A tenant's own coldest copies make room, and nobody else's, though the pool is full."""
    cell = make_cell(pages=12, host_pages=20)
    run(cell, 1, salt="b", its=quota("b", host=10))
    for kind in (2, 3, 4, 5):
        run(cell, kind, salt="a", its=quota(host=10))

    assert kinds(cell, HOST) == [1, 4]
    assert pages(cell, "a")["host/storage"] == pages(cell, "b")["host/storage"] == 10


@pytest.mark.parametrize("admission", ["all", "selective"])
def test_what_no_quota_has_room_for_is_not_admitted(make_cell: MakeCell, admission: str) -> None:
    """A node larger than it is dropped from the device without a copy, and displaces nothing."""
    cell = make_cell(pages=12, host_pages=60, admission=admission, admission_frequency=1)
    run(cell, 1, salt="a", its=quota(host=5), tokens=20)
    run(cell, 2, salt="b", tokens=40)
    assert kinds(cell, HOST) == [1]

    run(cell, 3, salt="a", its=quota(host=5))
    run(cell, 4, salt="b")

    assert kinds(cell, HOST) == [1, 2]
    assert cell.state.counters["host_refused_quota_pages"] == 10


def test_selective_admission_spares_own_copies_that_are_hotter(make_cell: MakeCell) -> None:
    """Within a quota as within a pool: a newcomer displaces nothing that is worth more."""
    cell = make_cell(pages=12, host_pages=60, admission="selective", admission_frequency=1)
    for kind in (1, 1, 1, 2, 3):
        run(cell, kind, salt="a", its=quota(host=10))

    assert kinds(cell, HOST) == [1]
    assert cell.state.counters["host_refused_quota_pages"] == 10


def test_pages_on_their_way_count(make_cell: MakeCell) -> None:
    """A second backup finds the quota taken by the first, which is not answered yet."""
    cell = make_cell(pages=64, host_pages=60, host_writes="through")
    for kind in (1, 2):
        cell.submit([kind] * 40, max_tokens=1, salt="a", quota=quota(host=10))
    worker_runs(cell)

    assert len(cell.state.transfers) == 1
    assert pages(cell)["host/storage"] == 10
    cell.drain()
    assert len(kinds(cell, HOST)) == 1


@pytest.mark.parametrize("ends", ["backup.", "lost"])
def test_what_does_not_become_a_copy_is_given_back(make_cell: MakeCell, ends: str) -> None:
    """A backup whose deadline passes, or whose storage is lost, leaves nothing counted."""
    cell = make_cell(pages=64, host_pages=60, host_writes="through")
    cell.submit([1] * 40, max_tokens=1, salt="a", quota=quota(host=10))
    worker_runs(cell)
    assert pages(cell)["host/storage"] == 10

    if ends == "lost":
        cell.lose_storage("storage")
    else:
        cell.fire(next(name for name in cell.timers if name.startswith(ends)))

    assert "host/storage" not in pages(cell)


def test_pools_that_are_gone_are_forgotten(make_cell: MakeCell) -> None:
    """With a worker or a storage goes what was counted there."""
    cell = make_cell(pages=12, host_pages=60)
    for kind in (1, 2):
        run(cell, kind, salt="a", its=quota(device=99, host=99))
    assert set(pages(cell)) == {"device/worker-0", "host/storage"}

    cell.lose_worker("worker-0")
    assert set(pages(cell)) == {"host/storage"}
    cell.lose_storage("storage")
    assert pages(cell) == {}


def test_tenants_of_one_salt_have_one_quota(make_cell: MakeCell) -> None:
    """What counts is whose KV it is, not who asked; so with callers' salts, which make namespaces."""
    cell = make_cell(pages=100)
    run(cell, 1, salt="a", its=quota(device=20), tenant="one")
    run(cell, 2, salt="a", its=quota(device=20), tenant="two")
    run(cell, 3, salt="a, further", its=quota(device=20), tenant="two")
    settle(cell)

    assert kinds(cell, DEVICE) == [2, 3]
    assert list(cell.state.quotas.numbers) == ["a"]


def test_kv_from_before_a_quota_counts(make_cell: MakeCell) -> None:
    """On the device and in host memory."""
    cell = make_cell(pages=24, host_pages=60, host_writes="through")
    run(cell, 1, salt="a")
    run(cell, 2, salt="a")
    run(cell, 3, salt="a", its=quota(device=99, host=99), tokens=8)

    assert pages(cell) == {"device/worker-0": 22, "host/storage": 22}


def test_without_a_quota_an_owner_is_counted_and_no_more(make_cell: MakeCell) -> None:
    """Nothing is kept of which of its nodes would go first, on a tier where it has no bound."""
    cell = make_cell(pages=24, host_pages=60, host_writes="through")
    run(cell, 1, salt="a", its=quota())
    run(cell, 2, salt="b", its=quota("b", host=99))
    accounts = {account.name: account for account in cell.state.quotas.accounts.values()}

    assert pages(cell) == {"device/worker-0": 10, "host/storage": 10}
    assert accounts["a"].orders == {}
    assert set(accounts["b"].orders) == {"host/storage"}
    check_invariants(cell.state)


def test_a_quota_that_comes_later_holds_for_what_is_there(make_cell: MakeCell) -> None:
    """And one that goes leaves what is there alone."""
    cell = make_cell(pages=1_000)
    for kind in (1, 2, 3):
        run(cell, kind, salt="a", its=quota())
    run(cell, 4, salt="a", its=quota(device=20))
    settle(cell)
    assert kinds(cell, DEVICE) == [3, 4]

    run(cell, 5, salt="a", its=quota())
    settle(cell)

    assert kinds(cell, DEVICE) == [3, 4, 5]
    assert next(iter(cell.state.quotas.accounts.values())).orders == {}
    check_invariants(cell.state)


def test_a_fetch_under_way_counts_from_when_its_owner_is_known(make_cell: MakeCell) -> None:
    """It was ordered before anybody had a quota."""
    cell = make_cell(page_size=PAGE, pages=64, host_pages=40, disk_chunks=100, prefetch_wait="full", disk_writes="off")
    put_on_disk(cell, prompt(3), salt="a")
    cell.submit(prompt(3), salt="a")
    (fetch,) = cell.state.fetches.values()
    cell.submit([5] * 4, salt="a", quota=CacheQuota(owner="a", host_bytes=1 << 20))

    assert pages(cell) == {"host/storage": 3 * CHUNK // PAGE}
    cell.drain()
    assert fetch.chunks == 3
    assert pages(cell)["host/storage"] == 3 * CHUNK // PAGE


def test_a_fetch_brings_no_more_than_a_quota(make_cell: MakeCell) -> None:
    """The rest is computed, and others' fetches do not wait behind it."""
    page = geometry(PAGE).page_bytes
    cell = make_cell(page_size=PAGE, pages=64, host_pages=40, disk_chunks=100, prefetch_wait="full", disk_writes="off")
    for kind, salt in ((1, "a"), (2, "a"), (3, "b")):
        put_on_disk(cell, prompt(4, kind=kind), salt=salt)
    its = CacheQuota(owner="a", host_bytes=5 * page, disk_bytes=1 << 20)
    for kind, salt, bound in ((1, "a", its), (2, "a", its), (3, "b", None)):
        cell.submit(prompt(4, kind=kind), salt=salt, quota=bound)

    fetches = orders_of(cell, FetchChunks)
    assert [len(order.host_pages) // 4 for order in fetches] == [4, 8]  # Whole chunks, of two pages each.
    assert [order.quota for order in fetches] == [DiskQuota(owner="a", disk_bytes=1 << 20), None]
    assert not cell.state.storages["storage"].fetching.due
    cell.drain()
    assert host_tokens(cell, prompt(4, kind=3)) in (0, 4 * CHUNK)
    assert pages(cell)["host/storage"] <= 5


@pytest.mark.parametrize(("allowed", "is_promoted"), [(40, False), (41, True)])
def test_a_promotion_stays_within_a_quota(make_cell: MakeCell, allowed: int, is_promoted: bool) -> None:
    """The hottest host root of a tenant is passed over where its quota on the device has no room for it."""
    cell = filled(make_cell(pages=32, host_pages=60, promotion="hotness"))
    run(cell, SMALL[0], its=quota(device=allowed), tokens=len(SMALL))  # With the 30 pages that are cached, 31.

    assert bool(promotions(cell)) == is_promoted
    assert (0 in on_device(cell)) == is_promoted


def test_saves_tell_the_storage_of_the_quota(make_cell: MakeCell) -> None:
    """Of the namespace's owner, as it is now; where there is none they say nothing."""
    cell = make_cell(page_size=64, pages=12, host_pages=12, disk_chunks=100)
    cell.serve([1] * 128, max_tokens=1, salt="a", quota=CacheQuota(owner="a", disk_bytes=4096, remote_bytes=8192))
    cell.serve([2] * 128, max_tokens=1, salt="a")
    cell.serve([3] * 128, max_tokens=1, salt="b")

    saves = orders_of(cell, SaveChunks)
    first = DiskQuota(owner="a", disk_bytes=4096, remote_bytes=8192)
    assert [order.quota for order in saves] == [first, DiskQuota(owner="a"), None]


def test_a_namespace_stays_with_its_first_owner(make_cell: MakeCell) -> None:
    """Who says another is counted and changes nothing; negative bytes are no bound."""
    cell = make_cell(pages=64)
    run(cell, 1, salt="a", its=quota(device=30))
    run(cell, 2, salt="a", its=quota("b", device=1))
    settle(cell)
    run(cell, 3, salt="c", its=CacheQuota(owner="c", device_bytes=-5))

    assert pages(cell) == {"device/worker-0": 20}
    assert pages(cell, "c") == {"device/worker-0": 10}
    assert cell.state.counters["quotas_refused"] == 1
    assert cell.state.quotas.above == {}


def test_owners_of_which_nothing_is_left_are_forgotten(make_cell: MakeCell) -> None:
    """However many namespaces callers make."""
    cell = make_cell(pages=64)
    for number in range(100):
        run(cell, number, salt=f"salt-{number}", its=quota(f"owner-{number}", device=30), tokens=4)
        cell.feed(FlushCache(call_id="call"))

    assert len(cell.state.tree.owners) <= 66
    assert len(cell.state.quotas.accounts) == len(cell.state.quotas.numbers) <= 66


def test_a_snapshot_keeps_quotas(make_cell: MakeCell) -> None:
    """And one from before there were any is read."""
    cell = make_cell(pages=24, host_pages=60)
    for kind in (1, 2, 3):
        run(cell, kind, salt="a", its=quota(device=20, host=5))
    data = encode_state(cell.state)

    restored = decode_state(data)

    assert restored.quotas == cell.state.quotas
    assert encode_state(restored) == data
    check_invariants(restored)
    old = msgspec.msgpack.decode(encode_state(make_cell(pages=24).state))
    del old["state"]["quotas"], old["state"]["tree"]["owners"]
    assert decode_state(msgspec.msgpack.encode(old)).tree.owners == {}


def an_owner(cell: CellModel, **account: Any) -> int:
    """Owner 7 of a state whose pages have ``PAGE_BYTES``; its number."""
    cell.state.quotas.accounts[7] = Account(name="a", **account)
    return 7


@pytest.mark.parametrize(
    ("nbytes", "pages", "leaving", "coming", "expected"),
    [
        (10 * PAGE_BYTES, 0, 0, 0, -10),
        (10 * PAGE_BYTES, 10, 0, 0, 0),
        (10 * PAGE_BYTES, 13, 0, 0, 3),
        (10 * PAGE_BYTES, 13, 4, 0, -1),
        (10 * PAGE_BYTES, 13, 4, 6, 5),
        (10 * PAGE_BYTES + PAGE_BYTES - 1, 11, 0, 0, 1),
        (PAGE_BYTES - 1, 1, 0, 0, 1),
        (0, 99, 0, 5, 0),
    ],
)
@pytest.mark.parametrize(("pool", "field"), [("device/w", "device_bytes"), ("host/s", "host_bytes")])
def test_the_excess_is_what_is_there_and_coming_less_what_leaves(
    make_cell: MakeCell, pool: str, field: str, nbytes: int, pages: int, leaving: int, coming: int, expected: int
) -> None:
    """Above whole pages of the quota of that tier alone; without one there is no excess."""
    cell = make_cell(pages=24, page_size=4)
    owner = an_owner(cell, pages={pool: pages}, leaving={pool: leaving}, **{field: nbytes})
    other = 8
    cell.state.quotas.accounts[other] = Account(name="b", pages={pool: 99})

    assert cell.state.quotas.excess(owner, pool, coming) == expected
    assert cell.state.quotas.most_pages(owner, pool) == (nbytes // PAGE_BYTES if nbytes else None)
    assert cell.state.quotas.excess(other, pool, coming) == 0
    assert cell.state.quotas.excess(NOBODY, pool, coming) == 0
    assert cell.state.quotas.most_pages(NOBODY, pool) is None


def test_before_pages_have_a_size_no_quota_is_exceeded(make_cell: MakeCell) -> None:
    """No worker has said yet how large they are."""
    cell = make_cell(pages=24, page_size=4)
    owner = an_owner(cell, device_bytes=1, pages={"device/w": 9})
    cell.state.quotas.page_bytes = 0

    assert cell.state.quotas.most_pages(owner, "device/w") is None
    assert cell.state.quotas.excess(owner, "device/w") == 0


def test_who_is_above_is_written_down_with_each_change(make_cell: MakeCell) -> None:
    """One page above is above, the quota itself is not; what leaves counts at once, and first come is first asked."""
    cell = make_cell(pages=24, page_size=4)
    owner = an_owner(cell, device_bytes=2 * PAGE_BYTES)
    above = cell.state.quotas.above

    cell.state.quotas.charge(owner, "device/w", 2)
    within = dict(above)
    cell.state.quotas.charge(owner, "device/w", 1)
    beyond = {pool: list(owners) for pool, owners in above.items()}
    cell.state.quotas.note_leaving(owner, "device/w", 1)
    leaving = dict(above)
    cell.state.quotas.note_leaving(owner, "device/w", -1)
    cell.state.quotas.charge(owner, "device/w", -3)

    assert (within, beyond, leaving, above) == ({}, {"device/w": [7]}, {}, {})
    assert cell.state.quotas.accounts[owner].pages == {}
    with pytest.raises(InvariantViolated, match="-1 pages in device/w"):
        cell.state.quotas.charge(owner, "device/w", -1)


def test_miscounts_are_seen(make_cell: MakeCell) -> None:
    """By the invariants."""

    def spoiled(change: Callable[..., None]) -> None:
        cell = make_cell(pages=64, host_pages=60)
        run(cell, 1, salt="a", its=quota(device=30))
        change(cell.state, cell.state.quotas.accounts[1])
        with pytest.raises(InvariantViolated):
            check_invariants(cell.state)

    spoiled(lambda state, account: account.pages.update({"device/worker-0": 9}))
    spoiled(lambda state, account: account.pages.clear())
    spoiled(lambda state, account: account.leaving.update({"device/worker-0": 1}))
    spoiled(lambda state, account: account.orders.clear())
    spoiled(lambda state, account: state.quotas.above.update({"device/worker-0": {1: None}}))
    spoiled(lambda state, account: state.quotas.numbers.clear())
    spoiled(lambda state, account: state.tree.owners.clear())
    spoiled(lambda state, account: setattr(account, "device_bytes", 1))
    spoiled(lambda state, account: state.tree.nodes[state.tree.roots[namespace("a")]].set_rare(owner=0))
