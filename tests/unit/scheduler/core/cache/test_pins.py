"""Pins: what they keep, that they keep to their budget, and that they let go of it."""

from typing import Any

import pytest

from services.scheduler.core.fold.status import list_cache
from shared.messages.base import pack_int32
from shared.messages.cell_events import FlushCache, PinPrefix, StorageLost, UnpinPrefix
from shared.messages.status import ListCache, PinStatus
from tests.present import present
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, path_of, timer_of

PROMPT = [7] * 40


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell whose first prompt was pushed from the device into host memory by others."""
    cell = make_cell(pages=24, host_pages=80, policy="lru")
    for number in (7, 1, 2, 3):
        cell.serve([number] * 40, max_tokens=1)
    return cell


def pin(cell: CellModel, tokens: list[int] = PROMPT, pin_id: str = "p", ttl_ms: int = 60_000) -> PinStatus | None:
    """Pin, and return what the listing says of it."""
    cell.feed(PinPrefix(pin_id=pin_id, namespace=namespace(), tokens=pack_int32(tokens), ttl_ms=ttl_ms))
    found = [pin for pin in list_cache(cell.state, ListCache()).pins if pin.pin_id == pin_id]
    return found[0] if found else None


def host_tokens(cell: CellModel, tokens: list[int] = PROMPT) -> int:
    """How many of the tokens have a host copy."""
    return sum(pages for node, pages in path_of(cell, tokens) if node.host) * cell.state.tree.page_size


def churn(cell: CellModel, count: int = 12) -> None:
    """Enough other prompts to drive everything unpinned out of both pools."""
    for number in range(count):
        cell.serve([50 + number] * 40, max_tokens=1)


def test_a_pinned_prefix_survives_what_evicts_others(cell: CellModel) -> None:
    """Churn takes every other copy; the pinned one stays in host memory."""
    assert present(pin(cell)).held_tokens == 40

    churn(cell)

    assert host_tokens(cell) == 40
    assert host_tokens(cell, [1] * 40) == 0


def test_a_pin_ends_with_its_time(cell: CellModel) -> None:
    """After its timer the copy is an ordinary one."""
    pin(cell, ttl_ms=10)

    cell.fire(timer_of(cell, "pin."))
    churn(cell)

    assert cell.state.pins == {}
    assert host_tokens(cell) == 0


def test_a_pin_ends_by_an_order(cell: CellModel) -> None:
    """Unpinning lets go, and an unknown pin is no fault."""
    pin(cell)

    cell.feed(UnpinPrefix(pin_id="p"))
    cell.feed(UnpinPrefix(pin_id="p"))
    cell.feed(FlushCache(call_id="1", tiers=("host",)))

    assert host_tokens(cell) == 0
    assert not [name for name in cell.state.timers if name.startswith("pin.")]


def test_a_flush_spares_what_is_pinned(cell: CellModel) -> None:
    """Flushing host memory drops all but the pin."""
    pin(cell)

    cell.feed(FlushCache(call_id="1", tiers=("device", "host")))

    assert host_tokens(cell) == 40
    assert sum(len(node.host) for node in cell.state.tree.nodes.values()) == 1


def test_what_is_on_the_device_only_is_held_once_it_has_a_copy(make_cell: MakeCell) -> None:
    """A pin of a prefix that has no copy yet takes hold when the prefix leaves the device."""
    cell = make_cell(pages=24, host_pages=80, policy="lru", admission="selective")
    cell.serve(PROMPT, max_tokens=1)
    assert present(pin(cell)).held_tokens == 0

    churn(cell)

    assert host_tokens(cell) == 40
    assert list_cache(cell.state, ListCache()).pins[0].held_tokens == 40


def test_a_flush_of_the_device_spares_what_a_pin_has_no_copy_of_yet(make_cell: MakeCell) -> None:
    """The copy is made when the prefix is evicted, and held from then on; what nobody pinned is gone."""
    cell = make_cell(pages=24, host_pages=80, policy="lru", admission="selective")
    cell.submit(PROMPT, max_tokens=1)
    cell.serve([1] * 40, max_tokens=1)
    assert present(pin(cell)).held_tokens == 0

    cell.feed(FlushCache(call_id="1", tiers=("device",)))
    kept = {node.tokens for node in cell.state.tree.nodes.values() if node.device}
    churn(cell)

    assert kept == {pack_int32(PROMPT)}
    assert list_cache(cell.state, ListCache()).pins[0].held_tokens == 40


def test_a_flush_drops_from_the_device_what_a_pin_has_a_copy_of(cell: CellModel) -> None:
    """It keeps the copy, and that is what it is for."""
    cell.serve([*PROMPT, 9], max_tokens=1)
    pin(cell)

    cell.feed(FlushCache(call_id="1", tiers=("device",)))

    assert not any(node.device for node in cell.state.tree.nodes.values())
    assert host_tokens(cell) == 40


def test_pins_keep_to_their_budget(make_cell: MakeCell) -> None:
    """No more than the fraction of the pool is held; the rest of a pin waits."""
    cell = make_cell(pages=24, host_pages=40, policy="lru", pin_fraction=0.3)
    for number in (7, 1, 2, 3):
        cell.serve([number] * 40, max_tokens=1)

    first, second = pin(cell, pin_id="a"), pin(cell, [1] * 40, pin_id="b")

    assert (present(first).pages, present(second).pages) == (10, 0)
    assert cell.state.counters["pins_over_budget"] > 0


def test_a_repeated_pin_begins_anew(cell: CellModel) -> None:
    """The same id holds one prefix at a time, and pins that share nodes are counted apart."""
    pin(cell)
    pin(cell, [1] * 40)
    churn(cell)

    assert host_tokens(cell) == 0
    assert len(cell.state.pins) == 1


def test_a_pin_outlives_its_storage(cell: CellModel) -> None:
    """It holds nothing while the pool is gone, and does again when copies are made in the next one."""
    pin(cell)
    storage = cell.state.storages["storage"]

    cell.feed(StorageLost(storage_id="storage", incarnation=storage.incarnation))
    assert list_cache(cell.state, ListCache()).pins[0].held_tokens == 0
    cell.add_storage("storage", pages=80)
    cell.drain()
    cell.serve(PROMPT, max_tokens=1)
    churn(cell)

    assert host_tokens(cell) == 40


@pytest.mark.parametrize(("tokens", "ttl_ms"), [([7], 1000), (PROMPT, 0)])
def test_a_pin_that_cannot_be_is_refused_with_a_reason(cell: CellModel, tokens: list[int], ttl_ms: int) -> None:
    """Shorter than a page, or no time: it holds nothing and says why, for a while."""
    refused = pin(cell, tokens, ttl_ms=ttl_ms)

    assert refused is not None
    assert refused.refusal
    assert refused.pages == 0
    assert cell.state.counters["pins_refused"] == 1


def test_the_listing_says_what_is_where(cell: CellModel) -> None:
    """Every node once, page by page of the listing, with its tiers, its first tokens and its pins."""
    pin(cell)

    listed: list[Any] = []
    after = 0
    while True:
        part = list_cache(cell.state, ListCache(max_nodes=1, after=after))
        listed += part.nodes
        after = part.next_after
        if not after:
            break

    assert [node.id for node in listed] == sorted(node.id for node in cell.state.tree.nodes.values() if node.parent)
    (pinned,) = [node for node in listed if node.pins]
    assert (pinned.head[:4], pinned.tokens, pinned.host) == (pack_int32([7]), 40, {"storage": 10})
    assert list_cache(cell.state, ListCache(namespace="0" * 32)).nodes == ()
