"""The systems that IMPRESS compares, as what each reads of a prefix in a layer (its 6.1 and 6.3).

``everything`` is AS-like: all K and V, read ahead in order. ``h2o_lru`` and ``h2o_lfu`` read all K ahead and, where a
layer knows what it wants, V of what any head chose. ``identification`` reads probe heads' keys ahead, and K and V of
the voted tokens; where probe heads disagree it goes the other way, but reads K only then. ``reordering`` packs tokens
by importance; ``score`` also caches by it, which is IMPRESS. ``speculation`` guesses the next layer's share
(HyperInfer).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bench.papers.impress_tiers import Policy, Tiers
from bench.papers.impress_timeline import Finished, LayerReads, timeline
from bench.papers.impress_tokens import PrefixTokens, Spreads, in_chunks
from thermocline.simulate.cost import Costs, step_s

GB = 1e9
DISK_GB_S = 5.0  # 6.1
DEVICE_BYTES, HOST_BYTES = 10 * GB, 32 * GB  # 6.1
PROBE_HEADS = 3  # 4.3
FALLBACK = 0.2
"""Of layers, that probe heads disagree in: the paper says fewer (4.3)."""

DISAGREEING_HEADS = 3
"""Whose sets are united where every head chooses for itself; more would only touch still more chunks."""

SIMULATED_LAYERS = 4
"""Layers that are drawn; the others repeat them, and caches are as much smaller."""


@dataclass(frozen=True, slots=True)
class System:
    """What is loaded, and what stays."""

    policy: Policy = "lru"
    is_lossy: bool = True
    asks_probe_heads: bool = False
    is_reordered: bool = False
    recall: float | None = None


SYSTEMS = {
    "everything": System(is_lossy=False),
    "h2o_lru": System("lru"),
    "h2o_lfu": System("lfu"),
    "identification": System("lfu", asks_probe_heads=True),
    "reordering": System("lfu", asks_probe_heads=True, is_reordered=True),
    "score": System("score", asks_probe_heads=True, is_reordered=True),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on its device: costs, and bytes of K (or V) of a token in a layer."""

    costs: Costs
    layers: int
    heads: int
    key_bytes: float
    link_rate: float


@dataclass(slots=True)
class Counted:
    """Of the requests that count."""

    ttft_s: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    way_s: float = 0.0
    chunks: int = 0
    chunks_on_device: int = 0
    disk_bytes: float = 0.0

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.ttft_s))

    @property
    def p99_s(self) -> float:
        return float(np.quantile(self.ttft_s, 0.99))


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Those of a dataset, each with its layers."""

    layers: list[list[PrefixTokens]]

    @staticmethod
    def drawn(lengths: list[int], spreads: Spreads, rng: np.random.Generator) -> Prefixes:
        return Prefixes([[PrefixTokens(n, spreads, rng) for _ in range(SIMULATED_LAYERS)] for n in lengths])


class Served:
    """One system over one dataset: ``ask`` in the order of requests."""

    def __init__(
        self, system: System, machine: Machine, prefixes: Prefixes, ratio: float, chunk_tokens: int, query: int
    ) -> None:
        self._system, self._machine, self._prefixes = system, machine, prefixes
        self._ratio, self._chunk_tokens, self._query = ratio, chunk_tokens, query
        part = SIMULATED_LAYERS / machine.layers
        self._tiers = Tiers(system.policy, DEVICE_BYTES * part, HOST_BYTES * part)
        self.counted = Counted()

    def ask(self, number: int, rng: np.random.Generator, *, counts: bool) -> None:
        """A request for a prefix; its TTFT is kept where it counts."""
        layers = self._prefixes.layers[number]
        reads = [self._layer(number, index, tokens, rng, counts) for index, tokens in enumerate(layers)]
        machine, tokens = self._machine, layers[0].tokens
        attended = round(tokens * (self._ratio if self._system.is_lossy else 1.0))
        compute_s = step_s(machine.costs, [(attended, attended + self._query)], 0, 0) / machine.layers
        all_reads = [reads[index % len(reads)] for index in range(machine.layers)]
        found = timeline(all_reads, compute_s, self._choosing_s(tokens), self._system.recall)
        if counts:
            self._count(found, all_reads)

    def _count(self, found: Finished, reads: list[LayerReads]) -> None:
        self.counted.ttft_s.append(found.ttft_s)
        self.counted.waited_s += found.waited_s
        self.counted.way_s += sum(each.ahead_s + each.chosen_s for each in reads)

    def _choosing_s(self, tokens: int) -> float:
        """Weights of the heads that are asked, in a layer, and two launches."""
        if not self._system.is_lossy:
            return 0.0
        costs = self._machine.costs
        share = PROBE_HEADS / self._machine.heads if self._system.asks_probe_heads else 1.0
        pairs = tokens * self._query * costs.pair_flop / self._machine.layers / 2
        return share * pairs / costs.attention_flops + 20e-6

    def _layer(
        self, number: int, index: int, tokens: PrefixTokens, rng: np.random.Generator, counts: bool
    ) -> LayerReads:
        """What one layer reads ahead, and of what it chose."""
        system = self._system
        if not system.is_lossy:
            whole = np.ones(-(-tokens.tokens // self._chunk_tokens))
            return LayerReads(self._read(number, index, "KV", whole, counts), 0.0)
        everything = np.ones(-(-tokens.tokens // self._chunk_tokens))
        if not system.asks_probe_heads:
            by_head = self._shares(tokens, rng, DISAGREEING_HEADS)
            return LayerReads(
                self._read(number, index, "K", everything, counts), self._read(number, index, "V", by_head, counts)
            )
        ahead = self._probe_keys(number, index, tokens.tokens)
        if rng.random() < FALLBACK:
            by_head = self._shares(tokens, rng, DISAGREEING_HEADS)
            chosen = self._read(number, index, "K", everything, counts)
            return LayerReads(ahead, chosen + self._read(number, index, "V", by_head, counts))
        return LayerReads(ahead, self._read(number, index, "KV", self._shares(tokens, rng, 1), counts))

    def _shares(self, tokens: PrefixTokens, rng: np.random.Generator, heads: int) -> np.ndarray:
        order = tokens.order if self._system.is_reordered else None
        return in_chunks(tokens.chosen(self._ratio, rng, heads), tokens.tokens, self._chunk_tokens, order)

    def _probe_keys(self, number: int, index: int, tokens: int) -> float:
        """Kept apart and cached like any chunk (6.5); all of them are wanted."""
        nbytes = tokens * self._machine.key_bytes * PROBE_HEADS / self._machine.heads
        place = self._tiers.ask((number, index, "probe"), nbytes, 1.0)
        return self._way_s(nbytes if place == "disk" else 0.0, nbytes if place != "device" else 0.0)

    def _read(self, number: int, index: int, kinds: str, shares: np.ndarray, counts: bool) -> float:
        """Seconds of the way for the chunks of which something is wanted."""
        nbytes = self._chunk_tokens * self._machine.key_bytes
        disk = link = 0.0
        for kind in kinds:
            for chunk in np.flatnonzero(shares).tolist():
                share = float(shares[chunk])
                place = self._tiers.ask((number, index, kind, chunk), nbytes, share)
                if place == "disk":
                    disk += nbytes
                if place != "device":
                    link += nbytes * share  # Only what is wanted goes to the device (4.4.2).
                if counts:
                    self.counted.chunks += 1
                    self.counted.chunks_on_device += place == "device"
        if counts:
            self.counted.disk_bytes += disk * self._machine.layers / SIMULATED_LAYERS
        return self._way_s(disk, link)

    def _way_s(self, disk_bytes: float, link_bytes: float) -> float:
        """Both at once, the slower of them counts."""
        return max(disk_bytes / (DISK_GB_S * GB), link_bytes / self._machine.link_rate)
