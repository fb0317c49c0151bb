"""Ranking of the offered nodes for eviction, by scores that change with time.

All offered nodes are scored now and then, a slice at a time, and the lowest few put in line; nodes that are offered in
between are scored alone and compared with the head of the line. So a victim costs a few microseconds on average, no
request waits for more than one slice, and a score is at most about one ranking old.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import compress
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from services.scheduler.policies.thermo.columns import ROWS, Reals, Wholes, grow, wholes
from services.scheduler.policies.thermo.rules import HALF_LIVES, ROUNDS, score, score_one

if TYPE_CHECKING:
    from services.scheduler.policies.thermo.law import Law

LINE = 16  # Nodes in line, at least.
LINE_SHARE = 64  # One node in so many is put in line on top of that.
LINE_LIMIT = 512  # Most nodes that are put in line on top.
STALE_SHARE = 64  # A ranking is made again when it is older than the pool's turnover divided by this.
SLICE = 1024  # Nodes that are scored at once; up to as many are ranked in one slice.


Entry = tuple[float, int, int]
"""A score, the id of the node that has it, and the row of its prefix."""


class Ranking(msgspec.Struct):
    """Offered nodes in parallel packed columns, a place each. ``weights`` are costs of losing a token (1: neutral).

    A node is found by the row of its prefix (see :mod:`prefixes`), which it keeps as long as it is resident: a
    dictionary by its id would take as much as all columns together.
    """

    rows: Wholes = msgspec.field(default_factory=lambda: Wholes("I"))
    ids: Wholes = msgspec.field(default_factory=lambda: Wholes("q"))
    lasts: Reals = msgspec.field(default_factory=lambda: Reals("d"))
    codes: Wholes = msgspec.field(default_factory=lambda: Wholes("q"))
    weights: Reals = msgspec.field(default_factory=lambda: Reals("d"))
    places: Wholes = wholes("I")  # By row: the node's place in the columns, counted from 1; 0 is none.
    rule: int = ROUNDS
    turnover_s: float = 1.0  # Turnover of the pool, in which the rules measure half-lives.
    line: list[Entry] = []  # Entries in line, the next victim at the end.
    fresh: list[Entry] = []  # A heap of entries offered since the line was formed.
    scored: dict[int, float] = {}  # The valid entry of each node in ``line`` or ``fresh``.
    ranked_at: float = 0.0  # When the last ranking was made, in policy seconds.
    sliced_at: int = 0  # Number of the request at the last slice.
    at: int = 0  # First place of the slice to be scored next.
    coming: list[Entry] = []  # Lowest entries of the slices scored so far, as they were then.
    memo: tuple[float, float, int, float] = (
        0.0,
        0.0,
        0,
        0.0,
    )  # Arguments now, last and code of a score, and the score.

    def offer(self, row: int, node_id: int, last: float, code: int, weight: float, now: float, law: Law) -> None:
        """Offer the node of this row for eviction, with these features. Repeats change nothing."""
        if row >= len(self.places):
            grow((self.places,), max(row + 1 - len(self.places), ROWS))
        place = self.places[row]
        if not place:
            self.rows.append(row)
            self.ids.append(node_id)
            self.lasts.append(last)
            self.codes.append(code)
            self.weights.append(weight)
            self.places[row] = len(self.rows)
        else:
            at = place - 1
            if self.lasts[at] == last and self.codes[at] == code and self.weights[at] == weight:
                return
            self.lasts[at], self.codes[at], self.weights[at] = last, code, weight
        if len(self.fresh) > LINE + _line_length(len(self.rows)):
            self._thin_out()
        if self.line:
            if self.memo[:3] != (now, last, code):  # The parts of one conversation are exposed one after another.
                self.memo = (now, last, code, score_one(self.rule, now, last, code, law, self.turnover_s))
            score = self.memo[3] * weight
            self.scored[node_id] = score
            heappush(self.fresh, (score, node_id, row))

    def follow(self, rule: int, turnover_s: float) -> None:
        """Rank by this rule from now on, with this turnover of the pool."""
        is_other = rule != self.rule or (rule in HALF_LIVES and turnover_s != self.turnover_s)
        self.rule, self.turnover_s = rule, turnover_s
        if is_other:
            self.line, self.fresh, self.scored, self.coming, self.at = [], [], {}, [], 0
            self.memo = (0.0, 0.0, 0, 0.0)

    def withdraw(self, row: int, node_id: int) -> None:
        """Withdraw the node of this row from eviction."""
        place = self.places[row] if row < len(self.places) else 0
        if not place:
            return
        self.places[row] = 0
        moved, moved_id = self.rows.pop(), self.ids.pop()
        last, code, weight = self.lasts.pop(), self.codes.pop(), self.weights.pop()
        if moved != row:
            at = place - 1
            self.rows[at], self.ids[at] = moved, moved_id
            self.lasts[at], self.codes[at], self.weights[at] = last, code, weight
            self.places[moved] = place
        self.scored.pop(node_id, None)

    def lowest(self, now: float, request: int, law: Law) -> int | None:
        """Return the id of the node with the lowest score, and withdraw it; None when none is offered."""
        if not self.rows:
            return None
        self._skip()
        is_stale = now - self.ranked_at > self.turnover_s / STALE_SHARE
        if not self.line or (is_stale and request != self.sliced_at):
            self._rank(now, request, law)
        while self.fresh and not self._is_valid(self.fresh[0]):
            heappop(self.fresh)
        source = self.line[-1]
        if self.fresh and self.fresh[0] < source:
            source = heappop(self.fresh)
        else:
            self.line.pop()
        _, node_id, row = source
        self.withdraw(row, node_id)
        return node_id

    def _is_valid(self, entry: Entry) -> bool:
        """Return whether an entry has its node's present score."""
        return self.scored.get(entry[1]) == entry[0] and self._is_offered(entry)

    def _is_offered(self, entry: Entry) -> bool:
        """Return whether an entry's node is still offered; its row may be another node's by now."""
        place = self.places[entry[2]]
        return place > 0 and self.ids[place - 1] == entry[1]

    def _skip(self) -> None:
        while self.line and not self._is_valid(self.line[-1]):
            self.line.pop()

    def _rank(self, now: float, request: int, law: Law) -> None:
        """Score one slice. The last one forms the line from the lowest of all; an earlier one only an empty line."""
        self.sliced_at = request
        offered = len(self.rows)
        if offered <= SLICE:
            self.fresh, self.at, self.coming = [], 0, []
        if self.at >= offered:
            self.at = 0
        stop = min(self.at + SLICE, offered)
        self.coming += self._lowest_between(self.at, stop, now, law)
        self.at = stop
        if stop == offered:
            self._form(_least([entry for entry in self.coming if self._is_offered(entry)], _line_length(stop)))
            self.at, self.coming, self.ranked_at = 0, [], now
        elif not self.line:
            found = sorted(entry for entry in self.coming if self._is_offered(entry))
            self._form(found[: LINE + len(found) // 8])

    def _form(self, found: list[Entry]) -> None:
        """Form the line from these entries, and keep the scores of fresh ones that are not among them."""
        kept = {node_id: score for score, node_id, _ in self.fresh if self.scored.get(node_id) == score}
        self.line = found[::-1]
        self.scored = kept | {node_id: score for score, node_id, _ in found}

    def _lowest_between(self, start: int, stop: int, now: float, law: Law) -> list[Entry]:
        span, offset = stop - start, self.ids.itemsize * start
        ids = np.frombuffer(self.ids, np.int64, span, offset)
        codes = np.frombuffer(self.codes, np.int64, span, offset)
        lasts = np.frombuffer(self.lasts, np.float64, span, offset)
        scores = score(self.rule, now, lasts, codes, law, self.turnover_s)
        scores = scores * np.frombuffer(self.weights, np.float64, span, offset)
        # Twice the even share of each slice, so that a slice with more of the lowest than others gives them.
        share = LINE + 2 * _line_length(len(self.rows)) * span // len(self.rows)
        count = min(span, share)
        # Ties at the cut are all taken into the sort, so that the order of places never decides.
        chosen = np.flatnonzero(scores <= np.partition(scores, count - 1)[count - 1])
        order = chosen[np.lexsort((ids[chosen], scores[chosen]))][:count]
        rows = np.frombuffer(self.rows, np.uint32, span, self.rows.itemsize * start)
        return list(zip(scores[order].tolist(), ids[order].tolist(), rows[order].tolist(), strict=True))

    def _thin_out(self) -> None:
        """Drop the upper half of the fresh entries: the line comes before them, and a ranking finds them again."""
        valid = sorted({entry for entry in self.fresh if self.scored.get(entry[1]) == entry[0]})
        self.fresh = valid[: len(valid) // 2]
        waiting = {node_id for _, node_id, _ in self.line}
        for _, node_id, _ in valid[len(valid) // 2 :]:
            if node_id not in waiting:
                del self.scored[node_id]


def _least(entries: list[Entry], count: int) -> list[Entry]:
    """Return the lowest ``count`` entries, in order. Most are told apart by their scores alone, without sorting."""
    if len(entries) > count:
        scores = np.array([score for score, _, _ in entries])
        kept = scores <= np.partition(scores, count - 1)[count - 1]
        entries = list(compress(entries, kept.tolist()))
    return sorted(entries)[:count]


def _line_length(nodes: int) -> int:
    return LINE + min(nodes // LINE_SHARE, LINE_LIMIT)
