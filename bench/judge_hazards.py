"""Boosted trees that tell by age how likely a prefix is to be used again: the judges of ``bench.policy_judges``.

A judge's answer is a discrete hazard: for each age bin, the probability of being used again within the bin by what was
not used before it. Each piece of a run gives a row for every bin that it lives to, which says whether it was used
again in that one. LightGBM is fitted to the rows with the bin and whether the piece was passed by as two features more.
LightGBM itself is an argument: it is no dependency of the project.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.judge_features import FEATURES, TICK_S, Features, Floats, Ints, Pieces, Runs

Bools = NDArray[np.bool_]

BINS_PER_DOUBLING = 3
SHORTEST_TICK_S = 1.0
SHORTEST_PART = 0.02  # Of a bin, as the weight of a row whose piece was watched for less of it.
STATES = 2  # Not passed by, and passed by.
FOLDS = 5
TREES = 200  # For every judge and fold alike: none stops where its own result is best.
BOOSTING = {
    "objective": "binary",
    "learning_rate": 0.05,
    "num_leaves": 15,
    "min_data_in_leaf": 200,
    "feature_fraction": 0.7,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "lambda_l2": 5.0,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,  # Judges are trained side by side, which does not slow down so where other work wants the cores.
    "verbose": -1,
}
FIRST_TRAINING = 300  # Requests before a judge that sees nothing of the future is trained, and until it is again.
LONGEST_WAIT = 1200  # Until it is again, later on; in between half as many as there were.


@dataclass(frozen=True, slots=True)
class Rows:
    """A piece in an age bin: what the trees are fitted to."""

    piece: Ints
    age_bin: Ints
    is_passed: Bools  # Before the bin began.
    is_used: Bools  # Again, within the bin.
    weight: Floats  # The piece's share of its run, and of the bin the part that it was watched.


@dataclass(frozen=True, slots=True)
class Task:
    """What judges are trained and tried on."""

    clock: Floats  # By request, in seconds.
    runs: Runs
    pieces: Pieces
    edges: Floats  # Of the age bins, in seconds.

    @property
    def bins(self) -> int:
        return len(self.edges) - 1


def age_edges(clock: Floats) -> Floats:
    """Ages from 0 to beyond the trace's length, in geometric steps where those are longer than the clock's tick.

    They lie half a tick off its multiples, so that ages which the clock tells apart only by noise share a bin.
    """
    steps = np.diff(clock)
    ticking = steps[steps > 2 * TICK_S]
    tick = max(float(ticking.min()), SHORTEST_TICK_S) if len(ticking) else SHORTEST_TICK_S
    ticks, edges = 0, [0.0, 0.5 * tick]
    while edges[-1] <= clock[-1] - clock[0]:
        ticks = max(ticks + 1, round((ticks + 0.5) * 2 ** (1 / BINS_PER_DOUBLING) - 0.5))
        edges.append((ticks + 0.5) * tick)
    return np.array(edges)


def bin_of(edges: Floats, ages: Floats) -> Ints:
    """The age bin of each age; what is older than the last bin is in it."""
    return np.clip(np.searchsorted(edges, ages, side="right") - 1, 0, len(edges) - 2)


def rows_of(task: Task, seen: int) -> Rows:
    """The rows of the first ``seen`` requests as they stand when the next one comes. The rest has not happened."""
    pieces, clock = task.pieces, task.clock
    count = int(np.searchsorted(pieces.request, seen))
    begun = clock[pieces.request[:count]]
    times = np.append(clock, np.inf)
    is_used = pieces.next_use[:count] < seen
    age = np.where(is_used, times[pieces.next_use[:count]], clock[min(seen, len(clock) - 1)]) - begun
    last = bin_of(task.edges, age)
    part = np.clip((age - task.edges[last]) / np.diff(task.edges)[last], SHORTEST_PART, 1.0)

    piece = np.repeat(np.arange(count), last + 1)
    age_bin = np.arange(len(piece)) - np.repeat(np.cumsum(last + 1) - last - 1, last + 1)
    is_last = age_bin == last[piece]
    passed_age = (times[pieces.passed_by[:count]] - begun)[piece]
    weight = pieces.share[piece] * np.where(is_last & ~is_used[piece], part[piece], 1.0)
    return Rows(piece, age_bin, passed_age <= task.edges[age_bin], is_last & is_used[piece], weight)


def columns_of(names: Sequence[str]) -> Ints:
    """Where these features are in ``FEATURES``."""
    return np.array([FEATURES.index(name) for name in names])


@dataclass(frozen=True, slots=True)
class Trainer:
    """How a judge of some features is made. ``lightgbm`` is the module."""

    lightgbm: Any
    task: Task
    columns: Ints
    seed: int

    def fit(self, rows: Rows, chosen: Bools) -> Any:
        """Trees for the chosen rows."""
        at = np.flatnonzero(chosen)
        matrix = self._matrix(self.task.pieces.run[rows.piece[at]], rows.age_bin[at], rows.is_passed[at])
        data = self.lightgbm.Dataset(matrix, rows.is_used[at], weight=rows.weight[at])
        return self.lightgbm.train(BOOSTING | {"seed": self.seed}, data, TREES)

    def hazards(self, trees: Any, chosen: Ints) -> Features:
        """Of these runs: by run, state and age bin."""
        bins = self.task.bins
        run = np.repeat(chosen, STATES * bins)
        state = np.tile(np.repeat(np.arange(STATES), bins), len(chosen))
        age_bin = np.tile(np.arange(bins), STATES * len(chosen))
        found = trees.predict(self._matrix(run, age_bin, state))
        return np.asarray(found, np.float32).reshape(len(chosen), STATES, bins)

    def _matrix(self, run: Ints, age_bin: Ints, is_passed: Ints | Bools) -> Features:
        features = self.task.runs.features[:, self.columns]
        return np.column_stack([features[run], age_bin.astype(np.float32), is_passed.astype(np.float32)])


def cross_validated(trainer: Trainer, fold: Ints) -> Features:
    """Hazards of all runs, each by trees that were fitted to the other folds; ``fold`` is by request."""
    task = trainer.task
    rows = rows_of(task, len(task.clock))
    fold_of_row = fold[task.pieces.request[rows.piece]]

    def judged(number: int) -> tuple[Ints, Features]:
        runs = np.flatnonzero(fold[task.runs.request] == number)
        return runs, trainer.hazards(trainer.fit(rows, fold_of_row != number), runs)

    return _side_by_side(task, judged, range(FOLDS))


def as_it_went(trainer: Trainer) -> Features:
    """Hazards of all runs, each by trees that were fitted to what had happened before its request."""
    task = trainer.task
    starts = [0, *trainings(len(task.clock)), len(task.clock)]

    def judged(number: int) -> tuple[Ints, Features]:
        begin, end = np.searchsorted(task.runs.request, starts[number : number + 2])
        runs = np.arange(begin, end)
        if not number:
            return runs, np.broadcast_to(_untrained(task.bins), (len(runs), STATES, task.bins))
        rows = rows_of(task, starts[number])
        return runs, trainer.hazards(trainer.fit(rows, np.ones(len(rows.piece), np.bool_)), runs)

    return _side_by_side(task, judged, range(len(starts) - 1))


def trainings(requests: int) -> list[int]:
    """Before which requests a judge is trained that sees nothing of the future."""
    found, at = [], FIRST_TRAINING
    while at < requests:
        found.append(at)
        at += min(max(at // 2, FIRST_TRAINING), LONGEST_WAIT)
    return found


def _untrained(bins: int) -> Features:
    """By state and bin, where nothing was learned yet: recency, and half of it for what was passed by."""
    falling = 1.0 / (2.0 + np.arange(bins))
    return np.stack([falling, falling / 2]).astype(np.float32)


def _side_by_side(task: Task, judged: Callable[[int], tuple[Ints, Features]], parts: Iterable[int]) -> Features:
    found = np.zeros((len(task.runs.request), STATES, task.bins), np.float32)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for runs, hazards in pool.map(judged, parts):
            found[runs] = hazards
    return found


def chance_of_use(hazards: Features) -> Floats:
    """By run: the probability of ever being used again, if nobody passes it by."""
    return np.asarray(1.0 - np.prod(1.0 - hazards[:, 0].astype(np.float64), axis=1))


def gittins(hazards: Features, edges: Floats) -> Features:
    """The most uses per second of occupancy that any stopping time gives, at each edge: (..., bins) to (..., edges).

    From one edge to a later one that is uses over occupancy, both summed from the far end, so that differences are
    exact where little survives. Within a bin the rate is constant. At the last edge it is that of the last bin.
    """
    chance = np.clip(hazards.astype(np.float64), 1e-7, 0.999)
    rate = -np.log1p(-chance) / np.diff(edges)
    alive = np.cumprod(1.0 - chance, axis=-1)
    alive = np.concatenate([np.ones_like(alive[..., :1]), alive], axis=-1)
    used = alive[..., :-1] * chance
    uses, occupancy = _left(used), _left(used / rate)
    best = np.empty_like(alive)
    best[..., -1] = rate[..., -1]
    for edge in range(len(edges) - 1):
        spent = occupancy[..., edge, None] - occupancy[..., edge + 1 :]
        gained = uses[..., edge, None] - uses[..., edge + 1 :]
        # Where hardly anything survives, only the rate of the bin itself can be told.
        ratio = np.max(gained / np.maximum(spent, 1e-300), axis=-1)
        best[..., edge] = np.where(alive[..., edge] > 1e-200, ratio, rate[..., edge])
    return best.astype(np.float32)


def _left(amounts: Floats) -> Floats:
    """What is left from each edge on, along the last axis: one longer than ``amounts``."""
    sums = np.cumsum(amounts[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([sums, np.zeros_like(sums[..., :1])], axis=-1)
