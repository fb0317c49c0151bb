"""How well the reuse of a prefix can be predicted at all, by judges that no step of a scheduler has the time for.

``bench.policy_limits`` bounds from above what better prediction could bring, with policies that know a part of the
future. This bounds it from the side of what can be known: boosted trees (LightGBM) judge each prefix by what the trace
tells when a request ends, its answer's length included, and the Gittins index of the judged hazard evicts.

* **without the answer**: what the default policy knows before a request is answered;
* **with the answer**: the same and the answer's length;
* **everything**: all that the trace tells (``bench.judge_features``), but for the time of day;
* **with the answer, as it went**: trained again and again on nothing but what had happened by then. For the first 300
  requests its hazard falls with age alone, and is half of that where a prefix was passed by.

The first three are trained on the other conversations, their future included, which no policy can be: each conversation
(all requests with the same second block) is judged by trees that saw none of its requests. An answer's length is known
when the next request comes, because the block cache knows no time between a request and its end.

Of a judge's answers to whether blocks are ever used again, those of all requests but the last fifth count, whose future
is cut off, and none of a prompt's last block, which may be a partial one.

``python -m bench.policy_judges --trace FILE [--blocks 600,2000] [--seed 1]``, with ``pip install lightgbm``
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from bench import results_file
from bench.blocks import BlockCache, BlockRequest, read_blocks, run_blocks
from bench.judge_features import FEATURES, Features, Floats, Ints, clock_of, pieces_of, runs_of, tree_of
from bench.judge_hazards import (
    FOLDS,
    TREES,
    Bools,
    Task,
    Trainer,
    age_edges,
    as_it_went,
    bin_of,
    chance_of_use,
    columns_of,
    cross_validated,
    gittins,
)
from bench.policy_hit_ratio import EXACT, OPTIMUM, OURS
from services.scheduler.core.cache.eviction.policy import Evictable, Moment, Policy, size_of
from services.scheduler.core.cache.prefix_tree import Node
from shared.errors import InvalidRequest
from thermocline.testing.exact_hotness import ExactHotness

WITHOUT_ANSWER = (
    "prompt tokens",
    "new tokens",
    "turn",
    "pace",
    "branches",
    "uses",
    "continuations",
    "is last block",
)
WITH_ANSWER = (*WITHOUT_ANSWER, "answer tokens")
LATE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge has to say of every piece of a trace at every age."""

    task: Task
    piece_at: list[list[int]]  # By request and block.
    passes: list[list[int]]  # The pieces that each request passes by.
    index: Features  # By run, state and edge of the age bins: uses per second of occupancy.

    def score(self, pieces: Ints, is_passed: Bools, now: float) -> Floats:
        """Of pieces at a time in seconds, with the index between two edges taken as straight."""
        task = self.task
        ages = now - task.clock[task.pieces.request[pieces]]
        age_bin = bin_of(task.edges, ages)
        part = np.clip((ages - task.edges[age_bin]) / np.diff(task.edges)[age_bin], 0.0, 1.0)
        run, state = task.pieces.run[pieces], is_passed.astype(np.int64)
        return np.asarray(
            (1 - part) * self.index[run, state, age_bin] + part * self.index[run, state, age_bin + 1], np.float64
        )


class JudgedPolicy(Policy, tag="judged", kw_only=True):
    """Evicts the leaf of the least score. All leaves are scored once a request, because scores change with age."""

    judgement: Judgement
    is_passed: Bools  # By piece.
    piece_of: dict[int, int] = {}  # By node id, as of the node's last use.
    leaves: dict[int, int] = {}  # Pieces of the nodes that were offered, by node id.
    request: int = -1
    ordered: list[tuple[float, int]] = []  # The leaves as they stood when they were scored, the least last.
    later: list[tuple[float, int]] = []  # A heap of those that were offered since.
    scored_for: int = -1

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        self.request = moment.requests - 1
        for piece in self.judgement.passes[self.request]:
            self.is_passed[piece] = True
        for node in path:
            self._used(node)

    def add(self, node: Node, moment: Moment) -> None:
        self.leaves.pop(node.parent, None)
        self._used(node)

    def remove(self, node: Node, moment: Moment) -> None:
        self.leaves.pop(node.id, None)
        self.piece_of.pop(node.id, None)

    def offer(self, node: Node) -> None:
        self.leaves[node.id] = self.piece_of[node.id]
        if self.scored_for == self.request:
            heappush(self.later, (float(self._scores(np.array([self.leaves[node.id]]))[0]), node.id))

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        if self.scored_for != self.request:
            self._order()
        while self.ordered or self.later:
            is_later = not self.ordered or (self.later and self.later[0] < self.ordered[-1])
            _, node_id = heappop(self.later) if is_later else self.ordered.pop()
            node = evictable(node_id) if node_id in self.leaves else None
            if node is not None:
                return node
        return None

    def _used(self, node: Node) -> None:
        self.piece_of[node.id] = self.judgement.piece_at[self.request][node.depth // size_of(node)]

    def _scores(self, pieces: Ints) -> Floats:
        now = float(self.judgement.task.clock[self.request])
        return self.judgement.score(pieces, self.is_passed[pieces], now)

    def _order(self) -> None:
        self.scored_for, self.later = self.request, []
        ids = np.fromiter(self.leaves, np.int64, len(self.leaves))
        scores = self._scores(np.fromiter(self.leaves.values(), np.int64, len(self.leaves)))
        order = np.lexsort((ids, scores))[::-1]
        self.ordered = list(zip(scores[order].tolist(), ids[order].tolist(), strict=True))


def judged(judgement: Judgement) -> JudgedPolicy:
    """A fresh policy that goes by this judgement."""
    return JudgedPolicy(judgement=judgement, is_passed=np.zeros(len(judgement.task.pieces.run), np.bool_))


def judgement_of(task: Task, index: Features) -> Judgement:
    """An index (runs, states, edges) with where each piece is and when it is passed by."""
    piece_at: list[list[int]] = [[] for _ in task.clock]
    passes: list[list[int]] = [[] for _ in range(len(task.clock) + 1)]
    pieces = task.pieces
    rows = zip(pieces.request.tolist(), (pieces.stop - pieces.first).tolist(), pieces.passed_by.tolist(), strict=True)
    for piece, (request, blocks, passed_by) in enumerate(rows):
        piece_at[request] += [piece] * blocks
        passes[passed_by].append(piece)
    return Judgement(task, piece_at, passes[:-1], index)


def auc(scores: Floats, is_positive: Bools, weights: Floats) -> float:
    """Chance that a positive scores above a negative, both drawn by weight; equal scores count half.

    It is 0.5 where there are only positives or only negatives.
    """
    _, place = np.unique(scores, return_inverse=True)
    positive = np.bincount(place, weights * is_positive)
    negative = np.bincount(place, weights * ~is_positive)
    below = np.cumsum(negative) - negative / 2
    pairs = positive.sum() * negative.sum()
    return float(np.sum(positive * below) / pairs) if pairs else 0.5


def answers(task: Task, hazards: Features) -> dict[str, float]:
    """How well a judge tells whether blocks are ever used again; of blocks as the module's docstring says."""
    pieces, never = task.pieces, len(task.clock)
    is_last = task.runs.features[pieces.run, FEATURES.index("is last block")] > 0
    counted = ~is_last & (pieces.request < never - round(never * LATE_SHARE))
    blocks = (pieces.stop - pieces.first)[counted].astype(np.float64)
    is_used = (pieces.next_use < never)[counted]
    chance = chance_of_use(hazards)[pieces.run[counted]]
    return {
        "auc": auc(chance, is_used, blocks),
        "judged_rightly": float(np.average((chance > 0.5) == is_used, weights=blocks)),
        "base_rate": float(np.average(is_used, weights=blocks)),
    }


def known_rows(requests: int, blocks: int) -> dict[str, Any]:
    """The committed results of all policies by capacity, as text; nothing where they are of another trace."""
    path = results_file.RESULTS / "policy_hit_ratio.json"
    committed = json.loads(path.read_text(encoding="utf-8"))["results"]
    is_same = (committed["requests"], committed["blocks"]) == (requests, blocks)
    rows: dict[str, Any] = committed["by_blocks"] if is_same else {}
    return rows


def bounds_of(rows: dict[str, Any]) -> dict[str, Any]:
    """The best online policy other than the default one, and the optimum, at one capacity."""
    others = {name: row["ratio"] for name, row in rows.items() if name not in (OPTIMUM, EXACT, OURS)}
    best = max(others, key=lambda name: others[name])
    return {"best_other": best, "best_other_ratio": others[best], "optimum_ratio": rows[OPTIMUM]["ratio"]}


def gap_closed(ratio: float, bounds: dict[str, Any] | None) -> float | None:
    """The part of the way from the best other policy to the optimum, if both are known and differ."""
    gap = bounds["optimum_ratio"] - bounds["best_other_ratio"] if bounds else 0.0
    return (ratio - bounds["best_other_ratio"]) / gap if bounds and gap > 0 else None


def folds_of(requests: Sequence[BlockRequest], seed: int) -> Ints:
    """The fold of each request. All requests of a conversation, with its branches, are in one."""
    trees, place = np.unique([tree_of(request) for request in requests], return_inverse=True)
    return np.asarray(np.random.default_rng(seed).permutation(len(trees))[place] % FOLDS)


@dataclass(frozen=True, slots=True)
class Judge:
    """What a judge knows, and whether it was trained on conversations that had not happened yet."""

    name: str
    features: tuple[str, ...]
    sees_future: bool = True

    def hazards(self, lightgbm: Any, task: Task, fold: Ints, seed: int) -> Features:
        """By run, state and age bin. ``lightgbm`` is the module; ``fold`` is by request."""
        trainer = Trainer(lightgbm, task, columns_of(self.features), seed)
        return cross_validated(trainer, fold) if self.sees_future else as_it_went(trainer)


JUDGES = (
    Judge("without the answer", WITHOUT_ANSWER),
    Judge("with the answer", WITH_ANSWER),
    Judge("everything", FEATURES),
    Judge("with the answer, as it went", WITH_ANSWER, sees_future=False),
)


def evict(
    requests: Sequence[BlockRequest], judgement: Judgement, capacities: Sequence[int], bounds: dict[str, Any]
) -> dict[str, Any]:
    """Hit ratios by capacity of a pool that evicts by a judgement; ``bounds`` as of :func:`bounds_of`."""
    rows = {}
    for capacity in capacities:
        found = run_blocks(BlockCache(judged(judgement), capacity, ExactHotness()), requests, late_share=LATE_SHARE)
        closed = gap_closed(found.ratio, bounds.get(str(capacity)))
        rows[str(capacity)] = {"ratio": found.ratio, "late_ratio": found.late_ratio, "gap_closed": closed}
        shown = "-" if closed is None else f"{closed:+.3f}"
        print(f"  {capacity:>7} {found.ratio:.4f} / {found.late_ratio:.4f}  gap closed {shown}", flush=True)
    return rows


def capacities_of(text: str) -> list[int]:
    """Numbers of blocks with commas between them. Raises ArgumentTypeError for anything else."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted positive numbers with commas between them")
    return sorted({int(part) for part in parts})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.policy_judges",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--blocks", type=capacities_of, default="600,2000,6000,20000,60000")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        lightgbm = importlib.import_module("lightgbm")
    except (ImportError, OSError) as fault:
        return _refuse(f"the judges are trees of LightGBM: pip install lightgbm ({fault})")
    try:
        requests = read_blocks(options.trace)
    except InvalidRequest as fault:
        return _refuse(str(fault))
    conversations = len({tree_of(request) for request in requests})
    if conversations < FOLDS:
        return _refuse(
            f"{options.trace} has {conversations} conversations, fewer than the {FOLDS} parts to judge apart"
        )

    clock, runs = clock_of(requests), runs_of(requests)
    task = Task(clock, runs, pieces_of(requests, runs), age_edges(clock))
    fold = folds_of(requests, options.seed)
    blocks = sum(len(request.blocks) for request in requests)
    known = known_rows(len(requests), blocks)
    bounds = {text: bounds_of(known[text]) for text in map(str, options.blocks) if text in known}
    results: dict[str, Any] = {
        "trace": options.trace.name,
        "requests": len(requests),
        "blocks": blocks,
        "conversations": conversations,
        "runs": len(runs.request),
        "age_bins": task.bins,
        "lightgbm": lightgbm.__version__,
        "trees": TREES,
        "bounds": bounds,
        "judges": {},
    }
    for judge in JUDGES:
        started = time.perf_counter()
        hazards = judge.hazards(lightgbm, task, fold, options.seed)
        row = answers(task, hazards)
        print(
            f"{judge.name}: AUC {row['auc']:.3f}, {row['judged_rightly']:.1%} of blocks judged rightly, "
            f"{row['base_rate']:.1%} are used again; {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        by_blocks = evict(requests, judgement_of(task, gittins(hazards, task.edges)), options.blocks, bounds)
        results["judges"][judge.name] = row | {"features": judge.features, "by_blocks": by_blocks}
    print(results_file.write("policy_judges", results, seed=options.seed))
    return 0


def _refuse(fault: str) -> int:
    print(f"policy_judges: {fault}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
