"""What tests of the core look at cells with, and the type of the fixtures that make cells."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

from services.scheduler.core.cache.page_pool import PagePool
from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import Node
from shared.messages.base import pack_int32
from shared.messages.worker_plans import PageLoad, RunBatch
from tests.present import present
from tests.stateful.cell_model import CellModel, namespace

Order = TypeVar("Order")

MakeCell = Callable[..., CellModel]
"""A cell with these settings, of its configuration and of its members."""


def orders(outputs: Iterable[object], kind: type[Order] | tuple[type[Order], ...]) -> list[Order]:
    """Orders of one kind, or words to gateways, among outputs."""
    found = [getattr(output, "order", getattr(output, "word", None)) for output in outputs]
    return [order for order in found if isinstance(order, kind)]


def orders_of(cell: CellModel, kind: type[Order] | tuple[type[Order], ...], *, since: int = 0) -> list[Order]:
    """The same among all outputs of a cell so far, from those of an input on."""
    return orders(chain.from_iterable(cell.outputs[since:]), kind)


def loads_of(cell: CellModel) -> list[PageLoad]:
    """Every load of pages ordered so far."""
    return [load for order in orders_of(cell, RunBatch) for load in order.loads]


def host_pool(cell: CellModel) -> PagePool:
    """The core's pool of host pages."""
    return present(cell.state.storages["storage"].pool)


def path_of(cell: CellModel, tokens: Sequence[int], salt: str = "") -> list[tuple[Node, int]]:
    """What the tree knows of these tokens, top first: nodes, each with the pages of it that match."""
    return match_prefix(cell.state.tree, namespace(salt), pack_int32(tokens), len(tokens))


def nodes_of(cell: CellModel, tokens: Sequence[int], salt: str = "") -> list[Node]:
    """The nodes of these tokens, top first."""
    return [node for node, _ in path_of(cell, tokens, salt)]


def set_heat(cell: CellModel, tokens: Sequence[int], frequency: int, clock: int) -> None:
    """Say how often and how lately the prefix of these tokens was used, whatever really happened."""
    nodes = nodes_of(cell, tokens)
    assert nodes, "nothing is known of these tokens"
    for node in nodes:
        assert cell.state.hotness.put(node.digest, frequency, clock, 1)


def timer_of(cell: CellModel, kind: str) -> str:
    """The one pending timer whose name begins so."""
    (timer,) = [name for name in cell.timers if name.startswith(kind)]
    return timer


def worker_goes_on(cell: CellModel, name: str = "worker-0") -> bool:
    """A worker does what comes next of what it was sent, and is heard; returns whether there was anything."""
    worker = cell.workers[name]
    has_moved = worker.step()
    while cell.deliver(worker):
        has_moved = True
    return has_moved


def worker_runs(cell: CellModel, name: str = "worker-0") -> None:
    """A worker does everything that it can and is heard; the storage does nothing."""
    while worker_goes_on(cell, name):
        pass
