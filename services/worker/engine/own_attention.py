"""Models that attend by code of their own: each request of a step is a forward pass of its own, over its pages.

Some of the library's classes do not go through its attention interface (BLOOM, MPT, Falcon, GPT-Neo), or need features
that our attention lacks (Doge's masks, DiffLlama's two calls a layer, masks by the indexer of DeepSeek-V3.2). All of
them go through the library's cache: a layer hands its new K and V to ``update``, and index keys to ``update_indexer``,
and attends to what is returned. Here a cache writes them into the pool and returns those in the request's pages, so
that the model computes the same as in the library, with its biases (ALiBi, Press et al., arXiv 2108.12409), masks and
windows.

This is slow. A step reads the weights once for each of its requests, and a layer copies all K and V of a request out of
its pages. Such a model supports ``forward`` alone: all attention is over the pool, so there are no hidden states and no
sparse prefixes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from services.worker.engine.attention import AttentionStep
from services.worker.engine.cache_argument import given_cache
from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment, pages_for
from services.worker.engine.paged_step import AttentionBackend
from services.worker.engine.uploads import on_device
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import LatentsKept
from shared.errors import InvariantViolated, UnsupportedModel

OWN_ATTENTION = "eager"
"""The implementation that such a model is loaded with: every class has it."""


class OwnAttention:
    """A :class:`~services.worker.engine.fused.choice.StepForward` by the library's own module."""

    def __init__(self, model: Any, pool: DevicePool) -> None:
        """Call ``model``, whose attention is its own (:func:`attend_itself`), with K and V in ``pool``."""
        self._model, self._pool = model, pool

    def paged(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: ForwardMeta,
        attention: AttentionBackend,
        last_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step request by request, see ``ModelRunner.forward``. Logits are in the order of ``last_rows``."""
        ids, positions, last_rows = on_device((ids, positions, last_rows), self._pool.device)
        logits: torch.Tensor | None = None
        for number in in_order(meta.segments, meta.page_size):
            segment = meta.segments[number]
            first = sum(each.rows for each in meta.segments[:number])
            wanted = ((last_rows >= first) & (last_rows < first + segment.rows)).nonzero()[:, 0]
            rows = slice(first, first + segment.rows)
            found = self._compute(ids[rows], positions[rows], segment, meta, first, last_rows[wanted] - first)
            if logits is None:
                logits = found.new_empty((len(last_rows), found.shape[-1]))
            logits[wanted] = found
        assert logits is not None
        return logits

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
        cache = Cache(
            layers=[
                (_PagedLatents if isinstance(layer.kept, LatentsKept) else _PagedLayer)(
                    self._pool, number, segment, pages, slots, meta.gate
                )
                for number, layer in enumerate(self._pool.planes.layers)
            ]
        )
        return call_over(self._model, ids, positions, cache, wanted).float()


def own_forward(model: Any, pool: DevicePool) -> OwnAttention | None:
    """Return the forward of a model whose attention is its own, with K and V in ``pool``; None for other models."""
    return OwnAttention(model, pool) if model.config._attn_implementation == OWN_ATTENTION else None


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


def in_order(segments: Sequence[Segment], page_size: int) -> Iterator[int]:
    """Yield the numbers of ``segments``, each behind those whose rows its prefix holds.

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
        yield from ready
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


class _PagedLatents(_PagedLayer):
    """A layer whose K and V are latents, with the keys of its indexer beside them, in one row a token."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the same with latents ``[1, 1, tokens, rank]`` and their rotated part ``[1, 1, tokens, rope]``."""
        rank, end = key_states.shape[-1], key_states.shape[-1] + value_states.shape[-1]
        self._write(0, key_states[0, 0])
        self._write(rank, value_states[0, 0])
        self._computed()
        rows = self._read(self._pool.k(self._layer))
        return rows[..., :rank], rows[..., rank:end]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the new index keys ``[1, T, index]``, wait for loads, and return all, ``[1, tokens, index]``."""
        index = indexer_key_states.shape[-1]
        self._write(-index, indexer_key_states[0])
        self._computed()
        return self._read(self._pool.k(self._layer))[0, ..., -index:]

    def _write(self, first: int, new: torch.Tensor) -> None:
        rows = self._pool.k(self._layer).flatten(0, 1)[:, 0]
        rows = rows[:, first:] if first < 0 else rows[:, first : first + new.shape[1]]
        rows.index_copy_(0, self._slots, new)


class _Recording(CacheLayerMixin):
    """A layer of the library's cache that records each call, and returns its K and V alone."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.index: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: there is nothing to make."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.given.append((key_states, value_states))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        self.index = indexer_key_states
        return indexer_key_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@dataclass(frozen=True, slots=True)
class Given:
    """What a layer handed to the cache for two tokens.

    key and value [1, kv_heads, 2, head_dim]; index [1, 2, index_dim], keys of an indexer, None without one.
    """

    key: torch.Tensor
    value: torch.Tensor
    index: torch.Tensor | None


@torch.inference_mode()
def recorded(model: Any, layers: int) -> list[Given]:
    """Record what each of ``layers`` layers hands to the cache for two tokens.

    Raises UnsupportedModel unless each layer does so once.
    """
    cache = Cache(layers=[_Recording() for _ in range(layers)])
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[vocab_size // 2, vocab_size // 3]], device=model.device)
    model(input_ids=ids, use_cache=True, **given_cache(model.forward, cache))
    counts = [len(layer.given) for layer in cache.layers]
    if counts != [1] * layers:
        raise UnsupportedModel(
            f"{model.config.model_type} has {layers} layers but gave the library's cache K and V {sum(counts)} times"
        )
    return [Given(key, value, layer.index) for layer in cache.layers for key, value in layer.given]
