"""Spans of a prefix by what exists of them: those that are alike are planned as one.

A layer is restored the same way for all tokens of a group, as the paper restores a layer the same way for all of a
sequence: the products then have regular sizes (HCache 4.1.1). Groups are few, since residency sinks with depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.planner.spans import Copy, Span, all_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BOUNDARIES = 5
"""Places at which computing from tokens may begin, at the most: bounds the search. A path that sinks from the device
through host, disk and object store has four."""

MOST_GROUPS = 8
"""Groups for which forms are weighed layer by layer; any more take one form each, and only both ends are boundaries."""


@dataclass(frozen=True, slots=True)
class Group:
    """What its spans have. ``lacking``: layers of which nothing exists anywhere."""

    device: int
    copies: tuple[Copy, ...]
    lacking: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix with its spans grouped.

    ``boundaries`` are the spans before which computing from tokens may begin, first to last: where the device's part
    ends, where groups change, and where the last span that can be restored ends. ``before[i][g]``: tokens of group g
    before boundary i.
    """

    groups: list[Group]
    group_of: list[int]  # By span.
    starts: list[int]  # First token of each span, and the prefix's end.
    boundaries: list[int]
    before: list[list[int]]
    lacking: list[int]  # By boundary: layers that a span between it and the one before it lacks.

    @property
    def tokens(self) -> int:
        return self.starts[-1]


def group_spans(spans: Sequence[Span], layers: int) -> Prefix:
    """Group the spans of a prefix, top first."""
    every = all_layers(layers)
    numbers: dict[tuple[int, tuple[Copy, ...]], int] = {}
    groups: list[Group] = []
    group_of: list[int] = []
    starts = [0]
    for span in spans:
        key = (span.device, span.copies)
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(groups)
            groups.append(_group(span, every))
        group_of.append(number)
        starts.append(starts[-1] + span.tokens)
    boundaries = _boundaries(groups, group_of, every)
    before, lacking = _between(groups, group_of, starts, boundaries)
    return Prefix(groups, group_of, starts, boundaries, before, lacking)


def _group(span: Span, every: int) -> Group:
    held = span.device
    for copy in span.copies:
        held |= copy.layers
    return Group(span.device & every, span.copies, every & ~held)


def _boundaries(groups: list[Group], group_of: list[int], every: int) -> list[int]:
    """Cost of tokens per token rises with depth and that of a copy does not, so within a run of spans that are alike
    either all or none are computed; only ends of runs matter. Of many, those where a group first appears.
    """
    count = len(group_of)
    first = next((index for index in range(count) if groups[group_of[index]].device != every), count)
    last_layer = every ^ (every >> 1)
    end = next((index for index in range(first, count) if groups[group_of[index]].lacking & last_layer), count)
    changes = [index for index in range(first + 1, end) if group_of[index] != group_of[index - 1]]
    room = MOST_BOUNDARIES - 2 if len(groups) <= MOST_GROUPS else 0
    if len(changes) > room:
        seen: dict[int, int] = {}
        for index in range(first, end):
            seen.setdefault(group_of[index], index)
        changes = sorted(index for index in seen.values() if index > first)[:room]
    return list(dict.fromkeys((first, *changes, end)))


def _between(
    groups: list[Group], group_of: list[int], starts: list[int], boundaries: list[int]
) -> tuple[list[list[int]], list[int]]:
    tokens = [0] * len(groups)
    before, lacking = [], []
    index = 0
    for boundary in boundaries:
        lacked = 0
        while index < boundary:
            group = group_of[index]
            tokens[group] += starts[index + 1] - starts[index]
            lacked |= groups[group].lacking
            index += 1
        before.append(list(tokens))
        lacking.append(lacked)
    return before, lacking
