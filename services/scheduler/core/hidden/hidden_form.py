"""The form in which prefixes are kept below host memory: KV, or hidden states that restore it sooner (HCache 4.1.2).

Hidden states have one geometry for as long as a storage lives, for chunks of another would never be found. A disk that
holds some keeps their form. Otherwise the form is chosen by figures from before anything was served, of the worker's
profile and of the disk: speeds observed under load change how a prefix is restored, and never what is kept. A disk that
keeps sparse copies keeps KV, from which they are made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_fields

from services.scheduler.core.hidden.partition import (
    LayerTimes,
    Partition,
    hidden_only,
    kv_only,
    layer_times,
    made,
    profiled_costs,
    tokens_only,
    worth_storing,
)
from services.scheduler.core.rates import planned_disk_bytes_per_us
from shared.errors import ConfigError
from shared.hidden_forms import forms_among, hidden_geometry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.hidden.partition import LayerCosts
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from shared.messages.pools import KvGeometry
    from shared.messages.storage_events import HostPoolCreated


TYPICAL_TOKENS = 4096
"""Length of the prefix that decides whether hidden states are worth keeping."""

COMPARED_TOKENS = (1024, TYPICAL_TOKENS, 16_384)
"""Lengths of the prefixes by which forms are compared. Computing a layer grows faster than in proportion, so a form
with many layers from tokens that is best for short prefixes can be far from it for long ones."""

_WORTH_A_CHANGE = 0.9
"""Hidden states must be restored in at most this part of KV's time: KV is shared in host memory and needs no
computing."""

_WORTH_A_MIX = 0.8
"""A form of several methods must take at most this part of the time of a single one: the cost of combining them, a pass
through the model for each part and cores that both want, is in no profile. One layer from tokens that promised 12 %
less took 18 % more."""

_LAYERS = re.compile(r"([0-9]{1,4})/([0-9]{1,4})/([0-9]{1,4})")


def parse_form(text: str) -> tuple[int, int, int] | None:
    """Return the numbers of layers absent, from hidden states and as KV; None for "off" and "auto".

    Raises ConfigError for other text.
    """
    if text in ("off", "auto"):
        return None
    found = _LAYERS.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is no layer mix; write off, auto, or numbers of layers such as 8/24/0")
    absent, from_hidden, loaded = (int(part) for part in found.groups())
    return absent, from_hidden, loaded


def form_fault(text: str, kv: KvGeometry, hidden: int) -> str:
    """Return why a model with KV of this geometry cannot keep prefixes in the configured form, or "". Pure.

    ``hidden`` is the width of its hidden states; 0 where KV cannot be restored from them, or that is not known.
    """
    layers = parse_form(text)
    if layers is None:
        return ""
    absent, from_hidden, _ = layers
    if sum(layers) != kv.layers:
        return f"{text} has {sum(layers)} layers, and the model has {kv.layers}"
    if from_hidden and not hidden:
        return f"{text} needs hidden states, and what restoring KV from them costs is not known or they do not give it"
    if absent or from_hidden:
        return replace_fields(
            kv.as_kv, absent=absent, from_hidden=from_hidden, hidden=hidden * (from_hidden > 0)
        ).fault()
    return ""


def is_of_hidden(text: str) -> bool:
    """Return whether the configured form has layers that are not kept as KV; "auto" and "off" are none."""
    layers = parse_form(text)
    return layers is not None and layers[:2] != (0, 0)


def form_obstacle(state: CellState, storage: Storage) -> str:
    """Return why a storage keeps no prefixes in the configured form, once it could, or "". Changes nothing."""
    text, geometry = state.config.hidden_form, state.geometry
    if geometry is None or not storage.is_pool_requested or storage.hidden.is_requested:
        return ""
    fault = form_fault(text, geometry, _width_of_hidden(state, storage))
    if fault or not is_of_hidden(text):
        return fault
    if not storage.hidden.pool_bytes:
        return "--hidden-bytes is 0"
    return "" if storage.disk.budget_bytes or storage.disk.has_remote else "there is neither a disk nor an object store"


def wanted_hidden(state: CellState, storage: Storage) -> KvGeometry | None:
    """Return the geometry of hidden states to keep at this storage; None where KV is to be kept. Changes nothing."""
    geometry, text = state.geometry, state.config.hidden_form
    if geometry is None or text == "off":
        return None
    layers = parse_form(text)
    if layers is None:
        on_disk = form_on_disk(state, storage)
        if on_disk is not None or storage.sparse.is_kept:
            return on_disk
        return _best_geometry(state, storage, geometry)
    hidden = _width_of_hidden(state, storage)
    return None if form_fault(text, geometry, hidden) else hidden_geometry(geometry, layers[0], layers[1], hidden)


def _width_of_hidden(state: CellState, storage: Storage) -> int:
    """Return the values of a hidden state by the first worker of the node that told its costs; 0 without any."""
    return next((one.restoration.hidden for one in restorers_of(state, storage) if one.restoration is not None), 0)


def form_on_disk(state: CellState, storage: Storage) -> KvGeometry | None:
    """Return the form of most chunks that the storage's disk held when it joined, of those its node can restore.

    None where there are none. Changes nothing.
    """
    restorers = restorers_of(state, storage)
    if state.geometry is None or not restorers or restorers[0].restoration is None:
        return None
    forms = forms_among(state.geometry, restorers[0].restoration.hidden, storage.hidden.shapes)
    return forms[0] if forms else None


def is_worth_keeping(state: CellState, storage: Storage) -> bool:
    """Return whether KV computed now should be saved as hidden states. Changes nothing.

    A configured form is taken as it is; a form that the disk held before is judged again. Sparse copies need KV.
    """
    text, geometry = state.config.hidden_form, state.geometry
    if text != "auto":
        return text != "off"
    if storage.sparse.is_kept:
        return False
    if storage.hidden.handle is None or geometry is None:
        return wanted_hidden(state, storage) is not None
    figures = _figures(state, storage)
    if figures is None:
        return False
    kept = storage.hidden.handle.geometry
    return not figures.bytes_per_us or _pays(
        figures.costs, figures.bytes_per_us, (kept.absent, kept.from_hidden, kept.loaded_layers)
    )


def can_restore(worker: Worker, geometry: KvGeometry) -> bool:
    """Return whether this worker can restore KV from pages of this geometry; its model decides for hidden states."""
    width = worker.restoration.hidden if worker.restoration is not None else 0
    return not geometry.from_hidden or width == geometry.hidden


def restorers_of(state: CellState, storage: Storage) -> list[Worker]:
    """Return the workers of the storage's node that reported their cost of restoring. Changes nothing."""
    return [one for one in state.workers.values() if one.node == storage.node and one.restoration is not None]


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures to plan a form with: rounded measured costs, and the disk's bytes per microsecond (0: not known yet)."""

    costs: LayerCosts
    hidden: int
    bytes_per_us: float


def _figures(state: CellState, storage: Storage) -> _Figures | None:
    """Return the figures of the node's first worker, which stands for all; None without any. Changes nothing."""
    restorers = restorers_of(state, storage)
    costs = profiled_costs(state, restorers[0]) if restorers else None
    if costs is None or restorers[0].restoration is None:
        return None
    return _Figures(
        _rounded(costs), restorers[0].restoration.hidden, _two_digits(planned_disk_bytes_per_us(storage))
    )  # fmt: skip


def _best_geometry(state: CellState, storage: Storage, kv: KvGeometry) -> KvGeometry | None:
    """Return the geometry that restores soonest; None where that is KV, and while the disk's speed is unknown."""
    figures = _figures(state, storage)
    if figures is None or not figures.bytes_per_us:
        return None
    hidden = figures.hidden
    best = _best_layers(figures.costs, figures.bytes_per_us, hidden > 0, hidden == _width(kv))
    return None if best is None else hidden_geometry(kv, best.tokens, best.hidden, hidden)


@lru_cache(maxsize=256)
def _pays(costs: LayerCosts, bytes_per_us: float, layers: tuple[int, int, int]) -> bool:
    """Return whether this form restores a typical prefix sooner than KV, and keeping any form is worth it."""
    if worth_storing(costs, tokens=TYPICAL_TOKENS, bytes_per_us=bytes_per_us).form == "nothing":
        return False
    times = layer_times(costs, TYPICAL_TOKENS, bytes_per_us)
    taken_us = made(times, tokens=layers[0], hidden=layers[1], kv=layers[2], ends_early=True).time_us
    return taken_us <= kv_only(costs.layers, times).time_us * _WORTH_A_CHANGE


@lru_cache(maxsize=256)
def _best_layers(costs: LayerCosts, bytes_per_us: float, may_keep_hidden: bool, may_mix: bool) -> Partition | None:
    """Return the layers by what is kept of them; None where nothing is worth keeping, or nothing but KV.

    Of all forms, the fastest for a typical prefix among those that are no slower than the best single method for any of
    the compared lengths; where there is none, the one that is slower by the least factor. A prefix that is computed
    sooner than it is restored will be computed, whatever is kept of it.
    """
    found = worth_storing(costs, tokens=TYPICAL_TOKENS, bytes_per_us=bytes_per_us, may_keep_hidden=may_keep_hidden)
    if found.form == "nothing":
        return None
    is_smaller = may_keep_hidden and costs.hidden_is_smaller
    lengths = [layer_times(costs, tokens, bytes_per_us) for tokens in COMPARED_TOKENS]
    typical = layer_times(costs, TYPICAL_TOKENS, bytes_per_us)
    singles = [_best_single(costs.layers, times, may_keep_hidden=is_smaller) for times in lengths]
    computing = [tokens_only(costs.layers, times).time_us for times in lengths]

    def regret(one: Partition) -> tuple[float, float, float]:
        slower = max(
            min(_taken(one, times), computing_us) / single
            for times, computing_us, single in zip(lengths, computing, singles, strict=True)
        )
        is_mix = (one.tokens > 0) + (one.hidden > 0) + (one.kv > 0) > 1
        return max(1.0, slower), one.time_us / (_WORTH_A_MIX if is_mix else 1.0), one.io_us

    forms = _forms(costs.layers, typical, found.partition.kv, may_keep_hidden=is_smaller, may_mix=may_mix)
    best = min(forms, key=regret)
    return best if best.time_us <= kv_only(costs.layers, typical).time_us * _WORTH_A_CHANGE else None


def _forms(layers: int, times: LayerTimes, loaded: int, *, may_keep_hidden: bool, may_mix: bool) -> Iterator[Partition]:
    """Yield forms worth comparing.

    KV behind any number of layers from tokens, and hidden states behind them, alone or before ``loaded`` layers of KV.
    Unless they ``may_mix``, a page cannot hold hidden states beside KV.
    """
    for tokens in range(layers):
        yield made(times, tokens=tokens, kv=layers - tokens, ends_early=True)
        for kv in dict.fromkeys((0, loaded if may_mix else 0)) if may_keep_hidden else ():
            if tokens + kv < layers:
                yield made(times, tokens=tokens, hidden=layers - tokens - kv, kv=kv, ends_early=True)


def _best_single(layers: int, times: LayerTimes, *, may_keep_hidden: bool) -> float:
    """Return the microseconds of the fastest single method."""
    methods = [kv_only(layers, times), tokens_only(layers, times)]
    methods += [hidden_only(layers, times)] if may_keep_hidden else []
    return min(method.time_us for method in methods)


def _taken(one: Partition, times: LayerTimes) -> float:
    """Return the microseconds of the partition where layers take these times."""
    return made(times, tokens=one.tokens, hidden=one.hidden, kv=one.kv, ends_early=True).time_us


def _rounded(costs: LayerCosts) -> LayerCosts:
    """Return the costs to two digits. The search takes a while, and measured costs always move a little."""
    return replace(
        costs,
        hidden_us=_two_digits(costs.hidden_us),
        token_us=_two_digits(costs.token_us),
        pair_us=_two_digits(costs.pair_us),
    )


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _width(kv: KvGeometry) -> int:
    """Return the number of K values of one token in one layer."""
    return kv.kv_heads * kv.head_dim


def layout_for(storage: Storage, worker: Worker) -> KvGeometry | None:
    """Return the geometry of a storage's hidden pages; None without a pool, or where this worker cannot use it."""
    if storage.hidden.pool is None or storage.hidden.handle is None:
        return None
    layout = storage.hidden.handle.geometry
    return layout if can_restore(worker, layout) else None


def _is_of_this_cell(step: Step, message: HostPoolCreated) -> bool:
    geometry = message.handle.geometry if message.handle is not None else None
    is_sound = geometry is not None and geometry.is_hidden and not geometry.fault()
    return is_sound and geometry is not None and geometry.as_kv == step.state.geometry
