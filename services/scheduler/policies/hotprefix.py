"""HotPrefix's eviction (3.3.1, Algorithm 1): the least ``frequency + clock / length`` goes first.

Frequency and clock come from the hotness filter, so frequency is counted across evictions. The form of the
priority is a setting (section 4, ``CellConfig.eviction_expression``). The paper ranks all leaves for every round
of evictions. Here a leaf is ranked once after it was offered, and each victim still has the least priority of all
offered leaves, to the letter of the algorithm, save that the filter may mistake one prefix for another.

The difficulty is that all clocks go down together: because the clock is divided by each node's own length,
leaves change places then, and a heap in the earlier order would miss those that fell further. But leaves of one
frequency and one length keep their order (see :mod:`aging_group`), so only the first of each such group is ranked
again, and there are far fewer groups than leaves. Between two agings a priority falls only with a change of the
node, after which it is offered again, and the leaf at the top is looked up once more in case its priority rose.

One victim costs a bounded time. So where very many leaves were offered since the last one (a pool that has just become
full for the first time), a part of them is ranked for each of the next victims, those first that wait longest.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Self

from services.scheduler.core.cache.eviction.policy import Evictable, Moment, Policy, register_policy, size_of
from services.scheduler.core.cache.heat import Expression, parse
from services.scheduler.policies.aging_group import AgingGroup, Values, enter, first
from shared.errors import ConfigError
from shared.messages.cell_events import CellConfig

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node

Rank = tuple[float, int]
"""Priority, then the last use: of equal leaves the least recently used goes first."""

GroupKey = tuple[int, int, int]
"""Frequency, length and 0. Where the priority divides by the clock, aging changes the order: then 0 is replaced by
the aging at which the clock runs out.
"""


# Offered leaves that are ranked for one victim: this many, or one in so many of them where that is more.
_RANKED_AT_ONCE = 64
_BACKLOG_SHARE = 256


@register_policy
class HotPrefixPolicy(Policy):
    """HotPrefix. ``fresh`` are nodes that were offered and not ranked since, in order; the others are in ``groups``.

    ``heads`` is a heap of the groups by the rank of their first leaf; a rank there is never above the group's.
    """

    name = "hotprefix"

    expression: str = CellConfig().eviction_expression
    fresh: dict[int, bool] = {}
    values: dict[int, Values] = {}
    groups: dict[GroupKey, AgingGroup] = {}
    heads: list[tuple[Rank, GroupKey]] = []
    ages: int = 0  # How often the clocks had gone down when the groups were ranked.

    @classmethod
    def make(cls, capacity: int, config: CellConfig) -> Self:
        """Return the policy; an expression that cannot be parsed is replaced by the paper's.

        A fold must go on with any setting.
        """
        expression = config.eviction_expression
        try:
            parse(expression)
        except ConfigError:
            expression = CellConfig().eviction_expression
        return cls(capacity=capacity, expression=expression)

    def remove(self, node: Node, moment: Moment) -> None:
        """Forget the leaf; its frequency and clock stay in the hotness filter."""
        self.fresh.pop(node.id, None)
        self._forget(node.id)

    def offer(self, node: Node) -> None:
        """Queue the node to be ranked before the next victim is named."""
        self.fresh[node.id] = True

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the ranked leaf of least priority, as the hotness filter has it now."""
        priority = parse(self.expression)
        if moment.hotness.ages != self.ages:
            self._age(priority, moment.hotness.ages)
        self._rank_fresh(priority, evictable, moment)
        while self.heads or self.fresh:
            if not self.heads:
                self._rank_fresh(priority, evictable, moment)
                continue
            rank, key = heappop(self.heads)
            node_id = self._first(key)
            if node_id is None:
                continue
            known = self.values[node_id]
            now = self._rank(priority, known)
            if now != rank:
                heappush(self.heads, (now, key))
                continue
            node = evictable(node_id)
            self._forget(node_id)
            self._rank_group(priority, key)
            if node is None:
                continue
            values = _values(priority, node, moment)
            if values == (*known[:2], known[2] if known[2] > self.ages else 0, known[3]):
                return node
            self._enter(priority, node_id, values)
        return None

    def _rank_fresh(self, priority: Expression, evictable: Evictable, moment: Moment) -> None:
        """Rank the nodes offered since, or the oldest part of them where they are many."""
        for node_id in list(islice(self.fresh, max(_RANKED_AT_ONCE, len(self.fresh) // _BACKLOG_SHARE))):
            del self.fresh[node_id]
            node = evictable(node_id)
            if node is None:
                self._forget(node_id)  # It is offered again when it becomes evictable.
            else:
                self._enter(priority, node_id, _values(priority, node, moment))

    def _enter(self, priority: Expression, node_id: int, values: Values) -> None:
        """Rank a leaf by these values from now on."""
        if self.values.get(node_id) == values:
            return
        self._forget(node_id)
        self.values[node_id] = values
        key = _key(priority, values)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = AgingGroup(*key[:2])
        enter(group, node_id, values, self.values)
        if self._first(key) == node_id:
            self._rank_group(priority, key)

    def _forget(self, node_id: int) -> None:
        values = self.values.pop(node_id, None)
        if values is None:
            return
        key = _key(parse(self.expression), values)
        group = self.groups[key]
        group.size -= 1
        if not group.size:
            del self.groups[key]

    def _age(self, priority: Expression, ages: int) -> None:
        """Rank the groups again after the clocks went down.

        Look all leaves up again where the filter was replaced.
        """
        is_another_filter = ages < self.ages
        self.ages = ages
        if is_another_filter:
            self.fresh |= dict.fromkeys(self.values, True)
            self.values, self.groups = {}, {}
        self._rank_groups(priority)

    def _rank_groups(self, priority: Expression) -> None:
        self.heads = []
        for key in self.groups:
            node_id = self._first(key)
            if node_id is not None:
                self.heads.append((self._rank(priority, self.values[node_id]), key))
        heapify(self.heads)

    def _first(self, key: GroupKey) -> int | None:
        """Return the leaf of a group that goes first, or None where none is left."""
        group = self.groups.get(key)
        return None if group is None else first(group, self.ages, self.values)

    def _rank_group(self, priority: Expression, key: GroupKey) -> None:
        """Enter a group's first leaf in the heap."""
        node_id = self._first(key)
        if node_id is not None:
            heappush(self.heads, (self._rank(priority, self.values[node_id]), key))
        if len(self.heads) > 4 * len(self.groups) + 64:
            self._rank_groups(priority)

    def _rank(self, priority: Expression, values: Values) -> Rank:
        frequency, length, runs_out, last_use = values
        clock = max(0, runs_out - self.ages)
        return float(priority(clock=clock, frequency=frequency, length=length)), last_use


def _values(priority: Expression, node: Node, moment: Moment) -> Values:
    frequency, clock = moment.hotness.lookup(node.digest)
    runs_out = moment.hotness.ages + clock if clock and priority.names_clock else 0
    return frequency, size_of(node), runs_out, node.last_use


def _key(priority: Expression, values: Values) -> GroupKey:
    frequency, length, runs_out, _ = values
    return frequency, length, runs_out if priority.divides_by_clock else 0
