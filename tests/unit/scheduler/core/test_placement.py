"""Where requests go."""


def placed(cell, name):
    """The worker that a request was given to."""
    return cell.state.requests[name].worker_id


def test_a_request_goes_where_its_prefix_is(make_cell):
    """Cached tokens outweigh an equal backlog, on whichever worker they are."""
    cell = make_cell(workers=2, pages=64)
    cell.submit([9] * 40, request_id="other")
    cell.submit(list(range(40)), request_id="first")
    home = placed(cell, "first")
    assert home != placed(cell, "other")
    cell.drain()

    cell.submit([*range(40), 7], request_id="second")

    assert placed(cell, "second") == home


def test_a_long_backlog_outweighs_a_short_prefix(make_cell):
    """Waiting behind much work is worse than computing a little."""
    cell = make_cell(workers=2, pages=64)
    cell.submit([1, 2, 3, 4], request_id="first")
    assert placed(cell, "first") == "worker-0"
    cell.drain()
    cell.submit([50] * 100, request_id="long")
    assert placed(cell, "long") == "worker-0"

    cell.submit([1, 2, 3, 4, 5], request_id="second")

    assert placed(cell, "second") == "worker-1"


def test_ties_go_to_the_worker_that_joined_first(make_cell):
    """Equal estimates do not depend on names."""
    cell = make_cell(workers=0)
    cell.add_worker("z")
    cell.add_worker("a")

    cell.submit([1, 2, 3], request_id="first")

    assert placed(cell, "first") == "z"


def test_waiting_requests_move_when_a_worker_joins(make_cell):
    """A new worker takes its share of what already waits."""
    cell = make_cell(max_running=1)
    for number in range(4):
        cell.submit([number] * 8, request_id=f"r{number}")

    cell.add_worker("worker-1")

    assert [request.worker_id for request in cell.state.requests.values()].count("worker-1") >= 1
    cell.drain()


def test_host_copies_count_for_part_of_their_worth(make_cell):
    """A worker whose node has the prefix in host memory beats one that has it nowhere."""
    cell = make_cell(pages=14, host_pages=40)
    cell.submit(list(range(40)))
    cell.drain()
    for number in range(2):
        cell.submit([100 + number] * 40)
        cell.drain()
    cell.add_worker("elsewhere", node="node-2", pages=14)

    cell.submit([*range(40), 7], request_id="again")

    assert placed(cell, "again") == "worker-0"
    cell.drain()
    assert cell.admitted[-1].host_tokens > 0
