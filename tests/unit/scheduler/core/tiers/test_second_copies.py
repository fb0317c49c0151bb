"""What another node has too: which copies may leave then, when a loan is taken, and what is copied to be lent."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.cache.residency import is_host_evictable
from services.scheduler.core.speed_fit import SpeedFit
from shared.messages.cell_events import FlushCache
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, nodes_of
from tests.unit.scheduler.core.fetching import CHUNK, host_tokens, prompt
from tests.unit.scheduler.core.sharing_nodes import KEY, A, B, two_nodes


def last_that_both_have(make_cell: MakeCell, key_id: str = "") -> tuple[CellModel, Node]:
    """Both nodes have the front of a prompt in host memory and on no device, and the second what follows it, too."""
    cell = two_nodes(make_cell, pages_of_b=60, key_id=key_id)
    cell.lose_worker("worker-a")
    cell.serve(prompt(6), max_tokens=1, key_id=key_id)
    cell.lose_worker("worker-b")
    cell.drain()
    node = [node for node in nodes_of(cell, prompt(6)) if A in node.host][-1]
    assert (node.host, bool(node.children), bool(node.device)) == ((A, B), True, False)
    return cell, node


def test_a_copy_leaves_that_another_node_has_with_what_follows(make_cell: MakeCell) -> None:
    """Only the one that nothing hangs on in its own pool: the other's end would be behind a gap."""
    cell, node = last_that_both_have(make_cell)

    assert is_host_evictable(cell.state, node, A)
    assert not is_host_evictable(cell.state, node, B)


def test_a_flush_frees_what_another_node_has_too(make_cell: MakeCell) -> None:
    """Before, an inner node's copy stayed as long as any node had what follows it."""
    cell, _ = last_that_both_have(make_cell)

    cell.feed(FlushCache(call_id="one", tiers=("host",)))
    cell.drain()

    assert [pool.cached for storage in cell.state.storages.values() if (pool := storage.pool)] == [0, 0]


def test_a_sole_copy_stays_while_something_follows_it(make_cell: MakeCell) -> None:
    """One that failed verification is none."""
    cell, node = last_that_both_have(make_cell)
    node.set_rare(quarantined=(B,))

    assert not is_host_evictable(cell.state, node, A)


def test_what_is_never_lent_keeps_its_copies(make_cell: MakeCell) -> None:
    """KV of a caller with a key of its own: each node has computed it for itself."""
    cell, node = last_that_both_have(make_cell, KEY)

    assert not is_host_evictable(cell.state, node, A)


def test_copies_of_what_a_device_has_leave_from_the_end(make_cell: MakeCell) -> None:
    """Where nodes share: nothing could be lent behind a gap."""
    cell = two_nodes(make_cell)
    cell.serve(prompt(6), max_tokens=1)
    front, *_, end = nodes_of(cell, prompt(6))

    assert front.device == end.device == ("worker-a",)
    assert front.host == end.host == (A,)
    assert is_host_evictable(cell.state, end, A)
    assert not is_host_evictable(cell.state, front, A)


@contextmanager
def busy(cell: CellModel, worker_id: str) -> Iterator[None]:
    """Meanwhile this worker is by far the slowest, so that no request is placed there."""
    worker = cell.state.workers[worker_id]
    before, worker.speed = worker.speed, SpeedFit(reports=1, flat=1e9)
    yield
    worker.speed = before


def test_what_was_computed_elsewhere_meanwhile_is_borrowed(make_cell: MakeCell) -> None:
    """When the request was queued, nobody had it."""
    cell = two_nodes(make_cell, max_running=1)
    cell.submit(prompt(1, kind=96), max_tokens=3, ignore_eos=True)
    with busy(cell, "worker-a"):
        cell.submit(prompt(1, kind=97), max_tokens=60, ignore_eos=True)
        waiting = cell.submit(prompt(3, kind=5), max_tokens=1)
    with busy(cell, "worker-b"):
        cell.submit(prompt(3, kind=5), max_tokens=1)
        cell.submit(prompt(1, kind=98), max_tokens=200, ignore_eos=True)
    cell.drain()

    (admitted,) = [order for order in cell.admitted if order.request_id == waiting]
    assert admitted.lent_tokens == 3 * CHUNK


def test_what_only_a_device_has_is_copied_to_be_lent(make_cell: MakeCell) -> None:
    """By the node that has it, for who waits on another."""
    cell = two_nodes(make_cell, max_running=1)
    cell.feed(FlushCache(call_id="one", tiers=("host",)))
    cell.submit(prompt(1, kind=96), max_tokens=200, ignore_eos=True)
    with busy(cell, "worker-a"):
        cell.submit(prompt(1, kind=97), max_tokens=20, ignore_eos=True)
        waiting = cell.submit(prompt(3), max_tokens=1)
    assert host_tokens(cell, prompt(3), A) == 0
    cell.drain()

    assert cell.state.counters["copies_to_lend"] == 1
    (admitted,) = [order for order in cell.admitted if order.request_id == waiting]
    assert admitted.lent_tokens == 3 * CHUNK
