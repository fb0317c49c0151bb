"""A look at a queue while a batch is formed: what it found is matched again once somebody may have cut it."""

from shared.messages.storage_plans import FetchChunks
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, path_of
from tests.unit.scheduler.core.fetching import PAGE, prompt, put_on_disk


def test_who_followed_another_may_fetch_and_cut_what_others_of_the_look_matched(make_cell: MakeCell) -> None:
    """All are looked at before the first is admitted, whose prefix was whole when it was."""
    cell = make_cell(
        page_size=PAGE,
        pages=64,
        host_pages=20,
        disk_chunks=100,
        max_running=1,
        max_batch_tokens=1000,
        schedule="lpm",
        prefetch_wait="best_effort",
        prefetch_fraction=1.0,
        host_writes="through",
        disk_writes="off",
    )
    cell.serve(prompt(7, tail=0), max_tokens=1)
    ((node, pages),) = path_of(cell, prompt(7))
    assert len(node.host_pages("storage")) == 14 * 4 == pages * 4
    cell.submit([9] * 10, request_id="busy", max_tokens=8, ignore_eos=True, write=False)
    cell.submit(prompt(7), request_id="first")
    cell.submit(prompt(5, kind=2), request_id="second")
    put_on_disk(cell, prompt(5, kind=2))
    cell.state.requests["second"].prefetch.follows = 99  # A fetch of hidden states for another, which is over.

    while cell.admitted[-1].request_id == "busy":
        cell.round()

    assert any(orders(outputs, FetchChunks) for outputs in cell.outputs)
    assert len(path_of(cell, prompt(7))) == 2
    assert cell.admitted[-1].request_id == "first"
    assert cell.admitted[-1].device_tokens == 14 * PAGE
    cell.drain()
