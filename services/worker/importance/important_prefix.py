"""One request's prefix, whose important part is loaded layer by layer, in the middle of the forward pass.

A layer reads its probe heads' keys, chooses, reads what was chosen, and begins to prefetch the keys that the next layer
chooses by before it attends (IMPRESS Figure 9). Chosen tokens are not prefetched (ADR 0073).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from services.worker.importance.bytes_read import BytesRead
from services.worker.importance.identification import (
    Identification,
    ProbeHeads,
    ProbeUnit,
    Rows,
    are_apart,
    choose_by_head,
    head_units,
    heads_read,
    identify,
    measure_importance,
)
from services.worker.importance.kept_kv import KeptInMemory, KeptKv
from services.worker.importance.layer_load import LayerLoad, LayerOutcome
from services.worker.importance.metrics import metric_named
from services.worker.importance.prefix_source import PrefixSource
from services.worker.importance.selection import Budget
from services.worker.importance.similarity import ALPHA
from shared.errors import UnsupportedModel
from shared.messages.sparse_reads import MOST_LAYERS


@dataclass(frozen=True, slots=True)
class LoadingRule:
    """The rule by which a prefix's tokens are chosen."""

    budget: Budget
    metric: str = "h2o"
    probe_heads: ProbeHeads = field(default_factory=ProbeHeads)
    alpha: float = ALPHA

    def __post_init__(self) -> None:
        """Raise ConfigError for a metric that does not exist."""
        metric_named(self.metric)


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
        clock: Callable[[], float] = time.perf_counter,
        *,
        prefetches_keys: bool = True,
        kept: KeptKv | None = None,
        name: str = "",
    ) -> None:
        """Prepare; chosen KV is ``kept`` in memory by default."""
        self.start, self.end = source.start, source.end
        self.name = name
        self.kept: KeptKv = kept or KeptInMemory()
        self.bytes_read = BytesRead()
        self.positions: dict[int, torch.Tensor] = {}
        self.identifications: dict[int, Identification] = {}
        self.outcomes: list[LayerOutcome] = []
        self._source, self._rule, self._layers = source, rule, layers
        self._metric = metric_named(rule.metric)
        self._prefetches_keys, self._clock = prefetches_keys, clock
        self._first_visible: dict[int, int] = {}  # By layer: the first token of the prefix that its rows see.
        self._keys_begun = 0  # Keys of the layers before this one were read, or are being prefetched.

    @property
    def is_complete(self) -> bool:
        """Whether every layer has chosen, so that nothing more is read."""
        return len(self.positions) == self._layers

    @property
    def layers_fallen_back(self) -> int:
        """Number of layers whose probe heads disagreed, so that all keys were read."""
        return sum(not found.accepted for found in self.identifications.values())

    @property
    def stall_s(self) -> float:
        """Seconds for which computation waited for reads."""
        return sum(outcome.stall_s for outcome in self.outcomes)

    @property
    def keys_stall_s(self) -> float:
        """Seconds of :attr:`stall_s` for keys to choose by."""
        return sum(outcome.keys_s for outcome in self.outcomes)

    def choose(self, layer: int, rows: Rows, keys: torch.Tensor, at: torch.Tensor) -> None:
        """Choose and load what ``rows`` and those of later steps attend over, unless that was done before.

        keys ``[kv_heads, n, head_dim]`` at positions ``at`` int64 ``[n]`` are of all else that the rows see. Raises
        UnsupportedModel for rows that cannot attend over a part of a prefix, and what reading raises.
        """
        if layer in self.positions:
            return
        if rows.unserved:
            raise UnsupportedModel(rows.unserved)
        load = LayerLoad(self._source, layer, self.bytes_read, self._clock)
        kv, positions = self._load(load, layer, rows, keys, at)
        self.kept.put(layer, kv)
        self.positions[layer] = positions
        self.outcomes.append(load.outcome())
        if self._prefetches_keys and layer + 1 < self._layers:
            self._prefetch_keys(layer + 1, rows.query.shape[0])

    def _load(
        self, load: LayerLoad, layer: int, rows: Rows, own_keys: torch.Tensor, at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[2, kv_heads, k, head_dim]`` and the positions of what is chosen."""
        start = min(max(rows.first_visible(), self.start), self.end)
        self._first_visible[layer] = start
        if start == self.end:  # The window has left the prefix behind.
            return own_keys[None, :, :0].repeat(2, 1, 1, 1), torch.empty(1, 0, dtype=torch.int64, device=at.device)
        choice = self._rule.budget.over(start, self.end)
        units = self._rule.probe_heads.units(rows.query.shape[0], self._source.kv_heads)
        heads = heads_read(units)
        keys = load.probe_keys(heads, start, self._layers_at_once(layer, heads))
        importance = self._importance(rows, keys, heads, own_keys[list(heads)], at, units)
        found = identify(importance, start, choice, self._rule.alpha)
        self.identifications[layer] = found
        if found.accepted:
            return load.kv(found.tokens), found.tokens[None]
        keys = load.keys(start)
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
        """Return the importance, float32 ``[units, n]``, of the last n tokens of the prefix.

        keys ``[len(heads), n, head_dim]`` are theirs, and own_keys, of the same heads, those at positions ``at``.
        """
        count = keys.shape[1]
        each = torch.cat([keys, own_keys], dim=1)[[heads.index(unit.kv_head) for unit in units]]
        positions = torch.cat([torch.arange(self.end - count, self.end, device=at.device), at])
        return measure_importance(rows, each, positions, count, units, self._metric)

    def _layers_at_once(self, layer: int, heads: Sequence[int]) -> int:
        """Return for how many layers keys are read if those of ``layer`` have to be read now.

        Several, like prefetched ones: a block of the disk holds codes of neighbouring layers, and is read once.
        """
        if not self._prefetches_keys or layer < self._keys_begun or not self._is_read_for_several(heads):
            return 1
        layers = min(MOST_LAYERS, self._layers - layer)
        self._keys_begun = layer + layers
        return layers

    def _is_read_for_several(self, heads: Sequence[int]) -> bool:
        """Return whether a storage reads keys of several layers at once, and no window has been met."""
        return are_apart(heads) and all(first == self.start for first in self._first_visible.values())

    def _prefetch_keys(self, layer: int, query_heads: int) -> None:
        """Begin to read the keys by which ``layer`` and layers behind it choose, which depend on no layer's choice.

        While no window has been met, those of several layers come by one read, which begins two layers before the first
        of them; a storage reads so only the heads that it keeps apart. Where windows differ, layers take turns, so
        ``layer`` will see as far back as the one before its predecessor.
        """
        start = self._first_visible.get(layer - 2, self._first_visible[layer - 1])
        heads = heads_read(self._rule.probe_heads.units(query_heads, self._source.kv_heads))
        begun, layers = layer, 1
        if self._is_read_for_several(heads):
            begun = max(layer, self._keys_begun)
            if begun - layer >= MOST_LAYERS - 1:
                return
            layers = min(MOST_LAYERS, self._layers - begun)
        if layers > 0 and start < self.end and self._source.prefetch_keys(begun, layers, heads, start):
            self._keys_begun = begun + layers
