"""The fit of the law, in slices of bounded work, so that no single request waits for it.

One round of alternating ratios from the factors in force: the base hazard by rhythm and age from exposure weighted with
the factors, then each feature's factor in turn from the reuses seen and due, then the Gittins index of each rhythm.
Between slices everything is plain bytes; the tables in force change only when all of the new ones are there.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from services.scheduler.policies.thermo.elementary import decay, exp2, log2
from services.scheduler.policies.thermo.law import (
    AGE_BINS,
    ANSWERS,
    BINS_PER_DOUBLING,
    EDGES,
    FEATURES,
    LEVELS,
    MIDDLE,
    PACES,
    PAIR_SIZE,
    PAIRS,
    RHYTHMS,
    Law,
    rounded,
    shift_of,
)

if TYPE_CHECKING:
    from services.scheduler.policies.thermo.samples import Floats, Ints

FACTOR_LIMIT = 50.0
PRIOR_EVENTS = 10.0  # Weight, in reuses, of the assumption that a feature makes no difference.
CHAIN_EVENTS = 20.0  # Weight, in reuses, of the assumption that it makes the same difference as at the age before.
MIN_EVENTS = 16
ROWS = 2048  # Samples in one slice.
PARTS = 3  # Slices that the index of a rhythm is made in.
BUDGET = 3.0  # Work between two requests: a slice counts 1, one of the index 2, and more with many samples.
UNIT_SHARE = 8  # The unit of age bins is the median age of reuse divided by this.

_LEVELS = np.arange(LEVELS).reshape(PARTS, -1)
_SLICE_BYTES = _LEVELS.shape[1] * EDGES * 4

IDLE, WATCH, BASE, EXPECT, FACTOR, INDEX = range(6)


class Fit(msgspec.Struct):
    """A fit in progress: its stage, and the results of the stages before. All tables are float64."""

    stage: int = IDLE
    at: int = 0  # How far the stage is: a row, a feature or a slice of the index.
    now: float = 0.0
    count: int = 0  # Samples that are fitted to, the first ones of the window.
    edges: bytes = b""
    # 3 x RHYTHMS x AGE_BINS: net weight that leaves in a bin, weighted time in the bin, reuses.
    steps: bytearray = msgspec.field(default_factory=bytearray)
    weights: bytearray = msgspec.field(default_factory=bytearray)  # By sample: product of factors, then reuses due.
    base: bytes = b""  # RHYTHMS x AGE_BINS.
    factors: bytes = b""
    rhythms: bytes = b""  # Rhythms that some sample has, and for each class of answers the one without a pace (uint8).
    index: bytearray = msgspec.field(default_factory=bytearray)

    def start(self, law: Law, now: float) -> bool:
        """Begin, unless a fit is in progress or too few reuses were seen; return whether one is in progress now."""
        if self.stage != IDLE:
            return True
        samples = law.samples
        samples.trim()
        _, leave, is_reused = samples.ages(0, samples.count(), now)
        if int(is_reused.sum()) < MIN_EVENTS:
            return False
        self.stage, self.at, self.now, self.count = WATCH, 0, now, samples.count()
        self.edges = _edges(leave[is_reused], float(leave.max())).tobytes()
        self.steps = bytearray(3 * 8 * RHYTHMS * AGE_BINS)
        self.factors = law.factors or np.ones((FEATURES, PACES)).tobytes()
        self.weights, self.index = bytearray(8 * self.count), bytearray()
        return True

    def advance(self, law: Law) -> None:
        """Do one slice of the fit, or a few while they are small; slices of the index that were made ahead are used."""
        left = BUDGET
        while self.stage != IDLE and left > 0:
            left -= 1 + (self.stage == INDEX) + min(2.5 * self.count / ROWS, 5.0)
            if self.stage == WATCH:
                self._watch(law)
            elif self.stage == BASE:
                self._base()
            elif self.stage == EXPECT:
                self._expect(law)
            elif self.stage == FACTOR:
                self._factor(law)
            else:
                self._index(law)

    def make_ahead(self) -> bool:
        """Make a slice of the index now that is due later, if there is one; return whether there was.

        The index follows from tables that are final by then, so it does not matter when it is made. It comes into force
        when the last of its slices is due.
        """
        if self.stage != INDEX or len(self.index) == PARTS * len(self.rhythms) * _SLICE_BYTES:
            return False
        self._make_index()
        return True

    def _watch(self, law: Law) -> None:
        """Sum up how long prefixes of each rhythm were watched at each age, weighted with their factors."""
        stop = min(self.at + ROWS, self.count)
        enter, leave, is_reused = law.samples.ages(self.at, stop, self.now)
        codes = law.samples.features(self.at, stop)
        weight = exp2((law.level(codes) - MIDDLE) / 2) if law.levels else np.ones(stop - self.at)
        np.frombuffer(self.weights)[self.at : stop] = weight
        first = (codes & (RHYTHMS - 1)) * AGE_BINS
        size = RHYTHMS * AGE_BINS
        steps = np.frombuffer(self.steps).reshape(3, size)
        for age, sign in ((leave, 1.0), (enter, -1.0)):
            age_bin, part = _place(np.frombuffer(self.edges), age)
            steps[0] += np.bincount(first + age_bin, weight * sign, size)
            steps[1] += np.bincount(first + age_bin, weight * sign * part, size)
            if sign > 0:
                steps[2] += np.bincount((first + age_bin)[is_reused], minlength=size)
        self._go_on(stop, self.count, BASE)

    def _base(self) -> None:
        leaving, parts, events = np.frombuffer(self.steps).reshape(3, RHYTHMS, AGE_BINS)
        beyond = leaving[:, ::-1].cumsum(axis=1)[:, ::-1] - leaving
        exposure = np.maximum(parts + beyond * np.diff(np.frombuffer(self.edges)), 0.0)
        self.base = _fit_base(exposure, events).tobytes()
        self._go_on(0, 0, EXPECT)

    def _expect(self, law: Law) -> None:
        """Multiply each sample's weight by the reuses due by the base hazard while it was watched."""
        stop = min(self.at + ROWS, self.count)
        enter, leave, _ = law.samples.ages(self.at, stop, self.now)
        rhythm = law.samples.features(self.at, stop) & (RHYTHMS - 1)
        edges, base = np.frombuffer(self.edges), np.frombuffer(self.base).reshape(RHYTHMS, AGE_BINS)
        total = np.zeros((RHYTHMS, AGE_BINS))
        total[:, 1:] = np.cumsum(base * np.diff(edges), axis=1)[:, :-1]
        until, until_part = _place(edges, leave)
        since, since_part = _place(edges, enter)
        due = total[rhythm, until] + base[rhythm, until] * until_part
        due -= total[rhythm, since] + base[rhythm, since] * since_part
        np.frombuffer(self.weights)[self.at : stop] *= np.maximum(due, 0.0)
        self._go_on(stop, self.count, FACTOR)
        if self.stage == FACTOR:
            self.at = 1

    def _factor(self, law: Law) -> None:
        samples = law.samples
        value = (samples.features(0, self.count) >> shift_of(self.at)) & (PACES - 1)
        end = np.frombuffer(samples.end, np.float64, self.count)
        is_reused = np.frombuffer(samples.is_reused, np.bool_, self.count) & (end <= self.now)
        expected = np.frombuffer(self.weights)
        factors = np.frombuffer(self.factors).reshape(FEATURES, PACES).copy()
        old = factors[self.at].copy()
        seen = np.bincount(value[is_reused], minlength=PACES)
        due = np.bincount(value, expected, PACES)
        new = np.clip((seen + PRIOR_EVENTS) / (due / old + PRIOR_EVENTS), 1 / FACTOR_LIMIT, FACTOR_LIMIT)
        expected *= (new / old)[value]
        factors[self.at] = new
        self.factors = rounded(factors).tobytes()
        self._go_on(self.at + 1, FEATURES, INDEX)
        if self.stage == INDEX:
            has_samples = np.bincount(samples.features(0, self.count) & (RHYTHMS - 1), minlength=RHYTHMS) > 0
            has_samples[::PACES] = True
            self.rhythms = np.flatnonzero(has_samples).astype(np.uint8).tobytes()

    def _index(self, law: Law) -> None:
        if len(self.index) == self.at * _SLICE_BYTES:
            self._make_index()
        self._go_on(self.at + 1, PARTS * len(self.rhythms), IDLE)
        if self.stage != IDLE:
            return
        rhythms = np.frombuffer(self.rhythms, np.uint8)
        # A rhythm that no sample has takes the row of the nearest one below it that has one.
        law.rows = (np.searchsorted(rhythms, np.arange(RHYTHMS), side="right") - 1).astype(np.uint8).tobytes()
        law.factors, law.edges, law.index = self.factors, self.edges, bytes(self.index)
        halves = 2 * log2(np.frombuffer(self.factors).reshape(FEATURES, PACES))
        # The first of two features is in the lower bits.
        pairs = [halves[2 * pair + 2][:, None] + halves[2 * pair + 1][None, :] for pair in range(PAIRS)]
        law.levels = rounded(np.concatenate(pairs)).reshape(PAIRS * PAIR_SIZE).tobytes()
        self.weights, self.index, self.steps, self.base = bytearray(), bytearray(), bytearray(), b""

    def _make_index(self) -> None:
        """Make the next slice of the index: a third of the levels of one rhythm."""
        place, part = divmod(len(self.index) // _SLICE_BYTES, PARTS)
        base = np.frombuffer(self.base).reshape(RHYTHMS, AGE_BINS)[self.rhythms[place]]
        table = gittins(base, np.frombuffer(self.edges), _LEVELS[part])
        self.index += table.astype(np.float32).tobytes()

    def _go_on(self, at: int, until: int, following: int) -> None:
        self.at = at
        if at >= until:
            self.stage, self.at = following, 0


def _edges(reuse_ages: Floats, oldest: float) -> Floats:
    """Return EDGES ages that grow geometrically, in a unit set by the data.

    Bins that few reuses fall into would mislead the index.
    """
    middle = len(reuse_ages) // 2
    unit = max(
        float(np.partition(reuse_ages, middle)[middle]) / UNIT_SHARE,
        oldest / 2 ** ((AGE_BINS - 2) / BINS_PER_DOUBLING),
        1e-9,
    )
    return rounded(unit * (exp2(np.arange(EDGES) / BINS_PER_DOUBLING) - 1))


def _place(edges: Floats, ages: Floats) -> tuple[Ints, Floats]:
    """Return the bin of each age, and how far into the bin it is, in seconds."""
    age_bin = np.clip(np.searchsorted(edges, ages, side="right") - 1, 0, AGE_BINS - 1)
    return age_bin, np.minimum(ages, edges[-1]) - edges[age_bin]


def _fit_base(exposure: Floats, events: Floats) -> Floats:
    """Return the hazard by rhythm and age bin: that of all prefixes, times factors by pace and by answer length."""
    first = (events.sum() + 1) / (exposure.sum() + 1e-12)
    bins = zip(events.sum(axis=0).tolist(), exposure.sum(axis=0).tolist(), strict=True)
    steps = accumulate(bins, lambda before, found: (found[0] + 1) / (found[1] + 1 / before), initial=float(first))
    pooled = np.array(list(steps)[1:])
    seen = events.reshape(ANSWERS, PACES, AGE_BINS)
    due = exposure.reshape(ANSWERS, PACES, AGE_BINS) * pooled
    by_pace = _departures(seen.sum(axis=0), due.sum(axis=0))
    by_answer = _departures(seen.sum(axis=1), (due * by_pace).sum(axis=1))
    # No request goes on from one that still runs, which says nothing about later: its class is taken for average.
    by_answer[0] = 1.0
    return np.asarray(pooled * by_pace * by_answer[:, None]).reshape(RHYTHMS, AGE_BINS)


def _departures(seen: Floats, due: Floats) -> Floats:
    """Return, by row and age bin, the ratio of reuses seen to reuses due, as far as they bear it out.

    The ratio of an age is taken for that of the next one until that has reuses of its own. So a class of prefixes whose
    reuses come late is kept before the first of them have grown so old.
    """
    ratio = (seen.sum(axis=1) + PRIOR_EVENTS / 4) / (due.sum(axis=1) + PRIOR_EVENTS / 4)
    seen, due = _smooth(seen) + CHAIN_EVENTS, _smooth(due)
    found = np.empty_like(due)
    for age_bin in range(AGE_BINS):
        ratio = seen[:, age_bin] / (due[:, age_bin] + CHAIN_EVENTS / ratio)
        found[:, age_bin] = ratio
    return found


def _smooth(values: Floats) -> Floats:
    padded = np.pad(values, ((0, 0), (2, 2)))
    count = values.shape[1]
    near = padded[:, 1 : count + 1] + padded[:, 3 : count + 3]
    far = padded[:, :count] + padded[:, 4 : count + 4]
    return np.asarray(values + 0.5 * (near + far))


_EARLIER, _LATER = np.triu_indices(EDGES, 1)
"""All pairs of an edge and a later one, ordered by the earlier of both."""
_FIRST_PAIR: Ints = np.searchsorted(_EARLIER, np.arange(AGE_BINS))


def gittins(base: Floats, edges: Floats, levels: Ints) -> Floats:
    """Return, by level of the factors and edge, the best ratio of reuses to occupancy of all stops, for one rhythm.

    ``base`` is the hazard by age bin (AGE_BINS), ``edges`` has EDGES ages, ``levels`` are numbers of levels; the result
    is len(levels) x EDGES.

    From edge i to a later edge j the ratio is (R_i - R_j) / (O_i - O_j), with R and O the reuses and the occupancy left
    from an edge on. They are summed from the far end, so that the differences are exact where survival is small.
    """
    # Tables have a row for each edge here, so that those of all pairs are put together by whole rows.
    scale = exp2((levels - MIDDLE) / 2.0)
    count = len(levels)
    width = np.diff(edges)[:, None]
    hazard = base[:, None] * scale
    due = hazard * width
    left, gone = decay(due)
    alive = np.ones((AGE_BINS, count))
    np.multiply.accumulate(left[:-1], axis=0, out=alive[1:])
    reuses, occupancy = np.zeros((EDGES, count)), np.zeros((EDGES, count))
    reuses[:AGE_BINS] = (alive * gone)[::-1].cumsum(axis=0)[::-1]
    occupancy[:AGE_BINS] = (alive * (gone / np.maximum(hazard, 1e-300)))[::-1].cumsum(axis=0)[::-1]
    spent = occupancy.take(_EARLIER, axis=0) - occupancy.take(_LATER, axis=0)
    if not spent.all():
        spent[spent == 0] = np.inf  # Nothing survives there, and nothing is gained.
    ratio = reuses.take(_EARLIER, axis=0) - reuses.take(_LATER, axis=0)
    ratio /= spent
    best = np.empty((EDGES, count))
    # Where hardly anything survives, and at the far end, only the hazard of the bin itself is known.
    best[:AGE_BINS] = np.where(alive > 1e-200, np.maximum.reduceat(ratio, _FIRST_PAIR, axis=0), hazard)
    best[AGE_BINS] = hazard[-1]
    return best.T
