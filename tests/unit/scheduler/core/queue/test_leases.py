"""Decode leases and preemption."""

from services.scheduler.core.step import Output
from shared.messages.worker_events import LeaseRequested, LeaseWanted
from shared.messages.worker_plans import ExtendLease, PreemptRequest
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of


def ask(
    cell: CellModel, name: str, generated: int, attempt: int = 1, others: tuple[LeaseWanted, ...] = ()
) -> list[Output]:
    """A lease request as a worker sends it."""
    worker = cell.workers["worker-0"]
    return cell.feed(
        LeaseRequested(
            worker_id="worker-0",
            incarnation=worker.incarnation,
            request_id=name,
            attempt=attempt,
            generated=generated,
            others=others,
        )
    )


def test_leases_grow_with_the_answer_up_to_a_bound(make_cell: MakeCell) -> None:
    """Each reaches twice of what is generated beyond it, and eight times the least at the most."""
    cell = make_cell(lease_tokens=4, pages=1024, page_size=4)
    cell.submit([1] * 4, max_tokens=500, request_id="a")
    (admitted,) = cell.admitted

    granted = []
    for generated in (8, 24, 72):
        (order,) = orders(ask(cell, "a", generated), ExtendLease)
        granted.append(len(order.pages) // 4)

    assert len(admitted.pages) // 4 == 1 + 2  # Twice the least.
    # Room behind 4 + generated tokens: 16, then 32 (bounded), then 32.
    assert [sum(granted[: index + 1]) + 3 for index in range(3)] == [(4 + 8 + 16) // 4, (4 + 24 + 32) // 4, 27]


def test_leases_do_not_grow_where_half_of_the_pool_is_in_use(make_cell: MakeCell) -> None:
    """What a lease holds unused must not be missing to those who run."""
    cell = make_cell(lease_tokens=4, pages=32, page_size=4)
    cell.submit([1] * 64, max_tokens=40, request_id="a")

    (order,) = orders(ask(cell, "a", 8), ExtendLease)

    assert len(order.pages) // 4 == 1  # 64 + 8 + 4 tokens, where the first lease has reached 64 + 8.


def test_one_message_asks_for_several_requests(make_cell: MakeCell) -> None:
    """All are granted; of them, what is stale gives nothing and keeps nobody from his pages."""
    cell = make_cell(lease_tokens=4)
    for name in ("a", "b"):
        cell.submit([ord(name)] * 4, max_tokens=50, request_id=name)

    others = (
        LeaseWanted(request_id="gone", attempt=1, generated=3),
        LeaseWanted(request_id="b", attempt=1, generated=4),
    )
    granted = [order.request_id for order in orders(ask(cell, "a", 4, others=others), ExtendLease)]

    assert granted == ["a", "b"]
    assert cell.state.counters["stale_inputs"] == 1


def test_a_lease_is_extended_up_to_the_longest_answer(make_cell: MakeCell) -> None:
    """Each grant reaches a lease beyond what is generated, and never beyond max_tokens."""
    cell = make_cell(lease_tokens=4)
    cell.submit([1] * 4, max_tokens=13, request_id="a")

    (first,) = orders(ask(cell, "a", 4), ExtendLease)
    (second,) = orders(ask(cell, "a", 5), ExtendLease)

    assert len(first.pages) // 4 == 1
    assert len(second.pages) // 4 == 1
    assert orders(ask(cell, "a", 6), ExtendLease) == []


def test_an_old_lease_request_is_stale(make_cell: MakeCell) -> None:
    """What was asked earlier than the last grant, or by an earlier attempt, gives nothing."""
    cell = make_cell(lease_tokens=4)
    cell.submit([1] * 4, max_tokens=50, request_id="a")

    assert len(orders(ask(cell, "a", 4), ExtendLease)) == 1
    assert orders(ask(cell, "a", 3), ExtendLease) == []
    assert orders(ask(cell, "a", 5, attempt=2), ExtendLease) == []


def test_a_worker_that_asks_again_before_it_went_on_gets_more(make_cell: MakeCell) -> None:
    """It may want more room than a lease; not answering could leave it waiting for good."""
    cell = make_cell(lease_tokens=4)
    cell.submit([1] * 4, max_tokens=50, request_id="a")

    assert len(orders(ask(cell, "a", 4), ExtendLease)) == 1
    assert len(orders(ask(cell, "a", 4), ExtendLease)) == 1


def test_a_worker_that_asks_early_gets_a_page_at_least(make_cell: MakeCell) -> None:
    """It will not ask again before it used it, so an early request must not come to nothing."""
    cell = make_cell(lease_tokens=4)
    cell.submit([1] * 4, max_tokens=50, request_id="a")

    assert len(orders(ask(cell, "a", 0), ExtendLease)) == 1


def test_the_latest_arrival_yields_its_pages(make_cell: MakeCell) -> None:
    """When nothing can be evicted, the request that came last is preempted, and starts again later."""
    cell = make_cell(pages=8, lease_tokens=4)
    for name in ("a", "b"):
        cell.submit([ord(name)] * 4, max_tokens=16, request_id=name, ignore_eos=True)
    cell.drain()

    preempted = [order.request_id for order in orders_of(cell, PreemptRequest)]
    assert preempted
    assert all(name == "b" for name in preempted)
    assert cell.gateways["gateway"].ended == {"a": "finished", "b": "finished"}
    assert cell.gateways["gateway"].attempts["b"] > 1


def test_a_preempted_request_keeps_its_place(make_cell: MakeCell) -> None:
    """It goes before requests that arrived after it."""
    cell = make_cell(pages=8, lease_tokens=4, max_running=2)
    for name in ("a", "b", "c"):
        cell.submit([ord(name)] * 4, max_tokens=16, request_id=name, ignore_eos=True)
    cell.drain()

    started = [(order.request_id, order.attempt) for order in cell.admitted]
    assert started.index(("b", 2)) < started.index(("c", 1))


def test_cached_pages_go_before_anybody_is_preempted(make_cell: MakeCell) -> None:
    """Eviction is tried first."""
    cell = make_cell(pages=12, lease_tokens=4)
    cell.serve([9] * 20, max_tokens=1)
    for name in ("a", "b"):
        cell.submit([ord(name)] * 4, max_tokens=12, request_id=name, ignore_eos=True)
    cell.drain()

    assert cell.state.counters["evicted_pages_device"] > 0
    assert "preemptions" not in cell.state.counters


def test_a_request_alone_always_finishes(make_cell: MakeCell) -> None:
    """A pool that holds exactly the longest answer is enough."""
    for page_size in (1, 4):
        cell = make_cell(pages=20 // page_size, page_size=page_size, lease_tokens=1)
        for number in range(3):
            cell.serve([number] * 8, max_tokens=12, ignore_eos=True)

        assert len(cell.gateways["gateway"].ended) == 3
