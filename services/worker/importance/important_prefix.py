"""One request's prefix; only what matters of it is loaded: layer by layer, in the middle of the forward pass.

A layer reads its probe heads' keys, chooses, reads what was chosen and has not been read ahead, and starts to read
ahead for the next layer before it attends (IMPRESS Figure 9, HyperInfer IV-C).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from services.worker.importance.bytes_read import BytesRead, ReadKind
from services.worker.importance.identification import (
    Identification,
    ProbeHeads,
    ProbeUnit,
    Rows,
    choose_by_head,
    head_units,
    heads_read,
    identify,
    measure_importance,
)
from services.worker.importance.kept_kv import KeptInMemory, KeptKv
from services.worker.importance.layer_load import LayerLoad
from services.worker.importance.metrics import metric_named
from services.worker.importance.prefix_source import PrefixSource
from services.worker.importance.selection import Budget
from services.worker.importance.similarity import ALPHA
from services.worker.importance.speculation import Flight, LayerOutcome, ReadAhead
from services.worker.importance.speculation_control import SpeculationControl


@dataclass(frozen=True, slots=True)
class LoadingRule:
    """What is loaded of a prefix. Raises ConfigError for a metric that does not exist."""

    budget: Budget
    metric: str = "h2o"
    probe_heads: ProbeHeads = field(default_factory=ProbeHeads)
    alpha: float = ALPHA

    def __post_init__(self) -> None:
        metric_named(self.metric)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Reading ahead, and who says for which layers. A layer waits at most ``deadline_s`` for it."""

    read_ahead: ReadAhead
    control: SpeculationControl
    deadline_s: float = 10.0


class ImportantPrefix:
    """The state of one request, from its first step to its end. ``layers`` is the model's number of them.

    It is about tokens ``[start, end)``. ``positions`` (what was chosen, int64 ``[kv_heads, k]``, or ``[1, k]`` where
    all heads have the same) and ``identifications`` by layer, ``outcomes`` in order of the layers, and ``bytes_read``
    tell what happened. ``name`` is what errors call it.
    """

    def __init__(
        self,
        source: PrefixSource,
        rule: LoadingRule,
        layers: int,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        kept: KeptKv | None = None,
        name: str = "",
    ) -> None:
        """Prepare; what is chosen is ``kept`` in memory by default."""
        self.start, self.end = source.start, source.end
        self.name = name
        self.kept = kept or KeptInMemory()
        self.bytes_read = BytesRead()
        self.positions: dict[int, torch.Tensor] = {}
        self.identifications: dict[int, Identification] = {}
        self.outcomes: list[LayerOutcome] = []
        self._source, self._rule, self._layers = source, rule, layers
        self._metric = metric_named(rule.metric)
        self._speculation, self._clock = speculation, clock
        self._flight: Flight | None = None
        self._first_visible: dict[int, int] = {}  # By layer: the first token of the prefix that its rows see.

    @property
    def is_complete(self) -> bool:
        """Whether every layer has chosen: nothing is read any more."""
        return len(self.positions) == self._layers

    @property
    def layers_fallen_back(self) -> int:
        """Layers whose probe heads disagreed, so that all keys were read."""
        return sum(not found.accepted for found in self.identifications.values())

    @property
    def stall_s(self) -> float:
        """Computation waited so long for reads."""
        return sum(outcome.stall_s for outcome in self.outcomes)

    def choose(self, layer: int, rows: Rows, keys: torch.Tensor, at: torch.Tensor) -> None:
        """Choose and load what ``rows`` and those of later steps attend over, unless that was done before.

        keys ``[kv_heads, n, head_dim]`` at positions ``at`` int64 ``[n]`` are of all else that the rows see.
        """
        if layer in self.positions:
            return
        load = LayerLoad(self._source, layer, self.bytes_read, self._clock)
        kv, positions = self._load(load, layer, rows, keys, at)
        self.kept.put(layer, kv)
        self.positions[layer] = positions
        self.outcomes.append(load.outcome())
        if self._speculation is not None:
            self._speculation.control.record(self.outcomes[-1])
        if self._speculation is None or layer + 1 >= self._layers:
            return
        self._prefetch_keys(layer + 1, rows.query.shape[0])
        found = self.identifications.get(layer)
        if found is not None:
            self._read_ahead(self._speculation, layer + 1, found.tokens)

    def let_go(self) -> bool:
        """For a request that ends early: whether the source is no longer read, so that its memory may go to others.

        Waits for what is being read ahead, but not longer than a layer would; call it again if it was not enough.
        """
        if self._flight is not None and self._speculation is not None:
            if not self._flight.ends_within(self._speculation.deadline_s):
                return False
            self._flight = None
        return True

    def _load(
        self, load: LayerLoad, layer: int, rows: Rows, own_keys: torch.Tensor, at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[2, kv_heads, k, head_dim]`` and the positions of what is chosen."""
        start = min(max(rows.first_visible(), self.start), self.end)
        self._first_visible[layer] = start
        if start == self.end:  # The window has left the prefix behind.
            self._land(load, layer)
            return own_keys[None, :, :0].repeat(2, 1, 1, 1), torch.empty(1, 0, dtype=torch.int64, device=at.device)
        choice = self._rule.budget.over(start, self.end)
        units = self._rule.probe_heads.units(rows.query.shape[0], self._source.kv_heads)
        heads = heads_read(units)
        keys = load.keys(ReadKind.PROBE_KEYS, heads, start)
        importance = self._importance(rows, keys, heads, own_keys[list(heads)], at, units)
        found = identify(importance, start, choice, self._rule.alpha)
        self.identifications[layer] = found
        self._land(load, layer)
        if found.accepted:
            return load.kv(found.tokens), found.tokens[None]
        keys = self._all_keys(load, keys, heads, start)
        everyone = head_units(rows.query.shape[0], len(keys))
        importance = self._importance(rows, keys, range(len(keys)), own_keys, at, everyone)
        tokens = choose_by_head(importance, start, choice)
        columns = (tokens - start)[:, :, None].expand(-1, -1, keys.shape[2])
        return torch.stack([keys.gather(1, columns), load.values(tokens)]), tokens

    def _importance(
        self,
        rows: Rows,
        keys: torch.Tensor,
        heads: Sequence[int],
        own_keys: torch.Tensor,
        at: torch.Tensor,
        units: tuple[ProbeUnit, ...],
    ) -> torch.Tensor:
        """float32 ``[units, n]``; keys ``[len(heads), n, head_dim]`` are those of the last n tokens of the prefix, and
        own_keys, of the same heads, those at positions ``at``.
        """
        count = keys.shape[1]
        each = torch.cat([keys, own_keys], dim=1)[[heads.index(unit.kv_head) for unit in units]]
        positions = torch.cat([torch.arange(self.end - count, self.end, device=at.device), at])
        return measure_importance(rows, each, positions, count, units, self._metric)

    def _all_keys(self, load: LayerLoad, probe_keys: torch.Tensor, heads: Sequence[int], start: int) -> torch.Tensor:
        """Keys of all heads, ``[kv_heads, n, head_dim]``: the probe heads' are there, the others' are read."""
        others = [head for head in range(self._source.kv_heads) if head not in heads]
        keys = probe_keys.new_empty(self._source.kv_heads, *probe_keys.shape[1:])
        keys[list(heads)] = probe_keys
        if others:
            keys[others] = load.keys(ReadKind.FALLBACK_KEYS, others, start)
        return keys

    def _land(self, load: LayerLoad, layer: int) -> None:
        flight = self._flight
        if self._speculation is None or flight is None or flight.layer != layer:
            return
        load.land(flight, self._speculation.deadline_s)
        if flight.ends_within(0.0):  # An overdue one still reads the source, and is remembered for that.
            self._flight = None

    def _prefetch_keys(self, layer: int, query_heads: int) -> None:
        """Begin to read the keys that the next layer chooses by, which do not depend on what this one chose.

        Where windows differ, layers take turns, so it will see as far back as the layer before this one.
        """
        start = self._first_visible.get(layer - 2, self._first_visible[layer - 1])
        if start < self.end:
            units = self._rule.probe_heads.units(query_heads, self._source.kv_heads)
            self._source.prefetch_keys(layer, heads_read(units), start)

    def _read_ahead(self, speculation: Speculation, layer: int, tokens: torch.Tensor) -> None:
        """Begin to read for the next layer what this one chose; it is counted now, whatever becomes of it."""
        if len(tokens) == 0 or not speculation.control.wants(layer):
            return
        nbytes = len(tokens) * self._source.token_bytes
        flight = speculation.read_ahead.start(self._source, layer, tokens, nbytes)
        if flight is not None:
            self._flight = flight
            self.bytes_read.add(ReadKind.SPECULATIVE, nbytes)
