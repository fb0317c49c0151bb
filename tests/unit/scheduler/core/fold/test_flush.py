"""FlushCache."""

import pytest

from services.scheduler.core import status
from shared.messages.cell_events import FlushCache
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell with prompts of two tenants on the device and in host memory."""
    cell = make_cell(pages=24, host_pages=60)
    for number in range(4):
        cell.serve([number] * 40, max_tokens=1, salt="ab"[number % 2])
    return cell


def cached(cell: CellModel) -> dict[str, int]:
    """Cached pages by tier."""
    return {pool.tier: pool.cached for pool in status(cell.state, "x").pools}


def test_one_tier_can_be_flushed(cell: CellModel) -> None:
    """Flushing the device keeps host copies, and the other way round."""
    before = cached(cell)
    cell.feed(FlushCache(call_id="1", tiers=("device",)))
    assert cached(cell) == {"device": 0, "host": before["host"]}

    cell.feed(FlushCache(call_id="2", tiers=("host",)))
    assert cached(cell) == {"device": 0, "host": 0}
    assert cell.state.tree.nodes == {}


def test_one_namespace_can_be_flushed(cell: CellModel) -> None:
    """Other tenants keep theirs."""
    cell.feed(FlushCache(call_id="1", namespace=namespace("a")))

    assert list(cell.state.tree.roots) == [namespace("b")]
    cell.feed(FlushCache(call_id="2", namespace=namespace("unknown")))
    assert cached(cell)["device"] > 0


def test_what_is_in_use_stays(cell: CellModel) -> None:
    """A running request's prefix is not flushed."""
    cell.submit([3] * 40 + [9], max_tokens=8, salt="b", ignore_eos=True)
    cell.feed(FlushCache(call_id="1"))

    assert cached(cell)["device"] == 10
    cell.drain()
