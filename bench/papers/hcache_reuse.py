"""HCache's Figure 15: contexts that stay on the device while they are asked for, and are restored when they do not.

An LRU of blocks, leaves first, as large as the KV of Llama2-7B that fits beside its weights (the paper says 48K
tokens, 2.4). Which context a request asks about is drawn with Zipf's skew. What the device lacks of it is restored by
each method; then the question is computed. The paper does not say how many contexts it draws from.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Any

from bench.blocks import BlockCache, BlockRequests
from bench.papers.hcache_platform import Platform
from bench.planner.model_shape import FLOP_PER_MULTIPLY_ADD
from bench.planner.planning import plan_restoration
from bench.planner.resources import Link, Resources
from bench.planner.spans import Copy, Span, all_layers, layer_mask
from bench.planner.timeline import timeline_us
from services.scheduler.core.cache.eviction import make_policy
from services.scheduler.core.hidden.partition import LayerCosts, worth_storing
from shared.messages.cell_events import CellConfig
from thermocline.simulate.cost import efficiency, step_s
from thermocline.simulate.workloads.lengths import around
from thermocline.testing.exact_hotness import ExactHotness

SKEWS = (0.0, 0.4, 0.8, 1.2, 1.6, 2.0)
CONTEXTS = (20, 508)  # L-Eval's sub-tasks (Table 1), and its documents.
REQUESTS = 2_000
DEVICE_TOKENS = 48_000  # 2.4
BLOCK_TOKENS = 64
QUESTION_TOKENS = 45  # Table 1
MEAN_TOKENS = 16_340  # Table 1
MOST_TOKENS = 16_384  # 6: models were extended to 16K.
SPREAD = 0.25

METHODS = ("tokens", "kv", "hcache")


def reuse(platform: Platform, seed: int) -> list[dict[str, Any]]:
    """A row for each number of contexts and each skew: hit ratio, and mean TTFT by method and without restoring."""
    rows = []
    for contexts in CONTEXTS:
        lengths = _lengths(contexts, seed)
        for skew in SKEWS:
            rows.append({"contexts": contexts, "skew": skew} | _measure(platform, lengths, skew, seed))
    return rows


def _lengths(contexts: int, seed: int) -> list[int]:
    """Whole blocks, around Table 1's mean and no longer than the models."""
    rng = Random(seed)
    drawn = (min(MOST_TOKENS, around(rng, MEAN_TOKENS, SPREAD)) for _ in range(contexts))
    return [max(1, tokens // BLOCK_TOKENS) for tokens in drawn]


def _measure(platform: Platform, lengths: list[int], skew: float, seed: int) -> dict[str, Any]:
    rng = Random(seed)
    weights = list(accumulate(1 / (rank + 1) ** skew for rank in range(len(lengths))))
    policy = make_policy("lru", DEVICE_TOKENS, CellConfig())
    cache = BlockCache(policy, DEVICE_TOKENS // BLOCK_TOKENS, ExactHotness(), block_tokens=BLOCK_TOKENS)
    asked = BlockRequests(BLOCK_TOKENS)
    for context in rng.choices(range(len(lengths)), cum_weights=weights, k=REQUESTS):
        asked.append((context, number) for number in range(lengths[context]))
    restorers = {method: _Restorer(platform, method) for method in METHODS}
    sums = dict.fromkeys((*METHODS, "ideal"), 0.0)
    hits = blocks = 0
    for request in asked.requests:
        found, count = cache.ask(request), len(request.blocks)
        hits, blocks = hits + found, blocks + count
        length = count * BLOCK_TOKENS
        question_us = step_s(platform.costs, [(length, length + QUESTION_TOKENS)], 0, 0) * 1e6
        sums["ideal"] += question_us
        for method, restorer in restorers.items():
            sums[method] += question_us + restorer.restore_us(found * BLOCK_TOKENS, length)
    ttft_ms = {method: total / REQUESTS / 1e3 for method, total in sums.items()}
    return {"hit_ratio": hits / blocks, "ttft_ms": ttft_ms}


class _Restorer:
    """Restores what is kept of a context by one method, as the planner finds best for what is missing."""

    def __init__(self, platform: Platform, method: str) -> None:
        self._costs = _layer_costs(platform)
        self._rate = platform.read_us(1.0, BLOCK_TOKENS) / BLOCK_TOKENS  # Microseconds a byte.
        self._resources = Resources(links=(Link(name="disk", bytes_per_us=1 / self._rate),), routes={"disk": ("disk",)})
        self._copies = self._kept(method)
        self._known: dict[tuple[int, int], float] = {}

    def _kept(self, method: str) -> tuple[Copy, ...]:
        layers = self._costs.layers
        if method == "tokens":
            return ()
        if method == "kv":
            return (Copy("disk", "kv", all_layers(layers)),)
        stored = worth_storing(self._costs, tokens=MEAN_TOKENS, bytes_per_us=1 / self._rate).partition
        first_kv = stored.tokens + stored.hidden
        hidden = Copy("disk", "hidden", layer_mask(stored.tokens, first_kv))
        return (hidden, Copy("disk", "kv", layer_mask(first_kv, layers))) if stored.kv else (hidden,)

    def restore_us(self, held: int, length: int) -> float:
        """For a context of which the first ``held`` tokens are on the device. KV offload computes nothing."""
        if (held, length) not in self._known:
            self._known[held, length] = self._restore_us(held, length)
        return self._known[held, length]

    def _restore_us(self, held: int, length: int) -> float:
        missing = length - held
        if not missing:
            return 0.0
        if len(self._copies) == 1 and self._copies[0].form == "kv":
            return missing * self._costs.layers * self._costs.kv_bytes * self._rate
        device = [Span(tokens=held, device=all_layers(self._costs.layers))] if held else []
        plan = plan_restoration([*device, Span(tokens=missing, copies=self._copies)], self._costs, self._resources)
        return timeline_us(plan, self._costs, self._resources, tokens=length)


def _layer_costs(platform: Platform) -> LayerCosts:
    """Costs of a token at the rows of a long restoration."""
    rows = 4096
    costs, model = platform.costs, platform.model_profile
    rate = costs.peak_flops * efficiency(costs, rows) / 1e6
    return LayerCosts(
        layers=platform.layers,
        kv_bytes=platform.kv_bytes,
        hidden_bytes=platform.hidden_bytes,
        hidden_us=platform.hidden_flop / rate,
        token_us=costs.layer_flop / platform.layers / rate,
        pair_us=2 * FLOP_PER_MULTIPLY_ADD * model.heads * model.head_dim / (costs.attention_flops / 1e6),
    )
