"""HotPrefix's eviction (3.3.1, Algorithm 1): the least ``frequency + clock / length`` goes first.

Frequency and clock come from the hotness filter, so frequency is counted across evictions. The form of the
priority is the user's (section 4, ``CellConfig.eviction_expression``). The paper ranks all leaves for every round
of evictions. Here a leaf is ranked once after it was offered, and all are ranked again when clocks have gone down: a
priority can fall, not only rise, and because the clock is divided by each node's own length, leaves change
places when all clocks go down by the same one. A heap in the order of before would miss those that fell further.
Between two agings a priority falls only with a change of the node, after which it is offered again, and what
comes to the top is looked up once more in case it rose. So each victim has the least priority of all offered
leaves, to the letter of the algorithm, save that the filter may mistake one prefix for another.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Self

from services.scheduler.core.eviction.policy import Evictable, Moment, Policy, size_of
from services.scheduler.core.hotness.expression import Expression, parse
from services.scheduler.core.prefix_tree import Node
from shared.errors import ConfigError
from shared.messages.cell_events import CellConfig

Rank = tuple[float, int]
"""Priority, then the last use: of equal leaves the one used longest ago goes first."""

Values = tuple[int, int, int, int]
"""Frequency, clock, length and last use."""


class HotPrefixPolicy(Policy, tag="hotprefix"):
    """``fresh`` are nodes that were offered and not ranked since, in order; the others are in ``entries``."""

    expression: str = CellConfig().eviction_expression
    fresh: dict[int, bool] = {}
    values: dict[int, Values] = {}
    ranks: dict[int, Rank] = {}
    entries: list[tuple[Rank, int]] = []  # A heap; void where ``ranks`` says otherwise.
    ages: int = 0  # How often the clocks had gone down when all were ranked.

    @classmethod
    def make(cls, capacity: int, config: CellConfig) -> Self:
        """Takes the paper's expression in place of one that is none: a fold must go on whatever it is told."""
        expression = config.eviction_expression
        try:
            parse(expression)
        except ConfigError:
            expression = CellConfig().eviction_expression
        return cls(capacity=capacity, expression=expression)

    def remove(self, node: Node, moment: Moment) -> None:
        self.fresh.pop(node.id, None)
        self._forget(node.id)

    def offer(self, node: Node) -> None:
        self.fresh[node.id] = True

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        priority = parse(self.expression)
        if moment.hotness.ages != self.ages:
            self._age(priority, moment.hotness.ages)
        for node_id in self.fresh:
            node = evictable(node_id)
            if node is None:
                self._forget(node_id)  # It is offered again when it becomes evictable.
            else:
                self._enter(priority, node, _values(node, moment))
        self.fresh.clear()
        while self.entries:
            rank, node_id = heappop(self.entries)
            if self.ranks.get(node_id) != rank:
                continue
            node = evictable(node_id)
            known = self.values[node_id]
            self._forget(node_id)
            if node is None:
                continue
            values = _values(node, moment)
            if values == known:
                return node
            self._enter(priority, node, values)
        return None

    def _enter(self, priority: Expression, node: Node, values: Values) -> None:
        rank = _rank(priority, values)
        self.values[node.id] = values
        if self.ranks.get(node.id) != rank:
            self.ranks[node.id] = rank
            heappush(self.entries, (rank, node.id))
            if len(self.entries) > 2 * len(self.ranks) + 64:
                self.entries = [(latest, known) for known, latest in self.ranks.items()]
                heapify(self.entries)

    def _age(self, priority: Expression, ages: int) -> None:
        """Rank all again, by how far the clocks have gone down; of another filter than before, look all up again."""
        agings = ages - self.ages
        self.ages = ages
        if agings < 0:
            self.fresh |= dict.fromkeys(self.values, True)
            self.values, self.ranks, self.entries = {}, {}, []
            return
        for node_id, (frequency, clock, length, last_use) in self.values.items():
            values = (frequency, max(0, clock - agings), length, last_use)
            self.values[node_id] = values
            self.ranks[node_id] = _rank(priority, values)
        self.entries = [(rank, known) for known, rank in self.ranks.items()]
        heapify(self.entries)

    def _forget(self, node_id: int) -> None:
        self.values.pop(node_id, None)
        self.ranks.pop(node_id, None)


def _values(node: Node, moment: Moment) -> Values:
    frequency, clock = moment.hotness.lookup(node.digest)
    return (frequency, clock, size_of(node), node.last_use)


def _rank(priority: Expression, values: Values) -> Rank:
    frequency, clock, length, last_use = values
    return (float(priority(clock=clock, frequency=frequency, length=length)), last_use)
