"""Types of the fixtures that make cells and look at them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from tests.stateful.cell_model import CellModel

Order = TypeVar("Order")

MakeCell = Callable[..., CellModel]
"""A cell with these settings, of its configuration and of its members."""

SetHeat = Callable[[CellModel, Sequence[int], int, int], None]
"""Say how often and how lately, at which clock, the prefix of these tokens was used."""


class FindOrders(Protocol):
    """Orders of one kind among outputs."""

    def __call__(self, outputs: Iterable[object], kind: type[Order] | tuple[type[Order], ...]) -> list[Order]: ...


class FindOrdersOfCell(Protocol):
    """Orders of one kind among all outputs of a cell so far."""

    def __call__(self, cell: CellModel, kind: type[Order]) -> list[Order]: ...
