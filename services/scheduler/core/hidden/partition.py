"""The number of layers to restore by each method, for one stretch of tokens and one source (HCache 4.1.2).

The paper combines hidden states with one other method: recomputing the first layers where computing is idle, loading
KV of the last where the link is. :func:`closed_form` is its formula, :func:`best_two_way` the exact whole number, and
:func:`best_partition` allows all three at once. The others are the baselines of its section 6.3.

The same partition decides the form in which a prefix is kept below the device (HCache 4.1.2), because layers should be
written as they would be read back: layers that would be computed from tokens need not be kept at all, and the others
are kept in one form each.

The cost of one layer of one token, in bytes and in microseconds (:class:`LayerCosts`), follows HCache 3.2. The paper's
formulas are for multi-head attention; here widths are taken from the model, so that they hold for grouped
queries and for any feed-forward network, too. With heads * head_dim = kv_heads * head_dim = D and 12 D² parameters a
layer they are the paper's: ``C_hidden`` 4 N D² FLOP, ``C_token`` 24 N D² and attention, which counts each pair of
tokens once (2 N² D; the paper writes N² D, with the same growth).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor
from typing import TYPE_CHECKING, Literal

from services.scheduler.core.rates import compute_fit
from shared.chunks import chunks_of_part
from shared.messages.pools import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.core.state import CellState, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Costs of one layer for one token, in bytes and microseconds."""

    layers: int
    kv_bytes: float
    hidden_bytes: float
    hidden_us: float  # Computing K and V from the hidden state.
    token_us: float  # Computing the whole layer, without attention.
    pair_us: float = 0.0  # Attending to one token of the context.

    def recompute_us(self, start: int, end: int) -> float:
        """Return the microseconds of computing tokens [start, end) in one layer (HCache 3.2, T_rec).

        Each token attends to all before it.
        """
        return (end - start) * self.token_us + self.pair_us * (end * end - start * start) / 2

    @property
    def hidden_is_smaller(self) -> bool:
        """Whether a hidden state takes fewer bytes than its KV; under grouped queries it does not."""
        return self.hidden_bytes < self.kv_bytes


def layer_costs(state: CellState, worker: Worker) -> LayerCosts | None:
    """Return the present cost of a token in one layer by each method; None without a profile. Changes nothing.

    The profile is of one process alone on its machine (HCache 4.1.2): speeds of computing observed since replace it.
    """
    costs, fit = profiled_costs(state, worker), compute_fit(state, worker)
    if costs is None or not fit.reports:
        return costs
    token, pair = fit.token_and_pair_us()
    return replace(costs, token_us=token / costs.layers, pair_us=pair / costs.layers)


def profiled_costs(state: CellState, worker: Worker) -> LayerCosts | None:
    """Return the same by the profile alone; None without a profile. Changes nothing.

    What a disk keeps for long is planned with it (HCache 4.1.2, offline), since observed speeds move with the load. A
    worker that cannot restore from hidden states has them cost the bytes of KV, so that they never win.
    """
    profile, geometry = worker.restoration, state.geometry
    if profile is None or geometry is None:
        return None
    kv_bytes = 2 * geometry.half_bytes / geometry.page_size
    return LayerCosts(
        layers=geometry.layers,
        kv_bytes=kv_bytes,
        hidden_bytes=profile.hidden * DTYPE_BYTES[geometry.dtype] if profile.hidden else kv_bytes,
        hidden_us=profile.hidden_us,
        token_us=profile.token_us,
        pair_us=profile.pair_us,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Microseconds that one layer of the whole stretch takes: the paper's IO_KV, IO_H, C_H and C_Token."""

    io_kv: float
    io_hidden: float
    compute_hidden: float
    compute_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Numbers of layers by method, lowest layers first: from tokens, from hidden states, as KV."""

    tokens: int
    hidden: int
    kv: int
    io_us: float
    compute_us: float

    @property
    def time_us(self) -> float:
        """Microseconds of the slower of link and device, which work side by side."""
        return max(self.io_us, self.compute_us)


def layer_times(costs: LayerCosts, tokens: int, bytes_per_us: float, *, context: int = 0) -> LayerTimes:
    """Return the times of ``tokens`` tokens after ``context`` others, over a link of this speed."""
    return LayerTimes(
        io_kv=tokens * costs.kv_bytes / bytes_per_us,
        io_hidden=tokens * costs.hidden_bytes / bytes_per_us,
        compute_hidden=tokens * costs.hidden_us,
        compute_tokens=costs.recompute_us(context, context + tokens),
    )


def made(
    times: LayerTimes,
    *,
    tokens: int = 0,
    hidden: int = 0,
    kv: int = 0,
    io_queued: float = 0,
    queued: float = 0,
    ends_early: bool = False,
) -> Partition:
    """Return a partition with its cost. ``ends_early``, ``io_queued`` and ``queued``: see :func:`best_partition`."""
    computing = tokens * times.compute_tokens
    if ends_early and tokens and hidden + kv:
        computing += times.compute_hidden - times.compute_tokens
    return Partition(
        tokens=tokens,
        hidden=hidden,
        kv=kv,
        io_us=io_queued + hidden * times.io_hidden + kv * times.io_kv,
        compute_us=queued + computing + hidden * times.compute_hidden,
    )


def closed_form(layers: int, times: LayerTimes) -> Partition:
    """Return the partition by the paper's formula (4.1.2), with L_H rounded up.

    The other layers come from KV where C_H is larger than IO_H, else from tokens. The formula presumes that a hidden
    state is smaller than its KV and cheaper than its tokens.
    """
    if times.compute_hidden > times.io_hidden:
        share = times.io_kv / (times.io_kv + times.compute_hidden - times.io_hidden)
        hidden = min(layers, ceil(layers * share))
        return made(times, hidden=hidden, kv=layers - hidden)
    share = times.compute_tokens / (times.compute_tokens + times.io_hidden - times.compute_hidden)
    hidden = min(layers, ceil(layers * share))
    return made(times, hidden=hidden, tokens=layers - hidden)


def best_two_way(layers: int, times: LayerTimes) -> Partition:
    """Return the fastest of hidden states with KV and hidden states with tokens, in whole layers."""
    with_kv = (made(times, hidden=hidden, kv=layers - hidden) for hidden in range(layers, -1, -1))
    with_tokens = (made(times, hidden=hidden, tokens=layers - hidden) for hidden in range(layers, -1, -1))
    return min((*with_kv, *with_tokens), key=_time)


def best_partition(
    layers: int, times: LayerTimes, *, io_queued: float = 0.0, queued: float = 0.0, ends_early: bool = False
) -> Partition:
    """Return the partition of least max(L_H IO_H + L_KV IO_KV, L_T C_T + L_H C_H), exactly, in O(layers).

    For each number of layers from tokens, loading falls and computing rises with those from hidden states, so the
    best lies on either side of where they meet. Where hidden states are no smaller than KV there are none. Ties go
    to fewer bytes. ``io_queued`` and ``queued`` are microseconds of work waiting on link and device.

    ``ends_early``: recomputing the first layers ends with the keys and values of the last of them, so that one costs
    C_H; the paper counts it as C_T.
    """
    found: list[Partition] = []
    for tokens in range(layers + 1):
        left = layers - tokens
        least = made(times, tokens=tokens, kv=left, io_queued=io_queued, queued=queued, ends_early=ends_early)
        for hidden in _hidden_layers(left, least, times):
            kv = left - hidden
            found.append(
                Partition(
                    tokens=tokens,
                    hidden=hidden,
                    kv=kv,
                    io_us=least.io_us - hidden * (times.io_kv - times.io_hidden),
                    compute_us=least.compute_us + hidden * times.compute_hidden,
                )
            )
    return min(found, key=lambda one: (one.time_us, one.io_us))


def _hidden_layers(left: int, as_kv: Partition, times: LayerTimes) -> Iterable[int]:
    """Return the numbers of ``left`` layers that may be best from hidden states; ``as_kv`` has them all as KV."""
    relief = times.io_kv - times.io_hidden
    if relief <= 0:
        return (0,)
    meeting = (as_kv.io_us - as_kv.compute_us) / (relief + times.compute_hidden)
    meeting = min(max(meeting, 0.0), float(left))
    low = floor(meeting)
    return (low, min(left, low + 1))


def naive_hybrid(layers: int, times: LayerTimes) -> Partition:
    """Return the best partition of KV and tokens, without hidden states (HCache 6.3.1, "Naive hybrid")."""
    return min((made(times, tokens=count, kv=layers - count) for count in range(layers + 1)), key=_time)


def hidden_only(layers: int, times: LayerTimes) -> Partition:
    """Return all layers from hidden states, without the paper's scheduler (HCache 6.3.1, "HCache-O")."""
    return made(times, hidden=layers)


def kv_only(layers: int, times: LayerTimes) -> Partition:
    """Return all layers as KV, as KV offload has them."""
    return made(times, kv=layers)


def tokens_only(layers: int, times: LayerTimes) -> Partition:
    """Return all layers from tokens: recomputation."""
    return made(times, tokens=layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPartition:
    """Numbers of tokens by method, alike in all layers (HCache 4.1.1).

    First come tokens from hidden states, then the others from tokens or as KV.
    """

    hidden: int
    tokens: int
    kv: int


def token_wise(costs: LayerCosts, tokens: int, bytes_per_us: float, *, multiple: int = 1) -> TokenPartition:
    """Return the partition of tokens that takes the least time in a layer, by the same costs.

    ``multiple``: hidden states only in multiples of so many tokens (the paper's round-up, 6.3.2).
    """
    times = layer_times(costs, tokens, bytes_per_us)
    with_kv = times.compute_hidden > times.io_hidden
    best: tuple[float, int] | None = None
    for hidden in range(0, tokens + 1, multiple):
        others = tokens - hidden
        io = (hidden * costs.hidden_bytes + (others * costs.kv_bytes if with_kv else 0.0)) / bytes_per_us
        computing = hidden * costs.hidden_us + (0.0 if with_kv else costs.recompute_us(hidden, tokens))
        if best is None or max(io, computing) < best[0]:
            best = (max(io, computing), hidden)
    hidden = best[1] if best is not None else 0
    others = tokens - hidden
    return TokenPartition(hidden=hidden, tokens=0 if with_kv else others, kv=others if with_kv else 0)


def _time(partition: Partition) -> tuple[float, float]:
    return (partition.time_us, partition.io_us)


def pipelined_us(disk_us: float, device_us: float, chunks: int) -> float:
    """Return the microseconds of a restoration whose parts are restored as they arrive, from both sides' totals."""
    parts = -(-chunks // chunks_of_part(chunks)) if chunks > 0 else 1
    return max(disk_us, device_us) + min(disk_us, device_us) / parts


StoredForm = Literal["kv", "hidden", "mix", "nothing"]

_WORTH_STORING = 0.9
"""Restoring from a copy must take at most this part of what computing takes: writing it costs something, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """A form to keep.

    Layers [0, ``partition.tokens``) are absent, the next ``partition.hidden`` hidden states, the rest KV.
    """

    form: StoredForm
    partition: Partition
    token_bytes: float  # Bytes of all layers of a token in this form.
    kv_token_bytes: float  # The same with all layers as KV.
    explanation: str


def worth_storing(
    costs: LayerCosts, *, tokens: int, bytes_per_us: float, may_keep_hidden: bool = True, context: int = 0
) -> Storing:
    """Return the form to keep of ``tokens`` tokens behind ``context`` others, restored over a link of this speed.

    ``may_keep_hidden`` is False where a worker cannot restore from hidden states.
    """
    times = layer_times(costs, tokens, bytes_per_us, context=context)
    if not may_keep_hidden:
        times = LayerTimes(
            io_kv=times.io_kv,
            io_hidden=times.io_kv,
            compute_hidden=times.compute_hidden,
            compute_tokens=times.compute_tokens,
        )
    best = best_partition(costs.layers, times, ends_early=True)
    computed = tokens_only(costs.layers, times)
    kv_bytes = costs.layers * costs.kv_bytes
    if best.time_us > computed.time_us * _WORTH_STORING:
        said = f"computing it takes {computed.time_us / 1e3:.1f} ms, no copy is worth its room"
        return Storing(form="nothing", partition=computed, token_bytes=0.0, kv_token_bytes=kv_bytes, explanation=said)
    return Storing(
        form=_form(best),
        partition=best,
        token_bytes=best.hidden * costs.hidden_bytes + best.kv * costs.kv_bytes,
        kv_token_bytes=kv_bytes,
        explanation=_said(costs, best, kv_only(costs.layers, times), may_keep_hidden=may_keep_hidden),
    )


def _form(best: Partition) -> StoredForm:
    if best.hidden and best.kv:
        return "mix"
    return "hidden" if best.hidden else "kv"


def _said(costs: LayerCosts, best: Partition, as_kv: Partition, *, may_keep_hidden: bool) -> str:
    text = f"{best.tokens} layers from tokens, {best.hidden} from hidden states, {best.kv} as KV"
    if not may_keep_hidden:
        text += "; the worker restores nothing from hidden states"
    elif not costs.hidden_is_smaller:
        ratio = costs.hidden_bytes / costs.kv_bytes
        text += f"; a hidden state has {ratio:.1f} times the bytes of KV in this model, so none are kept"
    return f"{text}: {best.time_us / 1e3:.1f} ms, all as KV {as_kv.time_us / 1e3:.1f} ms"
