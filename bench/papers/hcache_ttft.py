"""HCache's TTFT and costs of restoring by the planner's cost model: its Figures 1, 4 and 10, and bandwidths of 6.1.3.

A request is alone (6.1.2): its context is restored, then its question is computed. Lengths are those of L-Eval's tasks
(Table 1), drawn around their averages and no longer than the models, which were extended to 16K (6). *Ideal* restores
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

from bench.papers.hcache_platform import Platform, pipelined_us
from services.scheduler.core.hidden.partition import Partition, best_two_way, kv_only, tokens_only
from thermocline.simulate.cost import chunk_attention_s, step_s
from thermocline.simulate.workloads.lengths import around

MOST_TOKENS = 16_384  # 6
REQUESTS = 200  # 6.1.2, "mixed"
SPREAD = 0.25
BALANCED_TOKENS = 4096
"""At which projection and transfer are compared (6.1.3 gives no length)."""


@dataclass(frozen=True, slots=True)
class Task:
    """Average tokens of a task (Table 1)."""

    context: float
    question: float


TASKS = {
    "Paper Assistant": Task(10_603.5, 142.7),
    "GSM-100": Task(5_451.7, 77.4),
    "QuALITY": Task(7_053.9, 92.4),
    "mixed": Task(16_340.2, 44.7),
}

METHODS = {"recomputed": tokens_only, "kv": kv_only, "hcache": best_two_way}


def ttft(platforms: dict[str, Platform], seed: int) -> list[dict[str, Any]]:
    """Figures 4 and 10: mean TTFT in ms of each task on each platform, by method."""
    rows = []
    for model, platform in platforms.items():
        for name, task in TASKS.items():
            rng = Random(f"{seed} {name}")
            drawn = [_lengths(rng, task) for _ in range(REQUESTS)]
            found: dict[str, Any] = {"model": model, "task": name, "tokens": fmean(context for context, _ in drawn)}
            found["ideal"] = fmean(_question_us(platform, *each) for each in drawn) / 1e3
            for method in METHODS:
                found[method] = (
                    fmean(
                        _restore_us(platform, method, context) + _question_us(platform, context, question)
                        for context, question in drawn
                    )
                    / 1e3
                )
            rows.append(found)
    return rows


def _lengths(rng: Random, task: Task) -> tuple[int, int]:
    context = min(MOST_TOKENS, around(rng, task.context, SPREAD))
    return context, around(rng, task.question, SPREAD)


def _question_us(platform: Platform, context: int, question: int) -> float:
    return step_s(platform.costs, [(context, context + question)], 0, 0) * 1e6


def _restore_us(platform: Platform, method: str, tokens: int) -> float:
    times = platform.times(tokens)
    partition: Partition = METHODS[method](platform.layers, times)
    return pipelined_us(partition, times)


def resources(platforms: dict[str, Platform]) -> list[dict[str, Any]]:
    """Figure 1 and section 3.2: arithmetic of recomputation over that of projection, bytes of KV over hidden states."""
    rows = []
    for model, platform in platforms.items():
        costs = platform.costs
        for tokens in (1024, 4096, MOST_TOKENS):
            attention = chunk_attention_s(costs, 0, tokens) * costs.attention_flops
            flop = costs.layer_flop * tokens + attention
            rows.append(
                {
                    "model": model,
                    "tokens": tokens,
                    "compute": flop / (platform.hidden_flop * tokens * platform.layers),
                    "formula": 6 + tokens / (4 * platform.model_profile.hidden),
                    "bytes": platform.kv_bytes / platform.hidden_bytes,
                }
            )
    return rows


def balanced(platforms: dict[str, Platform]) -> list[dict[str, Any]]:
    """Section 6.1.3: bandwidth of storage, of all devices together, that takes as long as projection does."""
    rows = []
    for model, platform in platforms.items():
        microseconds = platform.times(BALANCED_TOKENS).compute_hidden
        rows.append({"model": model, "gb_s": platform.hidden_bytes * BALANCED_TOKENS / microseconds / 1e3})
    return rows
