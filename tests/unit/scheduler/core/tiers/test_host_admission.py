"""Admission to host memory."""

import pytest

from services.scheduler.core.step import Step
from services.scheduler.core.tiers import host_admission
from services.scheduler.core.tiers.host_admission import take_host_pages
from shared.errors import InvariantViolated
from shared.messages.storage_plans import BackupPages
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of, set_heat

A, B, C, D = ([number] * 40 for number in (1, 2, 3, 4))


def run(cell: CellModel, *prompts: list[int]) -> None:
    """Let these prompts be answered, one after another."""
    for prompt in prompts:
        cell.serve(prompt, max_tokens=1)


def backed_up(cell: CellModel) -> int:
    """Pages that were ordered to be backed up."""
    return sum(len(order.host_pages) // 4 for order in orders_of(cell, BackupPages))


def in_host(cell: CellModel) -> list[int]:
    """First tokens of what is in host memory."""
    nodes = [node for node in cell.state.tree.nodes.values() if node.host]
    return sorted({node.tokens[0] for node in nodes})


def test_a_seldom_used_node_is_dropped_at_once(make_cell: MakeCell) -> None:
    """Below the frequency threshold nothing is transferred and nobody waits."""
    cell = make_cell(pages=12, host_pages=60, admission="selective", admission_frequency=2)
    run(cell, A)
    set_heat(cell, A, 1, 255)
    cell.submit(B, max_tokens=1, request_id="next")

    assert cell.admitted[-1].request_id == "next"
    assert backed_up(cell) == 0
    assert cell.state.counters["host_refused_frequency_pages"] == cell.state.counters["evicted_pages_device"] == 10


def test_an_often_used_node_is_backed_up(make_cell: MakeCell) -> None:
    """At the threshold it is admitted; while the pool has room, that is all that is asked."""
    cell = make_cell(pages=12, host_pages=60, admission="selective", admission_frequency=2)
    run(cell, A)
    set_heat(cell, A, 2, 0)
    run(cell, B)

    assert backed_up(cell) == cell.state.counters["host_admitted_pages"] == 10
    assert in_host(cell) == [1]


@pytest.mark.parametrize(("frequency", "is_admitted"), [(2, False), (3, True), (4, True)])
def test_a_full_pool_takes_a_node_no_colder_than_what_must_leave(
    make_cell: MakeCell, frequency: int, is_admitted: bool
) -> None:
    """Figure 5: the newcomer is compared with the coldest copies that make up its room."""
    cell = make_cell(pages=12, host_pages=10, admission="selective", admission_frequency=1)
    run(cell, A)
    set_heat(cell, A, 3, 100)
    run(cell, B)
    set_heat(cell, A, 3, 100)
    set_heat(cell, B, frequency, 100)
    run(cell, C)

    assert in_host(cell) == ([2] if is_admitted else [1])
    assert cell.state.counters.get("host_refused_hotness_pages", 0) == (0 if is_admitted else 10)
    assert cell.state.counters.get("evicted_pages_host", 0) == (10 if is_admitted else 0)


def test_every_copy_that_must_leave_is_compared(make_cell: MakeCell) -> None:
    """One copy that is hotter than the newcomer keeps all of them, the colder ones too."""
    cell = make_cell(pages=12, host_pages=10, admission="selective", admission_frequency=1)
    run(cell, [1] * 20, [2] * 20, [3] * 40)
    set_heat(cell, [1] * 20, 2, 100)
    set_heat(cell, [2] * 20, 9, 100)
    set_heat(cell, [3] * 40, 5, 100)
    run(cell, [4] * 40)

    assert in_host(cell) == [1, 2]
    assert cell.state.counters["host_refused_hotness_pages"] == 10


def test_the_coldest_copy_leaves_whatever_the_policy(make_cell: MakeCell) -> None:
    """Selective admission goes by hotness even where the host pool's policy would name another."""
    cell = make_cell(pages=12, host_pages=20, admission="selective", admission_frequency=1)
    run(cell, A)
    set_heat(cell, A, 9, 100)
    run(cell, B)
    set_heat(cell, B, 2, 100)
    run(cell, C)
    set_heat(cell, C, 5, 100)
    run(cell, D)

    assert in_host(cell) == [1, 3]


def test_a_chain_of_colder_copies_leaves_together(make_cell: MakeCell) -> None:
    """A parent that only colder copies hold back may leave behind them."""
    cell = make_cell(pages=22, host_pages=20, admission="selective", admission_frequency=1)
    run(cell, A, A + B)
    set_heat(cell, A + B, 2, 100)
    run(cell, C + D)
    assert in_host(cell) == [1, 2]
    set_heat(cell, C + D, 5, 100)
    run(cell, [5] * 80)

    assert in_host(cell) == [3]


def test_the_copy_above_a_newcomer_is_not_displaced_for_it(make_cell: MakeCell) -> None:
    """What would be unreachable without its parent's copy does not push that out."""
    cell = make_cell(pages=22, host_pages=10, admission="selective", admission_frequency=1)
    run(cell, A, C)
    set_heat(cell, A, 5, 10)
    run(cell, D)
    assert in_host(cell) == [1]
    run(cell, A + B)
    set_heat(cell, A + B, 9, 200)
    set_heat(cell, A, 1, 1)
    run(cell, C)

    assert in_host(cell) == [1]


def test_the_hotness_expression_decides(make_cell: MakeCell) -> None:
    """By clock alone, the older copy is colder however often it was used."""
    cell = make_cell(pages=12, host_pages=10, admission="selective", admission_frequency=1, hotness_expression="clock")
    run(cell, A)
    set_heat(cell, A, 200, 5)
    run(cell, B)
    set_heat(cell, A, 200, 5)
    set_heat(cell, B, 1, 6)
    run(cell, C)

    assert in_host(cell) == [2]


def test_without_admission_nothing_is_backed_up(make_cell: MakeCell) -> None:
    """ "none" is a cell that keeps KV on devices only, and evicts nothing ahead of need."""
    cell = make_cell(pages=40, host_pages=60, admission="none", reserve_fraction=0.25)
    run(cell, *([number] * 36 for number in range(6)))

    assert backed_up(cell) == 0
    assert cell.state.workers["worker-0"].pool.free < 10


def test_admission_of_all_takes_what_was_used_once(make_cell: MakeCell) -> None:
    """The default backs every eviction up, hot or not."""
    cell = make_cell(pages=12, host_pages=60, admission_frequency=99)
    run(cell, A, B)

    assert backed_up(cell) == cell.state.counters["host_admitted_pages"] == 10


def test_a_node_larger_than_the_host_pool_is_dropped(make_cell: MakeCell) -> None:
    """However hot: nothing is evicted from the host pool for what can never fit."""
    cell = make_cell(pages=12, host_pages=4, admission="selective", admission_frequency=1)
    run(cell, A)
    set_heat(cell, A, 200, 200)
    run(cell, B)

    assert in_host(cell) == []
    assert cell.state.counters["evicted_pages_device"] == 10


@pytest.mark.parametrize("policy", ["lru", "s3-fifo", "2q", "w-tinylfu"])
def test_a_policy_that_names_what_may_not_go_is_a_fault_and_no_endless_search(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Some name the same node until it is gone."""
    cell = make_cell(pages=12, host_pages=10, policy=policy, host_writes="through")
    run(cell, A)
    assert in_host(cell) == [1]
    monkeypatch.setattr(host_admission, "is_host_evictable", lambda state, node, storage_id: False)

    with pytest.raises(InvariantViolated, match="may not"):
        take_host_pages(Step(cell.state, cell.seq, cell.time_ns), cell.state.storages["storage"], 1)
