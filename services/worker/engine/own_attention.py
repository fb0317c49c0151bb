"""Models that attend by code of their own: each request of a step is a call of the model of its own, over its pages.

Some of the library's classes do not go through its attention interface (BLOOM, MPT, Falcon, GPT-Neo), or need features
that our attention lacks (Doge's masks, DiffLlama's two calls a layer, masks by the indexers of DeepSeek-V3.2 and
Qwen4-Exp). All of them go through the library's cache: a layer hands its new K and V to ``update``, and index keys to
``update_indexer``, and attends to what is returned. Here a cache writes them into the pool and returns those in the
request's pages, so that the model computes the same as in the library, with its biases (ALiBi, Press et al., arXiv
2108.12409) and masks. Modules with states beside such layers are computed as in all models
(:mod:`~services.worker.engine.states.step`).

Decoding requests are called in lockstep (:mod:`~services.worker.engine.lockstep`), so linear layers and experts compute
the rows of all of them at once, to the same bits as one by one. Longer chunks are calls by themselves. A layer copies
all K and V of a request out of its pages, so how many calls are in lockstep is bounded by what they copy. Such a model
supports ``forward`` alone: all attention is over the pool, so there are no hidden states and no sparse prefixes.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from services.worker.engine.attention import AttentionStep
from services.worker.engine.cache_argument import given_cache
from services.worker.engine.compressed import Blocks, CompressedLayer
from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment, pages_for
from services.worker.engine.lockstep import in_lockstep, join_layers
from services.worker.engine.packed_linear import pack_read_linears
from services.worker.engine.paged_step import AttentionBackend
from services.worker.engine.states.going_on import Arguments
from services.worker.engine.states.layers import StateModule, carrying
from services.worker.engine.states.step import Slotted, StateStep, slot_memory
from services.worker.engine.uploads import on_device
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import LatentsKept, RowsKept
from shared.errors import InvariantViolated, UnsupportedModel
from shared.messages.pools import DTYPE_BYTES

OWN_ATTENTION = "eager"
"""The implementation that such a model is loaded with: every class has it."""

HELD_SHARE = 8
"""Calls in lockstep hold copies of K and V of up to this fraction of the weights' bytes, if one does not hold more."""

LEAST_HELD_BYTES = 64 * 2**20
"""What they may hold in any case."""


class OwnAttention:
    """A :class:`~services.worker.engine.fused.choice.StepForward` by the library's own module."""

    def __init__(self, model: Any, pool: DevicePool, states: Sequence[Slotted] = (), *, model_bytes: int = 0) -> None:
        """Call ``model``, whose attention is its own (:func:`attend_itself`), with K and V in ``pool``.

        Its linear layers are packed by now, if they will be. ``states`` are its modules that carry states, and its
        layers of compressed blocks; ``model_bytes`` counts its weights. ``slots`` holds the states of requests within
        pages, None without any.
        """
        pack_read_linears(model)
        join_layers(model)
        self._model, self._pool = model, pool
        self._held_tokens = max(model_bytes // HELD_SHARE, LEAST_HELD_BYTES) // _held_bytes(model.config, pool)
        self._compressed = [each for each in states if isinstance(each, CompressedLayer)]
        self.slots = slot_memory(states, pool.pages, pool.device) if states else None

    def paged(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: ForwardMeta,
        attention: AttentionBackend,
        last_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step call by call, see ``ModelRunner.forward``. Logits are in the order of ``last_rows``."""
        firsts = [0, *accumulate(each.rows for each in meta.segments)]
        # Found on the host: a device would have to be waited for.
        last = last_rows.cpu()
        places = [((last >= first) & (last < end)).nonzero()[:, 0] for first, end in pairwise(firsts)]
        own_rows = [last[some] - first for some, first in zip(places, firsts, strict=False)]
        ids, positions, *sent = on_device((ids, positions, *places, *own_rows), self._pool.device)
        places, own_rows = sent[: len(places)], sent[len(places) :]
        logits: torch.Tensor | None = None
        for numbers in self._groups(meta):
            rows = [slice(firsts[number], firsts[number + 1]) for number in numbers]
            calls = [
                partial(
                    self._compute,
                    ids[own],
                    positions[own],
                    meta.segments[number],
                    meta,
                    own.start,
                    own_rows[number],
                )
                for number, own in zip(numbers, rows, strict=True)
            ]
            for number, found in zip(numbers, in_lockstep(calls), strict=True):
                if logits is None:
                    logits = found.new_empty((len(last), found.shape[-1]))
                logits[places[number]] = found
        assert logits is not None
        return logits

    def _groups(self, meta: ForwardMeta) -> Iterator[Sequence[int]]:
        """Yield the numbers of segments that are computed in lockstep: single rows, as many as may hold their copies.

        Of longer segments masks and scores would be held as well, and their rows use the weights they read.
        """
        for ready in in_order(meta.segments, meta.page_size):
            group: list[int] = []
            tokens = 0
            for number in ready:
                segment = meta.segments[number]
                if segment.rows > 1:
                    yield [number]
                    continue
                if group and tokens + segment.length > self._held_tokens:
                    yield group
                    group, tokens = [], 0
                group.append(number)
                tokens += segment.length
            if group:
                yield group

    def stepped(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Raise UnsupportedModel: such a model attends to nothing but its pages."""
        raise unsteppable(self._model)

    def _compute(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        segment: Segment,
        meta: ForwardMeta,
        first: int,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the rows of one request, from row ``first`` of the batch on.

        Return float32 logits of ``wanted`` rows of its own.
        """
        slots = meta.slots[first : first + segment.rows]
        pages = torch.from_numpy(segment.pages[: pages_for(segment.length, meta.page_size)]).long()
        pages = pages.to(self._pool.device)
        layers = [
            (_PagedRows if isinstance(layer.kept, LatentsKept | RowsKept) else _PagedLayer)(
                self._pool, number, segment, pages, slots, meta.gate
            )
            for number, layer in enumerate(self._pool.planes.layers)
        ]
        for each in self._compressed:
            layers[each.layer].keep_blocks(self._blocks(each, segment, pages, meta.gate))
        cache = Cache(layers=layers)
        with nullcontext() if self.slots is None else carrying(self._state_step(segment, slots, meta, self.slots)):
            return call_over(self._model, ids, positions, cache, wanted).float()

    def _blocks(self, layer: CompressedLayer, segment: Segment, pages: torch.Tensor, gate: LayerGate | None) -> Blocks:
        assert self.slots is not None
        slot = None
        if segment.running >= 0:
            slot = self.slots[segment.running, layer.first : layer.first + layer.nbytes]
        unit = self._pool.planes.last_unit(layer.entry)
        wait = partial(gate.wait, unit) if gate is not None else lambda: None
        return Blocks(layer, self._pool, pages, (segment.context, segment.length), slot, wait)

    def _state_step(
        self, segment: Segment, slots: torch.Tensor, meta: ForwardMeta, state_slots: torch.Tensor
    ) -> StateStep:
        alone = ForwardMeta((segment,), segment.rows, meta.page_size, slots, first_slot=-1, gate=meta.gate)
        return StateStep(alone, self._pool, state_slots)


def own_forward(
    model: Any, pool: DevicePool, states: Sequence[Slotted] = (), *, model_bytes: int
) -> OwnAttention | None:
    """Return the forward of a model whose attention is its own, with K and V in ``pool``; None for other models."""
    if model.config._attn_implementation != OWN_ATTENTION:
        return None
    return OwnAttention(model, pool, states, model_bytes=model_bytes)


def _held_bytes(config: Any, pool: DevicePool) -> int:
    """Return about how many bytes a call holds of one token while a layer attends: K and V of all query heads, twice.

    Eager attention repeats K and V for the query heads that share them, or expands them from latents.
    """
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values = max(int(layer.num_attention_heads) * _head_values(layer) for layer in layers)
    return 2 * values * DTYPE_BYTES[pool.geometry.dtype]


def _head_values(config: Any) -> int:
    """Return the values of K and V of one head."""
    if getattr(config, "qk_nope_head_dim", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return 2 * int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attend_itself(model: Any) -> None:
    """Have a model that was loaded with another implementation of attention use its own."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:  # What the library offers for this changes nothing in classes without the interface.
            config._attn_implementation = OWN_ATTENTION


def unsteppable(model: Any) -> UnsupportedModel:
    """Return the error that says why such a model computes nothing but whole passes over the pool."""
    return UnsupportedModel(
        f"{model.config.model_type} attends by code of its own, so it computes over whole prefixes only"
    )


def call_over(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, cache: Cache, wanted: torch.Tensor
) -> torch.Tensor:
    """Return logits ``[wanted, vocab]`` of one request's rows; ids and positions int64 [T]."""
    told = {"position_ids": positions[None]} if "position_ids" in inspect.signature(model.forward).parameters else {}
    output = model(
        input_ids=ids[None], use_cache=True, logits_to_keep=wanted, **given_cache(model.forward, cache), **told
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def in_order(segments: Sequence[Segment], page_size: int) -> Iterator[Sequence[int]]:
    """Yield the numbers of ``segments``, each behind those whose rows its prefix holds, as many at once as may be.

    A page that one fills may be another's prefix in the same step. Raises InvariantViolated where segments wait for one
    another.
    """
    filled = [_pages(segment, segment.context, segment.length, page_size) for segment in segments]
    read = [_pages(segment, 0, segment.context, page_size) for segment in segments]
    left = list(range(len(segments)))
    while left:
        ready = [
            number for number in left if not any(read[number] & filled[other] for other in left if other != number)
        ]
        if not ready:
            raise InvariantViolated("requests of a step wait for one another's pages")
        yield ready
        left = [number for number in left if number not in ready]


def _pages(segment: Segment, start: int, end: int, page_size: int) -> set[int]:
    return set(segment.pages[start // page_size : pages_for(end, page_size)].tolist())


class _PagedLayer(CacheLayerMixin):
    """A layer of the library's cache, for one request, whose K and V are in the pool."""

    is_sliding = False  # Masks hide what a window does.

    def __init__(
        self,
        pool: DevicePool,
        layer: int,
        segment: Segment,
        pages: torch.Tensor,
        slots: torch.Tensor,
        gate: LayerGate | None,
    ) -> None:
        super().__init__()
        self._pool, self._layer, self._pages, self._slots, self._gate = pool, layer, pages, slots, gate
        self._unit = pool.planes.last_unit(layer)
        self._tokens, self._length = segment.context, segment.length
        self.is_initialized = segment.context > 0

    def keep_blocks(self, blocks: Blocks) -> None:
        """Keep the layer's compressed blocks as ``blocks`` does, which the library's layer does itself."""
        self.store_compression_weights = blocks.store_compression_weights
        self.update_overlap_state = blocks.update_overlap_state
        self.update_compressor_states = blocks.update_compressor_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool exists already."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows, wait for loads, and return all K and V, ``[1, kv_heads, tokens, head_dim]`` each."""
        for half, new in ((self._pool.k(self._layer), key_states), (self._pool.v(self._layer), value_states)):
            half.flatten(0, 1).index_copy_(0, self._slots, new[0].transpose(0, 1))
        self._computed()
        return self._read(self._pool.k(self._layer)), self._read(self._pool.v(self._layer))

    def _computed(self) -> None:
        """Note that the new rows are written, and wait for loads."""
        if self._gate is not None:
            self._gate.wait(self._unit)
        self._tokens, self.is_initialized = self._length, True

    def _read(self, half: torch.Tensor) -> torch.Tensor:
        return half.index_select(0, self._pages).flatten(0, 1)[: self._length].transpose(0, 1)[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self._tokens

    def get_max_length(self) -> int:
        return -1


class _PagedRows(_PagedLayer):
    """A layer whose K and V, or latents, are in one row a token, with the keys of its indexer behind them."""

    @cached_property
    def _part(self) -> int:
        return self._pool.planes.parts_of(self._layer)[0].number

    @cached_property
    def _is_shared(self) -> bool:
        kept = self._pool.planes.layers[self._layer].kept
        return isinstance(kept, RowsKept) and not kept.v_dim

    @cached_property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions of earlier tokens, ``[3, 1, tokens]``, None without any; a model may put others in its place.

        Qwen4-Exp rotates pooled index keys by them, and keeps them in the library's cache of its first such layer.
        """
        return torch.arange(self._tokens, device=self._pool.device).expand(3, 1, -1) if self._tokens else None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the same. Latents are ``[1, 1, tokens, rank]``, and their rotated part ``[1, 1, tokens, rope]``.

        Where V is K, it is kept once.
        """
        key, value = (new[0].transpose(0, 1).flatten(1) for new in (key_states, value_states))
        heads, rank, end = key_states.shape[1], key.shape[1], key.shape[1] + value.shape[1]
        self._write(0, key)
        if not self._is_shared:
            self._write(rank, value)
        self._computed()
        rows = self._read(self._pool.k(self._part))[0, 0]
        if self._is_shared:
            whole = rows[:, :rank].view(self._length, heads, -1).transpose(0, 1)[None]
            return whole, whole
        whole_key, whole_value = (
            half.view(self._length, heads, -1).transpose(0, 1)[None] for half in (rows[:, :rank], rows[:, rank:end])
        )
        return whole_key, whole_value

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the new index keys ``[1, T, index]``, wait for loads, and return all, ``[1, tokens, index]``."""
        index = indexer_key_states.shape[-1]
        self._write(-index, indexer_key_states[0])
        self._computed()
        return self._read(self._pool.k(self._part))[0, ..., -index:]

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Do the same with index keys ``[1, 1, T, index]``, as MiniMax-M3 has them."""
        return self.update_indexer(idx_k[:, 0])[:, None]

    def _write(self, first: int, new: torch.Tensor) -> None:
        rows = self._pool.k(self._part).flatten(0, 1)[:, 0]
        rows = rows[:, first:] if first < 0 else rows[:, first : first + new.shape[1]]
        rows.index_copy_(0, self._slots, new)


class _Recording(CacheLayerMixin):
    """A layer of the library's cache that records each call, and returns its K and V alone."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.index: torch.Tensor | None = None
        self.indexer_position_ids: torch.Tensor | None = None
        self.weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: there is nothing to make."""

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Record K and gates, and close no block."""
        self.weights[name] = kv, gate
        return kv[:, :0], gate[:, :0], 0

    def update_compressor_states(self, _: str, compressed: torch.Tensor) -> torch.Tensor:
        return compressed

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.given.append((key_states, value_states))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        self.index = indexer_key_states
        return indexer_key_states

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        return self.update_indexer(idx_k[:, 0])[:, None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@dataclass(frozen=True, slots=True)
class Given:
    """What a layer handed to the cache for two tokens.

    key and value [1, kv_heads, 2, head_dim], one tensor where V is K; index [1, 2, index_dim], keys of an indexer, None
    without one; weights [1, 2, width] each, K and gates of the blocks that the layer compresses, by name.
    """

    key: torch.Tensor
    value: torch.Tensor
    index: torch.Tensor | None
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class _Beginning:
    """The modules with states of one sequence that begins; nothing is kept of them."""

    def carry(self, module: StateModule, arguments: Arguments) -> Any:
        return module.call(arguments, None)[0]


@torch.inference_mode()
def recorded(model: Any, layers: int, attending: Collection[int]) -> dict[int, Given]:
    """Record what each of ``layers`` layers hands to the cache for two tokens, by layer.

    Raises UnsupportedModel unless each of the ``attending`` layers does so once, and no other.
    """
    cache = Cache(layers=[_Recording() for _ in range(layers)])
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[vocab_size // 2, vocab_size // 3]], device=model.device)
    with carrying(_Beginning()):
        model(input_ids=ids, use_cache=True, **given_cache(model.forward, cache))
    counts = [len(layer.given) for layer in cache.layers]
    if counts != [int(layer in attending) for layer in range(layers)]:
        kind = "layers" if len(attending) == layers else "layers with attention"
        raise UnsupportedModel(
            f"{model.config.model_type} has {len(attending)} {kind} but gave the library's cache K and V "
            f"{sum(counts)} times"
        )
    found = ((number, layer, layer.given[0]) for number, layer in enumerate(cache.layers) if layer.given)
    return {number: Given(key, value, layer.index, layer.weights) for number, layer, (key, value) in found}
