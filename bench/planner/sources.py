"""Which copy is read where several exist: every layer of a group gets one source for KV and one for hidden states.

Where there is a choice, layers are dealt out one by one to the source that would be done first with all that it has
been given, so that sources work at once and finish together. That is a heuristic, since how much is read in the end
depends on the plan; so each source that everything is read from if possible is tried as well, and the best plan wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.planner.groups import MOST_GROUPS, Group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.planner.resources import Resources
    from bench.planner.spans import Form
    from services.scheduler.core.hidden.partition import LayerCosts

PerTokenLayer = tuple[tuple[int, float], ...]
"""(Resource, microseconds of it) for a token at a layer; resource 0 is computing, i + 1 is link i."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way to restore a token's layer, and what it takes."""

    source: str
    us: PerTokenLayer


@dataclass(frozen=True, slots=True)
class Cell:
    """Layers of a group that have the same options; at least one."""

    group: int
    layers: int
    kv: Option | None
    hidden: Option | None


def choices_of_sources(
    groups: list[Group], tokens: list[int], costs: LayerCosts, resources: Resources
) -> Iterator[list[Cell]]:
    """Cells for each way to choose sources that is worth trying: one, where no group has a choice."""
    names = dict.fromkeys(copy.source for group in groups for copy in group.copies)
    options = {name: _options(name, costs, resources) for name in names}
    # What has no choice is dealt out first, so that the rest goes where there is room.
    with_choice = [_has_choice(group) for group in groups]
    order = sorted(range(len(groups)), key=with_choice.__getitem__)
    is_few = len(groups) <= MOST_GROUPS
    preferred = ["", *sorted(names)] if is_few and any(with_choice) else [""]
    known: list[list[Cell]] = []
    for name in preferred:
        dealer = _Dealer(options, resources, name, layer_by_layer=is_few)
        cells = [cell for number in order for cell in _cells(number, groups[number], dealer, tokens[number], options)]
        if cells not in known:
            known.append(cells)
            if is_few:
                yield cells
            else:
                yield [_without(cell, "hidden") for cell in cells]
                yield [_without(cell, "kv") for cell in cells]


def _without(cell: Cell, form: Form) -> Cell:
    """A cell of a group beyond those that are weighed has one form, where it has two."""
    if cell.group < MOST_GROUPS or cell.kv is None or cell.hidden is None:
        return cell
    if form == "kv":
        return Cell(cell.group, cell.layers, None, cell.hidden)
    return Cell(cell.group, cell.layers, cell.kv, None)


def _options(name: str, costs: LayerCosts, resources: Resources) -> dict[Form, Option]:
    route = resources.route(name)
    kv = tuple((place + 1, costs.kv_bytes / resources.links[place].bytes_per_us) for place in route)
    hidden = tuple((place + 1, costs.hidden_bytes / resources.links[place].bytes_per_us) for place in route)
    return {"kv": Option(name, kv), "hidden": Option(name, ((0, costs.hidden_us), *hidden))}


def _has_choice(group: Group) -> bool:
    held: dict[Form, int] = {"kv": group.device, "hidden": group.device}
    for copy in group.copies:
        if held[copy.form] & copy.layers & ~group.device:
            return True
        held[copy.form] |= copy.layers
    return False


class _Dealer:
    """Deals layers out to sources; remembers what each link was given."""

    def __init__(
        self,
        options: dict[str, dict[Form, Option]],
        resources: Resources,
        preferred: str,
        *,
        layer_by_layer: bool,
    ) -> None:
        self._layer_by_layer = layer_by_layer
        self._options = options
        self._preferred = preferred
        queued = [0.0, *(link.queued_us for link in resources.links)]
        self._loads: dict[Form, list[float]] = {"kv": queued, "hidden": list(queued)}

    def deal(self, group: Group, form: Form, tokens: int) -> dict[str, int]:
        """The layers of a group that each source brings in this form."""
        copies = [copy for copy in group.copies if copy.form == form]
        dealt: dict[str, int] = {}
        left = ~group.device
        if len(copies) == 1:
            dealt[copies[0].source] = copies[0].layers & left
            self._give(copies[0].source, form, tokens * dealt[copies[0].source].bit_count())
            return dealt
        for copy in copies:
            if copy.source == self._preferred:
                dealt[copy.source] = dealt.get(copy.source, 0) | (copy.layers & left)
                left &= ~copy.layers
        if not self._layer_by_layer:
            for copy in sorted(copies, key=lambda one: self._done(one.source, form, tokens)):
                dealt[copy.source] = dealt.get(copy.source, 0) | (copy.layers & left)
                left &= ~copy.layers
            return dealt
        union = 0
        for copy in copies:
            union |= copy.layers & left
        while union:
            layer = 1 << (union.bit_length() - 1)  # From the top, so that what first layers leave is shared out evenly.
            union ^= layer
            source = min(
                (copy.source for copy in copies if copy.layers & layer),
                key=lambda name: self._done(name, form, tokens),
            )
            dealt[source] = dealt.get(source, 0) | layer
            self._give(source, form, tokens)
        return dealt

    def _done(self, source: str, form: Form, token_layers: int) -> float:
        loads = self._loads[form]
        return max(loads[place] + token_layers * us for place, us in self._options[source][form].us if place)

    def _give(self, source: str, form: Form, token_layers: int) -> None:
        loads = self._loads[form]
        for place, us in self._options[source][form].us:
            loads[place] += token_layers * us


def _cells(
    number: int, group: Group, dealer: _Dealer, tokens: int, options: dict[str, dict[Form, Option]]
) -> Iterator[Cell]:
    by_kv, by_hidden = dealer.deal(group, "kv", tokens), dealer.deal(group, "hidden", tokens)
    kv_left, hidden_left = 0, 0
    for layers in by_kv.values():
        kv_left |= layers
    for layers in by_hidden.values():
        hidden_left |= layers
    for kv_source, kv_layers in by_kv.items():
        for hidden_source, hidden_layers in by_hidden.items():
            both = kv_layers & hidden_layers
            if both:
                yield Cell(number, both, options[kv_source]["kv"], options[hidden_source]["hidden"])
        if kv_layers & ~hidden_left:
            yield Cell(number, kv_layers & ~hidden_left, options[kv_source]["kv"], None)
    for hidden_source, hidden_layers in by_hidden.items():
        if hidden_layers & ~kv_left:
            yield Cell(number, hidden_layers & ~kv_left, None, options[hidden_source]["hidden"])
