"""The choice of how to restore a prefix from below host memory: KV, hidden states, sparse reads, or computing it.

One cost model weighs them all (HCache 4.1.2, :mod:`planner`), on measured speeds: the disk with its queue, the link to
the device, computing and restoring. The time of each way is that of restoring the run, and of computing the rest of
the prompt after it.

* KV comes to host memory first and is loaded then, with the batch that computes the rest: one after the other.
* Hidden states are restored as they arrive, part by part: the longer of disk and device, and a part of the shorter that
  nothing hides, the last one's restoring or the first one's reading.
* KV that is continued by hidden states is followed by these, where this is the fastest way from there.
* Of a prefix that may be lossy only the important tokens are read, by the step that computes the rest: nothing hides
  that, and the computed tokens attend to so many tokens less. An exact way that is as fast is preferred to it.

The disk begins at once, the device when it comes to the request: its other work until then hides the disk.

* Behind the first of it, hidden states may go on in stretches with holes between them, which are computed whatever
comes behind them. While a hole is computed the disk reads on.

A stretch is worth bringing either whole or not at all: a token costs more to compute the deeper it is, a copy does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

from services.scheduler.core.hidden.hidden_form import layout_for
from services.scheduler.core.hidden.partition import LayerCosts, layer_costs, layer_times, made, pipelined_us
from services.scheduler.core.rates import compute_fit, disk_bytes_per_us, loaded_token_us, queued_bytes
from services.scheduler.core.speed_fit import IMPORTANT_FROM_DISK, KV_FROM_DISK
from shared.chunks import chunk_tokens
from shared.messages.explanations import CostName, CostPart, WayName, WeighedWay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.sparse.sparse_costs import SparsePrices
    from services.scheduler.core.state import CellState, Storage, Worker
    from shared.messages.pools import KvGeometry

Form = WayName

Part = tuple[CostName, float, float]
"""A part of a way's time: its name, microseconds, and the bytes that are read for it."""


@dataclass(frozen=True, slots=True)
class Ways:
    """The KV and hidden states that exist for a prompt of ``tokens`` tokens; the first ``covered`` need not be brought.

    The next chunk begins ``begin`` tokens from the root, at or before ``covered``. There is KV up to ``kv_end`` and
    hidden states up to ``hidden_end``, each as far as one fetch would bring it; behind ``kv_end`` hidden states go on
    up to ``following_end``. Where there is none, an end is its beginning. ``later`` are stretches of hidden states
    [start, end) that follow behind ``hidden_end`` with holes between them, ``following_later`` those behind
    ``following_end``.
    """

    tokens: int
    covered: int
    begin: int
    kv_end: int
    hidden_end: int
    following_end: int
    later: tuple[tuple[int, int], ...] = ()
    following_later: tuple[tuple[int, int], ...] = ()
    sparse_end: int = 0  # End of the prefix that may be read sparsely; 0: none.


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to restore a prefix.

    ``total_us`` is from when the device comes to the request until its prompt is computed. ``restoring_us``: the time
    of restoring, disk and device, whatever hides it. ``recomputed`` layers of a restoration are computed from tokens.
    ``kind`` names it in the words of :func:`planner.plan_kind`. ``is_overruling``: it won by observed rates alone.
    ``is_trial``: it lost by them (see :mod:`exploration`), and no more of it is to be brought than up to token ``end``.
    """

    form: Form
    total_us: float
    restoring_us: float = 0.0
    recomputed: int = 0
    kind: str = ""
    is_overruling: bool = False
    is_trial: bool = False
    end: int = 0
    later: int = 0  # Number of later stretches of hidden states to bring as well.
    overrules_sparse: bool = False  # A sparse read would have won, but for the observed speed of such reads.
    parts: tuple[Part, ...] = ()  # Parts of the time, each as if nothing hid it.
    weighed: tuple[Choice, ...] = ()  # All ways that were compared, without theirs.

    def told(self, taken: Form) -> WeighedWay:
        """Return it for an explanation; what other work or another part hides of its parts is a part below 0. Pure."""
        parts = [CostPart(name=name, us=round(us), nbytes=round(nbytes)) for name, us, nbytes in self.parts if us > 0]
        hidden_us = round(self.total_us) - sum(part.us for part in parts)
        if hidden_us < -len(parts):  # Each part is rounded.
            parts.append(CostPart(name="overlap", us=hidden_us))
        us = sum(part.us for part in parts)
        return WeighedWay(way=self.form, us=us, parts=tuple(parts), is_taken=self.form == taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A worker's costs of bringing and computing, in bytes and microseconds.

    ``layout`` is that of hidden pages, if any. ``restored_us`` is the observed time of a restored token, 0 before
    anything was restored. ``ahead_us`` is the device's work before it comes to the request.
    """

    costs: LayerCosts
    disk_bytes_per_us: float
    queued_bytes: float
    link_bytes_per_us: float
    loaded_us: float  # Time to load a token from host memory.
    restored_us: float
    layout: KvGeometry | None
    ahead_us: float = 0.0
    sparse: SparsePrices | None = None  # Set for a request that allows sparse reads.

    def computing(self, start: int, end: int) -> float:
        """Return the microseconds of computing tokens [start, end) in all layers."""
        return self.costs.layers * self.costs.recompute_us(start, end)

    def fetching(self, token_bytes: float, tokens: int) -> float:
        """Return the microseconds of reading ``tokens`` from the disk, behind its queue."""
        return (self.queued_bytes + tokens * token_bytes) / self.disk_bytes_per_us

    def reading_parts(self, nbytes: float) -> tuple[Part, ...]:
        """Return the parts of a read of ``nbytes`` from the disk."""
        queue_us = self.queued_bytes / self.disk_bytes_per_us
        return ("queue", queue_us, 0.0), ("read", nbytes / self.disk_bytes_per_us, nbytes)

    def kv(self, ways: Ways) -> tuple[float, float]:
        """Return (microseconds of the device's wait and load, microseconds of all) of fetching and loading KV."""
        disk_us = self.fetching(self.costs.layers * self.costs.kv_bytes, ways.kv_end - ways.begin)
        load_us = (ways.kv_end - ways.covered) * self.loaded_us
        return max(0.0, disk_us - self.ahead_us) + load_us, disk_us + load_us

    def from_hidden(self, begin: int, start: int, end: int) -> tuple[float, float, int]:
        """Return the same two times, and the layers to compute from tokens, of restoring tokens [start, end).

        Hidden states from ``begin`` on are read for it. A layout must be set.
        """
        assert self.layout is not None
        device_us, recomputed = self.restoring(start, end)
        disk_us = self.fetching(self.layout.token_bytes, end - begin)
        chunks = (end - begin) // chunk_tokens(self.layout.page_size)
        waited_us = pipelined_us(max(0.0, disk_us - self.ahead_us), device_us, chunks)
        return waited_us, pipelined_us(disk_us, device_us, chunks), recomputed

    def restoring(self, start: int, end: int, recomputed: int | None = None) -> tuple[float, int]:
        """Return (microseconds on the device alone, layers from tokens) of the best mix, or with ``recomputed``.

        A layer with a hidden state in the pages can be computed as well: that pays where the link is the slower side.
        The time is the observed one, if anything was observed. A layout must be set.
        """
        layout = self.layout
        assert layout is not None
        times = layer_times(self.costs, end - start, self.link_bytes_per_us, context=start)
        first, held = layout.absent, layout.from_hidden
        mixes = [
            made(times, tokens=count, hidden=first + held - count, kv=layout.loaded_layers, ends_early=True)
            for count in (range(first, first + held + 1) if recomputed is None else (recomputed,))
        ]
        best = min(mixes, key=lambda mix: mix.time_us)
        return (end - start) * self.restored_us or best.time_us, best.tokens


def choose(prices: Prices, ways: Ways) -> Choice:
    """Return the fastest way; of equals the first of KV, hidden states, computing, sparse read.

    Pure, O(stretches x layers).
    """
    return min(ways_back(prices, ways), key=lambda choice: choice.total_us)


def ways_back(prices: Prices, ways: Ways) -> list[Choice]:
    """Return every possible way: KV, hidden states, computing, sparse read. Pure, O(stretches x layers)."""
    found = []
    if ways.kv_end > ways.covered:
        waited_us, restoring_us = prices.kv(ways)
        rest_us = prices.computing(ways.kv_end, ways.tokens)
        rest: tuple[Part, ...] = (("compute", rest_us, 0.0),)
        if ways.following_end > ways.kv_end or ways.following_later:
            spans = ((ways.kv_end, ways.following_end), *ways.following_later)
            following = _from_hidden(prices, ways.tokens, ways.kv_end, spans)
            if following.total_us < rest_us:
                rest_us, rest = following.total_us, following.parts
        nbytes = (ways.kv_end - ways.begin) * prices.costs.layers * prices.costs.kv_bytes
        load_us = (ways.kv_end - ways.covered) * prices.loaded_us
        parts = (*prices.reading_parts(nbytes), ("load", load_us, 0.0), *rest)
        found.append(Choice("kv", waited_us + rest_us, restoring_us, kind=KV_FROM_DISK, parts=parts))
    if ways.hidden_end > ways.covered or ways.later:
        spans = ((ways.begin, ways.hidden_end), *ways.later)
        found.append(_from_hidden(prices, ways.tokens, ways.covered, spans))
    total_us = prices.computing(ways.covered, ways.tokens)
    found.append(Choice("recompute", total_us, kind="tokens", parts=(("compute", total_us, 0.0),)))
    if ways.sparse_end > ways.covered and prices.sparse is not None:
        found.append(_in_part(prices, prices.sparse, ways))
    return found


def _in_part(prices: Prices, sparse: SparsePrices, ways: Ways) -> Choice:
    """Return the way whose step waits for the disk and its queue, and then computes behind the chosen tokens."""
    span = ways.sparse_end - ways.covered
    queued_us = max(0.0, prices.fetching(0.0, 0) - prices.ahead_us)
    reading_us = sparse.reading(span)
    context = ways.covered + ceil(sparse.ratio * span)
    computing_us = prices.computing(context, context + ways.tokens - ways.sparse_end)
    copies_us = span * sparse.chosen.copied_us / sparse.chosen.pace
    parts: tuple[Part, ...] = (
        ("queue", queued_us, 0.0),
        ("keys", sparse.keys.reading(span), span * sparse.keys.token_bytes),
        ("chosen", sparse.chosen.reading(span) - copies_us, span * sparse.chosen.token_bytes),
        ("copies", copies_us, 0.0),
        ("compute", computing_us, 0.0),
    )
    return Choice("sparse", queued_us + reading_us + computing_us, reading_us, kind=IMPORTANT_FROM_DISK, parts=parts)


def _from_hidden(prices: Prices, tokens: int, covered: int, stretches: Sequence[tuple[int, int]]) -> Choice:
    """Return the way by hidden states of the best number of these stretches; the first may be empty.

    O(stretches x layers). ``now_us`` and ``read_us`` are when the device and the disk are done with all stretches
    before. The disk goes on with the next stretch at once; of its queue, only the part before the first stretch is
    known.
    """
    assert prices.layout is not None
    found: list[Choice] = []
    now_us, read_us, disk_us, device_us, chunks = 0.0, -prices.ahead_us, 0.0, 0.0, 0
    nbytes_read = holes_us = 0.0
    recomputed: int | None = None
    position, size = covered, chunk_tokens(prices.layout.page_size)
    for place, (begin, end) in enumerate(stretches):
        if end <= begin:
            continue
        start = max(begin, covered)
        restoring_us, recomputed = prices.restoring(start, end, recomputed)
        nbytes_read += (end - begin) * prices.layout.token_bytes
        nbytes = (end - begin) * prices.layout.token_bytes + (prices.queued_bytes if not found else 0.0)
        reading_us = nbytes / prices.disk_bytes_per_us
        hole_us = prices.computing(position, start) if start > position else 0.0
        now_us, holes_us = now_us + hole_us, holes_us + hole_us
        read_us += reading_us
        now_us += pipelined_us(max(0.0, read_us - now_us), restoring_us, (end - begin) // size)
        disk_us, device_us, chunks = disk_us + reading_us, device_us + restoring_us, chunks + (end - begin) // size
        position = end
        rest_us = prices.computing(end, tokens)
        choice = Choice(
            form="hidden",
            total_us=now_us + rest_us,
            restoring_us=pipelined_us(disk_us, device_us, chunks),
            recomputed=recomputed,
            kind=hidden_kind(prices.layout, recomputed),
            later=place,
            parts=(
                *prices.reading_parts(nbytes_read),
                ("restore", device_us, 0.0),
                ("compute", holes_us + rest_us, 0.0),
            ),
        )
        found.append(choice)
    return min(found, key=lambda choice: choice.total_us)


def hidden_kind(layout: KvGeometry | None, recomputed: int) -> str:
    """Return the name of what a restoration from pages of this layout mixes, with ``recomputed`` layers from tokens."""
    if layout is None:
        return ""
    methods = ["hidden from disk"] if recomputed < layout.absent + layout.from_hidden else []
    methods += [KV_FROM_DISK] if layout.loaded_layers else []
    methods += ["tokens"] if recomputed else []
    return " + ".join(methods)


def prices_of(state: CellState, worker: Worker, storage: Storage, ahead_us: float = 0.0) -> Prices | None:
    """Return the present costs of a worker and its node's storage; None without a profile. Changes nothing."""
    costs = layer_costs(state, worker)
    profile = worker.restoration
    if costs is None or profile is None or profile.link_bytes_per_us <= 0:
        return None
    observed = worker.restoring.per_us(0.0)
    restored_us = 1 / observed if observed > 0 else 0.0
    return _prices(state, worker, storage, costs, profile.link_bytes_per_us, restored_us, ahead_us)


def observed_prices(state: CellState, worker: Worker, storage: Storage, ahead_us: float = 0.0) -> Prices | None:
    """Return the same by the cell's observations of computing and loading, without a profile. Changes nothing.

    None before anything was computed. Restoring from hidden states costs as much as computing there.
    """
    geometry, fit = state.geometry, compute_fit(state, worker)
    if geometry is None or not fit.reports:
        return None
    token_us, pair_us = (us / geometry.layers for us in fit.token_and_pair_us())
    kv_bytes = geometry.token_bytes / geometry.layers
    costs = LayerCosts(
        layers=geometry.layers,
        kv_bytes=kv_bytes,
        hidden_bytes=kv_bytes,
        hidden_us=token_us,
        token_us=token_us,
        pair_us=pair_us,
    )
    loaded_us = loaded_token_us(state, worker)
    link_bytes_per_us = geometry.token_bytes / loaded_us if loaded_us > 0 else inf
    return _prices(state, worker, storage, costs, link_bytes_per_us, 0.0, ahead_us)


def _prices(
    state: CellState,
    worker: Worker,
    storage: Storage,
    costs: LayerCosts,
    link_bytes_per_us: float,
    restored_us: float,
    ahead_us: float,
) -> Prices:
    """Return the costs of a worker with the present ones of its storage and link. Changes nothing."""
    return Prices(
        costs=costs,
        disk_bytes_per_us=disk_bytes_per_us(storage),
        queued_bytes=queued_bytes(state, storage),
        link_bytes_per_us=link_bytes_per_us,
        loaded_us=loaded_token_us(state, worker),
        restored_us=restored_us,
        layout=layout_for(storage, worker),
        ahead_us=ahead_us,
    )
