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
from bench.papers.hcache_platform import Platform, pipelined_us
from services.scheduler.core.cache.eviction import make_policy
from services.scheduler.core.hidden.partition import (
    LayerCosts,
    Partition,
    kv_only,
    layer_times,
    made,
    tokens_only,
    worth_storing,
)
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
FLOP_PER_MULTIPLY_ADD = 2.0

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
    """Restores what is kept of a context by one method: what is missing, in the form in which it was stored."""

    def __init__(self, platform: Platform, method: str) -> None:
        self._costs = _layer_costs(platform)
        self._bytes_per_us = BLOCK_TOKENS / platform.read_us(1.0, BLOCK_TOKENS)
        self._stored = self._kept(method)
        self._known: dict[tuple[int, int], float] = {}

    def _kept(self, method: str) -> Partition:
        """Numbers of layers by the form in which they are kept; those from tokens are not."""
        times = layer_times(self._costs, MEAN_TOKENS, self._bytes_per_us)
        if method == "tokens":
            return tokens_only(self._costs.layers, times)
        if method == "kv":
            return kv_only(self._costs.layers, times)
        return worth_storing(self._costs, tokens=MEAN_TOKENS, bytes_per_us=self._bytes_per_us).partition

    def restore_us(self, held: int, length: int) -> float:
        """For a context of which the first ``held`` tokens are on the device. KV offload computes nothing."""
        if (held, length) not in self._known:
            self._known[held, length] = self._restore_us(held, length)
        return self._known[held, length]

    def _restore_us(self, held: int, length: int) -> float:
        """The fastest number of first layers from tokens, at least those that were not kept; the rest as kept."""
        times = layer_times(self._costs, length - held, self._bytes_per_us, context=held)
        stored, layers = self._stored, self._costs.layers
        if stored.kv == layers:
            return layers * times.io_kv
        ways = (
            made(times, tokens=tokens, hidden=max(0, layers - stored.kv - tokens), kv=min(stored.kv, layers - tokens))
            for tokens in range(stored.tokens, layers + 1)
        )
        return min(pipelined_us(way, times, ends_early=True) for way in ways)


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
