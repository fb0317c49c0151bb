"""What the status tells of each tenant."""

import pytest

from services.scheduler.core import status
from services.scheduler.core.fold import status as usage
from shared.messages.requests import CacheQuota
from shared.messages.status import OwnerBytes, TenantLoad
from tests.stateful.cell_model import CellModel, geometry
from tests.unit.scheduler.core.cell_fixtures import MakeCell

PAGE_BYTES = geometry(4).page_bytes


def rows(cell: CellModel) -> dict[str, OwnerBytes]:
    """Bytes by owner."""
    return {row.owner: row for row in status(cell.state, "me").owner_bytes}


def test_requests_are_counted_by_tenant(make_cell: MakeCell) -> None:
    """Those at a worker, and those that wait; who has none is not there."""
    cell = make_cell(max_running=2)
    cell.submit([1] * 8, tenant="a", max_tokens=20, ignore_eos=True)
    cell.submit([2] * 8, tenant="b", max_tokens=20, ignore_eos=True)
    cell.submit([3] * 8, tenant="a")
    cell.submit([4] * 8)

    found = status(cell.state, "me")

    assert set(found.tenant_loads) == {
        TenantLoad(tenant="a", running=1, waiting=1),
        TenantLoad(tenant="b", running=1, waiting=0),
        TenantLoad(tenant="", running=0, waiting=1),
    }
    cell.drain()
    assert status(cell.state, "me").tenant_loads == ()


def test_bytes_add_up_to_what_is_cached(make_cell: MakeCell) -> None:
    """Of owners, and of nobody, on each tier."""
    cell = make_cell(pages=64, host_pages=60, host_writes="through")
    for kind, salt, owner in ((1, "a", "a"), (2, "b", "b"), (3, "b", "b"), (4, "", None)):
        quota = CacheQuota(owner=owner) if owner else None
        cell.serve([kind] * 40, max_tokens=1, salt=salt, quota=quota)

    found = rows(cell)

    assert found == {
        "": OwnerBytes(owner="", device=10 * PAGE_BYTES, host=10 * PAGE_BYTES),
        "a": OwnerBytes(owner="a", device=10 * PAGE_BYTES, host=10 * PAGE_BYTES),
        "b": OwnerBytes(owner="b", device=20 * PAGE_BYTES, host=20 * PAGE_BYTES),
    }
    pools = status(cell.state, "me").pools
    assert sum(pool.cached for pool in pools) * PAGE_BYTES == sum(row.device + row.host for row in found.values())


def test_an_empty_cell_tells_of_nobody(make_cell: MakeCell) -> None:
    """Before a worker has said what a page is."""
    cell = make_cell(workers=0)

    assert status(cell.state, "me").owner_bytes == ()


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_are_told_apart_than_a_message_may_hold(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Those with most have rows of their own, and all others one together."""
    monkeypatch.setattr(usage, "OWNERS_TOLD", most)
    cell = make_cell(pages=64)
    for kind in (1, 2, 3):
        cell.serve([kind] * 8 * kind, max_tokens=1, salt=str(kind), quota=CacheQuota(owner=f"owner-{kind}"))
    for kind in (1, 2, 3):
        for _ in range(kind):
            cell.submit([9] * 8, tenant=f"tenant-{kind}")

    loads = {load.tenant: load.running + load.waiting for load in status(cell.state, "me").tenant_loads}
    told = {owner: row.device // PAGE_BYTES for owner, row in rows(cell).items()}

    largest = dict(list({"3": 6, "2": 4, "1": 2}.items())[:most])
    assert told == {"": 12 - sum(largest.values()), **{f"owner-{kind}": pages for kind, pages in largest.items()}}
    assert loads == {"": 6 - sum(range(4 - most, 4)), **{f"tenant-{kind}": kind for kind in range(4 - most, 4)}}
