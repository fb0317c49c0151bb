"""One request's prefix, of which only what matters is loaded: layer by layer, in the middle of the forward pass.

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
from services.worker.importance.layer_load import LayerLoad
from services.worker.importance.metrics import metric_named
from services.worker.importance.prefix_source import PrefixSource
from services.worker.importance.selection import Budget
from services.worker.importance.similarity import ALPHA
from services.worker.importance.sparse_attention import SelectedKv
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

    ``identifications`` by layer, ``outcomes`` in order of the layers, and ``bytes_read`` tell what happened.
    """

    def __init__(
        self,
        source: PrefixSource,
        rule: LoadingRule,
        layers: int,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokens = source.tokens
        self.bytes_read = BytesRead()
        self.identifications: dict[int, Identification] = {}
        self.outcomes: list[LayerOutcome] = []
        self._source, self._rule, self._layers = source, rule, layers
        self._metric = metric_named(rule.metric)
        self._speculation, self._clock = speculation, clock
        self._selected: dict[int, SelectedKv] = {}
        self._flight: Flight | None = None

    def select(self, layer: int, rows: Rows, own_keys: torch.Tensor) -> SelectedKv:
        """What ``rows`` and those of later steps attend over. Chosen and loaded the first time that a layer is asked
        for.

        own_keys ``[kv_heads, n, head_dim]`` are those of the request's own tokens, from position ``tokens`` on.
        """
        if layer not in self._selected:
            load = LayerLoad(self._source, layer, self.bytes_read, self._clock)
            self._selected[layer] = self._load(load, layer, rows, own_keys)
            self.outcomes.append(load.outcome())
            if self._speculation is not None:
                self._speculation.control.record(self.outcomes[-1])
            found = self.identifications.get(layer)
            if found is not None:
                self._read_ahead(layer + 1, found.tokens)
        return self._selected[layer]

    def let_go(self) -> bool:
        """For a request that ends early: whether the source is no longer read, so that its memory may go to others.

        Waits for what is being read ahead, but not longer than a layer would; call it again if it was not enough.
        """
        if self._flight is not None and self._speculation is not None:
            if not self._flight.ends_within(self._speculation.deadline_s):
                return False
            self._flight = None
        return True

    def _load(self, load: LayerLoad, layer: int, rows: Rows, own_keys: torch.Tensor) -> SelectedKv:
        start = min(rows.first_visible(), self.tokens)
        if start == self.tokens:  # The window has left the prefix behind.
            self._land(load, layer)
            nothing = own_keys[:, :0]
            return SelectedKv(nothing, nothing, torch.empty(1, 0, dtype=torch.int64, device=own_keys.device))
        choice = self._rule.budget.over(start, self.tokens)
        units = self._rule.probe_heads.units(rows.query.shape[0], self._source.kv_heads)
        heads = heads_read(units)
        keys = load.keys(ReadKind.PROBE_KEYS, heads, start)
        found = identify(self._importance(rows, keys, heads, own_keys, units), start, choice, self._rule.alpha)
        self.identifications[layer] = found
        self._land(load, layer)
        if found.accepted:
            kv = load.kv(found.tokens)
            return SelectedKv(kv[0], kv[1], found.tokens[None])
        keys = self._all_keys(load, keys, heads, start)
        everyone = head_units(rows.query.shape[0], len(keys))
        importance = self._importance(rows, keys, range(len(keys)), own_keys, everyone)
        tokens = choose_by_head(importance, start, choice)
        columns = (tokens - start)[:, :, None].expand(-1, -1, keys.shape[2])
        return SelectedKv(keys.gather(1, columns), load.values(tokens), tokens)

    def _importance(
        self,
        rows: Rows,
        keys: torch.Tensor,
        heads: Sequence[int],
        own_keys: torch.Tensor,
        units: tuple[ProbeUnit, ...],
    ) -> torch.Tensor:
        """float32 ``[units, n]``; keys ``[len(heads), n, head_dim]`` are those of the last n tokens of the prefix."""
        count = keys.shape[1]
        both = torch.cat([keys, own_keys[list(heads)]], dim=1)
        each = both[[heads.index(unit.kv_head) for unit in units]]
        start = self.tokens - count
        positions = torch.arange(start, start + both.shape[1], device=both.device)
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

    def _read_ahead(self, layer: int, tokens: torch.Tensor) -> None:
        """Begin to read for the next layer what this one chose; it is counted now, whatever becomes of it."""
        speculation = self._speculation
        if speculation is None or layer >= self._layers or len(tokens) == 0 or not speculation.control.wants(layer):
            return
        nbytes = len(tokens) * self._source.token_bytes
        flight = speculation.read_ahead.start(self._source, layer, tokens, nbytes)
        if flight is not None:
            self._flight = flight
            self.bytes_read.add(ReadKind.SPECULATIVE, nbytes)
