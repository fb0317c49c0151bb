"""The judges of reuse: what they are told, what they are trained on, and how their answers evict."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.blocks import BlockCache, BlockRequest, BlockRequests
from bench.judge_features import FEATURES, UNKNOWN, clock_of, pieces_of, runs_of, tree_of
from bench.judge_hazards import (
    FIRST_TRAINING,
    Task,
    Trainer,
    age_edges,
    as_it_went,
    columns_of,
    cross_validated,
    gittins,
    rows_of,
    trainings,
)
from bench.policy_judges import JudgedPolicy, auc, bounds_of, folds_of, gap_closed, judged, judgement_of, main
from services.scheduler.core.cache.eviction.policy import Evictable, Moment
from services.scheduler.core.cache.prefix_tree import Node
from thermocline.testing.exact_hotness import ExactHotness

SECOND_NS = 1_000_000_000


def requests_of(*asked: tuple[float, str], answer_tokens: int = 100) -> list[BlockRequest]:
    """Requests of (second, names of blocks), each of one letter."""
    found = BlockRequests()
    for second, names in asked:
        found.append(names, time_ns=round(second * SECOND_NS), answer_tokens=answer_tokens)
    return found.requests


def conversations(count: int, seed: int = 1) -> list[BlockRequest]:
    """Requests that each begin a conversation, continue one or branch off from one, a few seconds apart."""
    rng = random.Random(seed)
    found, now = BlockRequests(), 0
    prompts: list[tuple[int, ...]] = [(0, 1)]
    for number in range(count):
        prompt = rng.choice(prompts)
        kept = rng.choice([1, len(prompt), rng.randint(1, len(prompt))])
        prompts.append((*prompt[:kept], *(10 * number + new + 2 for new in range(rng.randint(1, 4)))))
        now += rng.choice([0, 3, 3, 9])
        found.append(prompts[-1], time_ns=now * SECOND_NS, prompt_tokens=1000 + number, answer_tokens=rng.randint(1, 9))
    return found.requests


def task_of(requests: list[BlockRequest], edges: list[float] | None = None) -> Task:
    clock, runs = clock_of(requests), runs_of(requests)
    bounds = age_edges(clock) if edges is None else np.array(edges)
    return Task(clock, runs, pieces_of(requests, runs), bounds)


def told(requests: list[BlockRequest], request: int, first: int, *names: str) -> list[float]:
    """These features of the run that begins there, seconds rounded."""
    runs = runs_of(requests)
    row = np.flatnonzero((runs.request == request) & (runs.first == first))[0]
    return [round(float(runs.features[row, FEATURES.index(name)]), 3) for name in names]


def test_a_request_falls_into_runs_of_equal_past() -> None:
    """Cut where blocks were used by others, more often, or branch; its last block is a run of its own."""
    runs = runs_of(requests_of((0, "sabcd"), (5, "sxyz"), (10, "sabefgh"), (20, "sabcdij")))
    bounds = list(zip(runs.request.tolist(), runs.first.tolist(), runs.stop.tolist(), strict=True))

    assert [bound[1:] for bound in bounds if bound[0] == 0] == [(0, 4), (4, 5)]
    assert [bound[1:] for bound in bounds if bound[0] == 1] == [(0, 1), (1, 3), (3, 4)]
    assert [bound[1:] for bound in bounds if bound[0] == 2] == [(0, 1), (1, 3), (3, 6), (6, 7)]
    assert [bound[1:] for bound in bounds if bound[0] == 3] == [(0, 1), (1, 3), (3, 5), (5, 6), (6, 7)]


def test_features_say_what_was_seen_of_the_conversation() -> None:
    """Turns and gaps follow those that continued one another, not strangers that share the first block."""
    requests = requests_of((0, "sab"), (5, "sxy"), (10, "sabcd"), (40, "sabcdef"))

    assert told(requests, 1, 1, "turn", "gap", "pace", "branches", "known blocks", "new tokens") == [
        *(0, UNKNOWN, UNKNOWN),
        *(2, 1, 1024),
    ]
    assert told(requests, 3, 5, "turn", "gap", "gap before", "gap before both", "pace") == [2, 30, 10, UNKNOWN, 20]
    assert told(requests, 3, 5, "shortest gap", "longest gap", "conversation age") == [10, 30, 40]
    assert told(requests, 3, 5, "prompt tokens before", "answer tokens before", "message tokens") == [2560, 100, 924]
    assert told(requests, 3, 5, "tree requests", "tree gap", "tree age") == [2, 30, 40]


def test_features_say_what_was_seen_of_the_run() -> None:
    """Uses before this one, the last of them, and where the run lies in the prompt."""
    requests = requests_of((0, "sab"), (10, "sabcd"), (40, "sabcxyz"))

    of_run = ("uses", "use gap", "continuations", "is last block", "blocks above", "blocks below")
    assert told(requests, 2, 0, *of_run) == [2, 30, 1, 0, 0, 4]
    assert told(requests, 2, 3, *of_run) == [1, 30, 2, 0, 3, 3]
    assert told(requests, 2, 6, *of_run) == [0, UNKNOWN, 0, 1, 6, 0]


@pytest.mark.parametrize("count", [1, 2, 7, 40, 111])
def test_nothing_of_the_future_is_in_a_feature(count: int) -> None:
    """The runs of the first requests, and all that is told of them, stay what they are without the later ones."""
    requests = conversations(120)
    whole, start = runs_of(requests), runs_of(requests[:count])
    rows = len(start.request)

    assert whole.request[rows] == count
    for name in ("request", "first", "stop", "features"):
        np.testing.assert_array_equal(getattr(whole, name)[:rows], getattr(start, name))


def test_an_answer_changes_nothing_before_its_request() -> None:
    """And the same request's features alone are told of it."""
    requests = conversations(60)
    other = list(requests)
    other[30] = requests[30]._replace(answer_tokens=9999)
    differs = np.any(runs_of(requests).features != runs_of(other).features, axis=1)

    assert min(runs_of(requests).request[differs]) == 30


def test_pieces_know_their_next_use_and_who_passes_them_by() -> None:
    """A run is cut where a later request uses only its upper blocks; strangers pass nobody by."""
    requests = requests_of((0, "sabcd"), (5, "sxyz"), (10, "sabe"), (20, "sabcd"))
    pieces = pieces_of(requests, runs_of(requests))
    of_first = np.flatnonzero(pieces.request == 0)
    of_third = np.flatnonzero(pieces.request == 2)

    # By request 0: s, ab, c and d, of which the first three are one run.
    assert pieces.first[of_first].tolist() == [0, 1, 3, 4]
    assert pieces.run[of_first].tolist() == [0, 0, 0, 1]
    assert pieces.next_use[of_first].tolist() == [1, 2, 3, 3]
    assert pieces.passed_by[of_first].tolist() == [4, 4, 2, 2]
    assert pieces.share[of_first].tolist() == [0.25, 0.5, 0.25, 1.0]
    assert pieces.next_use[of_third].tolist() == [3, 3, 4]
    assert pieces.passed_by[of_third].tolist() == [4, 4, 3]


def test_rows_end_with_the_use_or_with_the_present() -> None:
    """What was used again leaves in its bin; the rest is watched until now, in part of its last bin."""
    requests = requests_of((0, "sa"), (4, "sab"), (16, "x"))
    task = task_of(requests, [0, 2, 8, 20])
    rows = rows_of(task, 2)
    where = {piece: np.flatnonzero(rows.piece == piece).tolist() for piece in range(4)}

    assert len(where[1]) == 2
    assert rows.is_used[where[1]].tolist() == [False, True]
    assert rows.weight[where[1]].tolist() == [1.0, 1.0]
    assert [rows.age_bin[where[3]].tolist(), rows.is_used[where[3]].any()] == [[0, 1, 2], False]
    assert rows.weight[where[3]][-1] == pytest.approx(4 / 12, abs=1e-4)


@pytest.mark.parametrize("seen", [5, 30, 80])
def test_rows_of_the_past_hold_nothing_of_the_future(seen: int) -> None:
    """They are those that there would be if the trace ended with the next request's arrival."""
    requests = conversations(120)
    edges = [0.0, 1.5, 4.5, 10.5, 31.5, 100.5, 1000.0]

    def weights(task: Task) -> Counter[tuple[float, ...]]:
        rows, found = rows_of(task, seen), Counter[tuple[float, ...]]()
        runs = task.pieces.run[rows.piece].tolist()
        keys = zip(runs, rows.age_bin.tolist(), rows.is_passed.tolist(), rows.is_used.tolist(), strict=True)
        for key, weight in zip(keys, rows.weight.tolist(), strict=True):
            found[key] += weight
        return found

    whole, start = weights(task_of(requests, edges)), weights(task_of(requests[: seen + 1], edges))
    assert whole.keys() == start.keys()
    assert all(whole[key] == pytest.approx(start[key]) for key in whole)


class FakeTrees:
    """Remembers the prompts that it was trained on, and those that it was asked about."""

    def __init__(self, trained: set[float]) -> None:
        self.trained = trained
        self.asked: set[float] = set()

    def predict(self, matrix: Any) -> Any:
        self.asked |= set(matrix[:, 0].tolist())
        return np.full(len(matrix), 0.25)


class FakeLightGBM:
    """In place of the module; the only feature is the prompt's length, which tells requests apart."""

    def __init__(self) -> None:
        self.made: list[FakeTrees] = []
        self._lock = threading.Lock()

    def Dataset(self, matrix: Any, labels: Any, weight: Any) -> set[float]:  # noqa: N802 - LightGBM's name
        assert len(matrix) == len(labels) == len(weight)
        return set(matrix[:, 0].tolist())

    def train(self, settings: dict[str, Any], data: set[float], rounds: int) -> FakeTrees:
        with self._lock:
            self.made.append(FakeTrees(data))
        return self.made[-1]


def trainer_of(requests: list[BlockRequest], lightgbm: FakeLightGBM) -> Trainer:
    return Trainer(lightgbm, task_of(requests), columns_of(["prompt tokens"]), seed=1)


def test_a_conversation_is_judged_by_trees_that_saw_none_of_it() -> None:
    """Nor of its branches; and every run is judged once."""
    requests, lightgbm = conversations(200), FakeLightGBM()
    trainer = trainer_of(requests, lightgbm)
    hazards = cross_validated(trainer, folds_of(requests, seed=1))
    tree_of_prompt = {float(request.prompt_tokens): tree_of(request) for request in requests}

    assert hazards.shape == (len(trainer.task.runs.request), 2, trainer.task.bins)
    assert (hazards == 0.25).all()
    for trees in lightgbm.made:
        asked = {tree_of_prompt[prompt] for prompt in trees.asked}
        assert asked
        assert not asked & {tree_of_prompt[prompt] for prompt in trees.trained}


def test_a_judge_as_it_went_was_trained_on_the_past_alone() -> None:
    """Prompts grow from request to request here. The first ones are judged by nothing learned: the hazard falls."""
    requests, lightgbm = conversations(1000), FakeLightGBM()
    trainer = trainer_of(requests, lightgbm)
    hazards = as_it_went(trainer)
    untrained = hazards[trainer.task.runs.request < FIRST_TRAINING]

    assert trainings(1000) == [300, 600, 900]
    assert len(lightgbm.made) == 3
    assert all(max(trees.trained) < min(trees.asked) for trees in lightgbm.made)
    assert (np.diff(untrained, axis=2) < 0).all()
    assert (untrained[:, 1] == untrained[:, 0] / 2).all()


def test_auc_is_the_share_of_pairs_in_order() -> None:
    """Weighted, with equal scores as half a pair."""
    rng = np.random.default_rng(1)
    scores, weights = rng.integers(0, 5, 40).astype(float), rng.integers(1, 9, 40).astype(float)
    is_positive = rng.random(40) < 0.4
    pairs = [
        (weights[i] * weights[j], (scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]))
        for i in np.flatnonzero(is_positive)
        for j in np.flatnonzero(~is_positive)
    ]

    assert auc(scores, is_positive, weights) == pytest.approx(
        sum(weight * order for weight, order in pairs) / sum(weight for weight, _ in pairs)
    )
    assert auc(np.array([1.0, 2.0, 3.0]), np.array([False, True, True]), np.ones(3)) == 1.0
    assert auc(np.zeros(2), np.array([False, True]), np.ones(2)) == 0.5
    assert auc(np.zeros(2), np.array([True, True]), np.ones(2)) == 0.5


def test_the_index_is_the_hazard_where_it_falls_and_looks_ahead_where_it_rises() -> None:
    """Per second; a constant rate is its own index at every edge."""
    edges = np.array([0.0, 1.0, 3.0, 7.0])
    rates = np.array([[0.2, 0.2, 0.2], [0.3, 0.2, 0.1], [0.1, 0.2, 0.3]])
    index = gittins((1 - np.exp(-rates * np.diff(edges))).astype(np.float32), edges)

    np.testing.assert_allclose(index[0], 0.2, rtol=1e-4)
    np.testing.assert_allclose(index[1], [0.3, 0.2, 0.1, 0.1], rtol=1e-4)
    np.testing.assert_allclose(index[2, 2:], 0.3, rtol=1e-4)
    assert 0.1 < index[2, 0] < index[2, 1] < 0.3


def hits(requests: list[BlockRequest], capacity: int, index: dict[tuple[int, int], list[list[float]]]) -> list[int]:
    """Hits of each request where runs, named by request and first block, have these indices by state; others 1."""
    task = task_of(requests, [0, 10, 100])
    table = np.ones((len(task.runs.request), 2, 3), np.float32)
    for (request, first), rows in index.items():
        table[(task.runs.request == request) & (task.runs.first == first)] = rows
    cache = BlockCache(judged(judgement_of(task, table)), capacity, ExactHotness())
    return [cache.ask(request) for request in requests]


FOREVER = 3


def constant(value: float) -> list[list[float]]:
    return [[value] * FOREVER] * 2


def test_the_leaf_of_the_least_index_goes_first() -> None:
    """The others stay, whichever was used last."""
    requests = requests_of((0, "sa"), (5, "sb"), (10, "sc"), (15, "sd"), (20, "sa"))

    assert hits(requests, 4, {(0, 1): constant(0.9), (1, 1): constant(0.3)}) == [0, 1, 1, 1, 2]
    assert hits(requests, 4, {(0, 1): constant(0.1), (1, 1): constant(0.3)}) == [0, 1, 1, 1, 1]


def test_a_leaf_is_scored_at_its_age() -> None:
    """Between two edges the index is straight: at 5 of 10 seconds it is half way, at 10 it is at the edge."""
    falling, steady = [[1.0, 0.0, 0.0]] * 2, constant(0.4)
    early = requests_of((0, "sa"), (1, "sb"), (5, "sc"), (6, "sa"))
    late = requests_of((0, "sa"), (1, "sb"), (9, "sc"), (9.5, "sa"))

    assert hits(early, 3, {(0, 1): falling, (1, 1): steady}) == [0, 1, 1, 2]
    assert hits(late, 3, {(0, 1): falling, (1, 1): steady}) == [0, 1, 1, 1]


def test_what_was_passed_by_has_an_index_of_its_own() -> None:
    """From the request on that took the other branch."""
    passed = {(0, 2): [[0.9] * FOREVER, [0.1] * FOREVER], (1, 1): constant(0.5), (2, 2): constant(0.9)}
    taken_elsewhere = requests_of((0, "sax"), (2, "sb"), (4, "say"), (6, "sc"), (8, "sb"))
    not_taken = requests_of((0, "sax"), (2, "sb"), (4, "sdy"), (6, "sc"), (8, "sb"))

    assert hits(taken_elsewhere, 5, passed) == [0, 1, 2, 1, 2]
    assert hits(not_taken, 6, passed | {(2, 1): constant(0.9)}) == [0, 1, 1, 1, 1]


def test_a_parent_is_scored_when_its_last_child_has_gone() -> None:
    """It may go for the same request, before leaves that are worth more."""
    requests = requests_of((0, "sab"), (5, "sc"), (10, "sde"), (15, "sc"), (20, "sa"))

    assert hits(requests, 4, {(0, 0): constant(0.2), (0, 2): constant(0.1), (1, 1): constant(0.5)}) == [0, 1, 1, 2, 1]


class NaivePolicy(JudgedPolicy, tag="judged, naive"):
    """Scores every leaf anew for every victim."""

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        scores = {node_id: self._scores(np.array([piece]))[0] for node_id, piece in self.leaves.items()}
        return next(filter(None, map(evictable, sorted(scores, key=lambda node_id: (scores[node_id], node_id)))), None)


@pytest.mark.parametrize("capacity", [6, 25, 100])
def test_scoring_once_a_request_evicts_the_same(capacity: int) -> None:
    """As scoring for every victim does: time stands still within a request."""
    requests = conversations(300)
    task = task_of(requests)
    table = np.random.default_rng(1).random((len(task.runs.request), 2, task.bins + 1)).astype(np.float32)
    judgement = judgement_of(task, table)
    naive = NaivePolicy(judgement=judgement, is_passed=np.zeros(len(task.pieces.run), np.bool_))
    caches = [BlockCache(policy, capacity, ExactHotness()) for policy in (judged(judgement), naive)]

    assert [caches[0].ask(request) for request in requests] == [caches[1].ask(request) for request in requests]


def test_a_gap_is_measured_from_the_best_of_the_others() -> None:
    """Neither the default policy nor what knows the future or cannot be built counts."""
    ratios = {"lru": 0.2, "gdsf": 0.25, "thermocline": 0.4, "hotprefix, exact": 0.41, "optimum": 0.45}
    bounds = bounds_of({name: {"ratio": ratio} for name, ratio in ratios.items()})

    assert bounds == {"best_other": "gdsf", "best_other_ratio": 0.25, "optimum_ratio": 0.45}
    assert gap_closed(0.35, bounds) == pytest.approx(0.5)
    assert gap_closed(0.35, None) is None


def test_without_lightgbm_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is read."""
    monkeypatch.setitem(sys.modules, "lightgbm", None)

    assert main(["--trace", str(tmp_path / "absent.jsonl")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "pip install lightgbm" in said.err
