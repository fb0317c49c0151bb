"""What one method alone would take for all that is not on the device: what a mix has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.planner.groups import Prefix
    from bench.planner.sources import Cell, Option
    from services.scheduler.core.hidden.partition import LayerCosts


def single_methods(
    prefix: Prefix, cells: list[Cell], costs: LayerCosts, queued: list[float]
) -> tuple[tuple[str, float], ...]:
    """(Method, microseconds) of the busiest resource, for each that can do the whole prefix."""
    first = prefix.starts[prefix.boundaries[0]]
    found = [("tokens", _busiest(queued, 0, costs.layers * costs.recompute_us(first, prefix.tokens)))]
    if len(prefix.group_of) != prefix.boundaries[-1] or any(prefix.lacking):
        return tuple(found)  # Something exists in no form.
    loads: dict[str, list[float] | None] = {"kv": list(queued), "hidden": list(queued)}
    for cell in cells:
        token_layers = prefix.before[-1][cell.group] * cell.layers.bit_count()
        for form, option in (("kv", cell.kv), ("hidden", cell.hidden)):
            loads[form] = _with(loads[form], option, token_layers)
    found += [(form, max(load)) for form, load in loads.items() if load is not None]
    return tuple(found)


def _with(loads: list[float] | None, option: Option | None, token_layers: int) -> list[float] | None:
    if not token_layers or loads is None:
        return loads
    if option is None:
        return None
    for place, us in option.us:
        loads[place] += us * token_layers
    return loads


def _busiest(queued: list[float], place: int, more: float) -> float:
    loads = list(queued)
    loads[place] += more
    return max(loads)
