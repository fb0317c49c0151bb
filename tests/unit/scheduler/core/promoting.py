"""Cells in which a promotion is due, and what is to be seen of it."""

from services.scheduler.core.cache.prefix_tree import Node
from shared.messages.worker_plans import PromotePages
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import orders_of, set_heat, worker_goes_on

HOT = list(range(40))
SMALL = [99] * 4


def filled(cell: CellModel, *, hot: tuple[int, int] = (9, 200), cold: tuple[int, int] = (2, 100)) -> CellModel:
    for prompt in (HOT, *([number] * 40 for number in (101, 102, 103))):
        cell.serve(prompt, max_tokens=1)
    for number in (101, 102, 103):
        set_heat(cell, [number] * 40, *cold)
    set_heat(cell, HOT, *hot)
    assert node_of(cell, 0).host
    assert not node_of(cell, 0).device
    return cell


def node_of(cell: CellModel, token: int) -> Node:
    """The topmost node that begins with this token."""
    return next(node for node in cell.state.tree.nodes.values() if node.parent and node.tokens[0] == token)


def prefill(cell: CellModel, prompt: list[int] = SMALL) -> None:
    """Let a worker compute a small prompt, so that a promotion is due; what follows is up to the caller."""
    cell.submit(prompt, max_tokens=1)
    for _ in range(2):
        for storage in cell.storages.values():
            storage.step()
            cell.deliver(storage)
        worker_goes_on(cell)


def promotions(cell: CellModel) -> list[PromotePages]:
    """Every promotion ordered so far."""
    return orders_of(cell, PromotePages)


def on_device(cell: CellModel) -> list[int]:
    """First tokens of what is on the device."""
    return sorted({node.tokens[0] for node in cell.state.tree.nodes.values() if node.device})


def counters(cell: CellModel) -> list[int]:
    names = ("promotions_started", "promoted_pages", "promotion_evicted_pages", "promotions_failed")
    return [cell.state.counters.get(name, 0) for name in names]
