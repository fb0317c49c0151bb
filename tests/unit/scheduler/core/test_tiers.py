"""Making room."""

from services.scheduler.core.tiers import can_make_room


def test_a_reserve_is_kept_free_ahead_of_need(make_cell):
    """With a host tier, eviction starts before anybody waits for pages."""
    cell = make_cell(pages=40, host_pages=100, reserve_fraction=0.25)
    for number in range(6):
        cell.submit([number] * 36, max_tokens=1)
        cell.drain()

    assert cell.state.workers["worker-0"].pool.free >= 10


def test_without_a_host_tier_nothing_is_evicted_ahead(make_cell):
    """Dropping takes no time, so the cache stays full."""
    cell = make_cell(pages=40, reserve_fraction=0.25)
    for number in range(6):
        cell.submit([number] * 36, max_tokens=1)
        cell.drain()

    assert cell.state.workers["worker-0"].pool.free < 10


def test_the_front_of_a_long_node_outlives_its_end(make_cell):
    """Only as much as is needed is evicted, from the end."""
    cell = make_cell(page_size=1, pages=2000)
    cell.submit(list(range(1900)), max_tokens=1)
    cell.drain()
    cell.submit([5000] * 150, max_tokens=1)
    cell.drain()

    cell.submit(list(range(1900)), max_tokens=1)

    assert cell.admitted[-1].cached_tokens == 1900 - 256


def test_pages_in_use_cannot_make_room(make_cell):
    """What running requests share or own does not count."""
    cell = make_cell(pages=20)
    cell.submit([1] * 40, max_tokens=20, ignore_eos=True)
    for _ in range(2):
        cell.round()
    worker = cell.state.workers["worker-0"]

    assert worker.pool.cached == worker.pool.locked == 10
    assert can_make_room(worker, worker.pool.free)
    assert not can_make_room(worker, worker.pool.free + 1)
