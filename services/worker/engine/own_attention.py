"""Models that attend by code of their own: each request of a step is a forward pass of its own, over its pages.

Some of the library's classes do not go through its attention interface (BLOOM, MPT, Falcon, GPT-Neo), or ask more of
it than ours does (Doge's masks, DiffLlama's two calls a layer). What all of them go through is the library's cache: a
layer hands its new K and V to ``update`` and attends to what it gets back. Here a cache writes them into the pool and
gives back what the request's pages hold, so that the model computes what it computes in the library, whatever that is:
biases (ALiBi, Press et al., arXiv 2108.12409), masks, windows.

It is the slow way. A step reads the weights once for each of its requests, and a layer copies all K and V of a request
out of its pages. Nothing but ``forward`` can be had of such a model: no step of attention that is not the pool's, so no
hidden states and no prefixes in part.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from services.worker.engine.attention import AttentionCall, AttentionStep
from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment, pages_for
from services.worker.engine.paged_step import AttentionBackend
from services.worker.engine.uploads import on_device
from services.worker.kv.device_pool import DevicePool
from shared.errors import InvariantViolated, UnsupportedModel

OWN_ATTENTION = "eager"
"""What such a model is loaded with: the implementation that every class has."""


class OwnAttention:
    """A :class:`~services.worker.engine.fused.choice.StepForward` over the library's own module."""

    def __init__(self, model: Any, pool: DevicePool) -> None:
        self._model, self._pool = model, pool

    def paged(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: ForwardMeta,
        attention: AttentionBackend,
        last_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See ``ModelRunner.forward``. Logits are in the order of ``last_rows``."""
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
        """Not to be had. Raises UnsupportedModel."""
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
        """Rows of one request, from row ``first`` of the batch on; float32 logits of ``wanted`` rows of its own."""
        slots = meta.slots[first : first + segment.rows]
        pages = torch.from_numpy(segment.pages[: pages_for(segment.length, meta.page_size)]).long()
        pages = pages.to(self._pool.device)
        layers = range(self._pool.geometry.layers)
        cache = Cache(layers=[_PagedLayer(self._pool, layer, segment, pages, slots, meta.gate) for layer in layers])
        return call_over(self._model, ids, positions, cache, wanted).float()


def attend_itself(model: Any) -> None:
    """Have a model that was loaded with another implementation attend by its own."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:  # What the library offers for this changes nothing in classes without the interface.
            config._attn_implementation = OWN_ATTENTION


def unsteppable(model: Any) -> UnsupportedModel:
    """Why such a model computes nothing but whole passes over the pool."""
    return UnsupportedModel(
        f"{model.config.model_type} attends by code of its own, so it computes over all of a prefix and nothing else"
    )


def call_over(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, cache: Cache, wanted: torch.Tensor
) -> torch.Tensor:
    """Logits ``[wanted, vocab]`` of one request's rows; ids and positions int64 [T]."""
    told = {"position_ids": positions[None]} if "position_ids" in inspect.signature(model.forward).parameters else {}
    output = model(input_ids=ids[None], past_key_values=cache, use_cache=True, logits_to_keep=wanted, **told)
    logits: torch.Tensor = output.logits[0]
    return logits


def in_order(segments: Sequence[Segment], page_size: int) -> Iterator[int]:
    """Numbers of ``segments``, each behind those whose rows its prefix holds: a page that one fills may be another's
    prefix in the same step.
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
    """One layer of one request, in the place of what the library would keep."""

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
        self._tokens, self._length = segment.context, segment.length
        self.is_initialized = segment.context > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to make."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows, wait for the layer's loads, and give back all: ``[1, kv_heads, tokens, head_dim]``."""
        for half, new in ((self._pool.k(self._layer), key_states), (self._pool.v(self._layer), value_states)):
            half.flatten(0, 1).index_copy_(0, self._slots, new[0].transpose(0, 1))
        if self._gate is not None:
            self._gate.wait(self._layer)
        self._tokens, self.is_initialized = self._length, True
        return self._read(self._pool.k(self._layer)), self._read(self._pool.v(self._layer))

    def _read(self, half: torch.Tensor) -> torch.Tensor:
        return half.index_select(0, self._pages).flatten(0, 1)[: self._length].transpose(0, 1)[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self._tokens

    def get_max_length(self) -> int:
        return -1


class _Recording(CacheLayerMixin):
    """Remembers what a layer hands over, and gives back that alone."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to make."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.given.append((key_states, value_states))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@torch.inference_mode()
def recorded(model: Any, layers: int) -> list[AttentionCall]:
    """Record what each of ``layers`` layers hands to the cache, for two tokens, as calls whose queries are as their
    keys.

    Raises UnsupportedModel unless each layer does so once.
    """
    cache = Cache(layers=[_Recording() for _ in range(layers)])
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[vocab_size // 2, vocab_size // 3]], device=model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    counts = [len(layer.given) for layer in cache.layers]
    if counts != [1] * layers:
        raise UnsupportedModel(
            f"{model.config.model_type} has {layers} layers but gave the library's cache K and V {sum(counts)} times"
        )
    return [
        AttentionCall(number, key, key, value, 1.0, None, None, {})
        for number, layer in enumerate(cache.layers)
        for key, value in layer.given
    ]
