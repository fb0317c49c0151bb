"""Checks that need the model to run: the shape of its KV, and that our attention computes what its own does.

A model that bypasses the attention interface would run, warn at most, and answer wrongly. So before a model serves,
forward passes without attention record every call to it, and a paged one is compared with the model's own ``eager``
attention without a paged pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from services.worker.engine.attention import ATTENTION_NAME, AttentionCall, attending
from services.worker.engine.causality import MASK_PROBE_NAME, CausalityCheck
from services.worker.engine.chunks import shortened
from services.worker.engine.compressed import COMPRESSED_TYPES, CompressedKept, CompressedLayer, Series
from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.engine.model_faults import AttendsOtherwise
from services.worker.engine.own_attention import OWN_ATTENTION, Given, recorded
from services.worker.engine.rounding_cache import rounding_logits
from services.worker.engine.states.layers import StateModule, layers_with_attention
from services.worker.engine.states.page_sizes import page_size_for, with_states
from services.worker.engine.told_positions import unpadded
from services.worker.kv.device_pool import DTYPE_NAMES
from services.worker.kv.planes import (
    HeadsKept,
    Kept,
    LatentsKept,
    NothingKept,
    PlaneMap,
    RowsKept,
    SharedKept,
    map_planes,
)
from shared.errors import UnsupportedModel

Forward = Callable[[torch.Tensor, torch.Tensor, ForwardMeta, torch.Tensor], torch.Tensor]

HARMLESS_EXTRAS = (
    "position_ids",
    "cache_position",
    "is_causal",
    "output_attentions",
    "use_cache",
    "output_router_logits",
)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest mean deviation of a row of logits, relative to the row's own spread. A wrong window or position gives
values near 1; rounding of half precision through 30 layers gives a few hundredths."""

_ROUNDED_TOLERANCE = 0.1
"""The same over K and V of eight bits: where a value lies between two codes, its last bit decides a sixteenth of it."""


class LayoutProbe:
    """An attention step that returns zeros and records every call."""

    def __init__(self) -> None:
        """Begin with no calls recorded."""
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Record the call, and return zeros [T, heads, value_dim]."""
        self.calls.append(call)
        _, heads, rows, _ = call.query.shape
        return call.query.new_zeros(rows, heads, call.value_dim)


@dataclass(frozen=True, slots=True)
class FoundKept:
    """The entries of a plane map, of a model in ``dtype``.

    ``sources`` are layers that were given the K and V of an earlier one, with the number of that one. ``blocks`` are
    what layers keep of compressed blocks beside their rows; in a plane map they have entries behind all others.
    """

    kept: tuple[Kept, ...]
    sources: Mapping[int, int]
    dtype: str
    blocks: Mapping[int, CompressedKept] = field(default_factory=dict)

    def page_size(self, chosen: int) -> int:
        """Return the tokens of a page: ``chosen``, or where that is 0 a number that suits the model.

        That number is from :func:`~services.worker.engine.states.page_sizes.page_size_for`, or a larger one with whole
        blocks.
        """
        least = math.lcm(*(each.rate for each in self.blocks.values()))
        return chosen or -(-page_size_for(self.kept, self.dtype) // least) * least

    @property
    def is_latents(self) -> bool:
        """Whether every layer keeps latents, which are of no head."""
        return all(isinstance(each, LatentsKept) for each in self.kept)

    @property
    def shared(self) -> tuple[Kept, ...]:
        """The entries where layers that were given K and V keep none."""
        return tuple(
            SharedKept(self.sources[layer]) if layer in self.sources else each for layer, each in enumerate(self.kept)
        )

    def planes(self, page_size: int) -> PlaneMap:
        """Return the plane map of pages of ``page_size`` tokens, see :meth:`page_size`."""
        size = self.page_size(page_size)
        blocks = tuple(each.state(size) for each in self.blocks.values())
        planes = map_planes((*self.kept, *blocks), size, self.dtype)
        # Where all layers are alike, one that shares K and V of another keeps a copy of its own.
        return planes if planes.is_identity else map_planes((*self.shared, *blocks), size, self.dtype)

    def compressed(self, page_size: int, first: int) -> tuple[CompressedLayer, ...]:
        """Return the layers of compressed blocks over such pages, from byte ``first`` of slots on."""
        found: list[CompressedLayer] = []
        for number, (layer, kept) in enumerate(self.blocks.items()):
            found.append(CompressedLayer(layer, len(self.kept) + number, kept, page_size, first))
            first += found[-1].nbytes
        return tuple(found)


def find_planes(
    model: Any, windows: list[int | None], page_size: int, context: int, states: Sequence[StateModule] = ()
) -> PlaneMap:
    """Return the plane map of ``model``; where ``page_size`` is 0, one is chosen. See :func:`find_kept`."""
    return find_kept(model, windows, context, states).planes(page_size)


def find_kept(model: Any, windows: list[int | None], context: int, states: Sequence[StateModule] = ()) -> FoundKept:
    """Run two tokens through ``model`` and derive from its calls to attention what its layers keep beside ``states``.

    Raises UnsupportedModel unless each layer that attends calls attention once, in order, with the windows that the
    configuration promises, needs nothing of attention that ours lacks, and gives a token the same K, no NaN, whether
    the batch is short or reaches to position ``context - 1``; AttendsOtherwise where attention of its own may do.
    """
    name = model.config.model_type
    if not set(COMPRESSED_TYPES).isdisjoint(getattr(model.config, "layer_types", None) or ()):
        raise AttendsOtherwise(f"{name} attends to compressed blocks of tokens, which our attention lacks")
    calls = layout_of(model, (1, 2))
    attending_layers = layers_with_attention(model.config, len(windows))
    if [call.layer for call in calls] != attending_layers:
        kind = "layers" if len(attending_layers) == len(windows) else "layers with attention"
        raise AttendsOtherwise(
            f"{name} has {len(attending_layers)} {kind} but made {len(calls)} calls through the attention interface"
        )
    for call in calls:
        window = windows[call.layer]
        if call.window != window:
            raise UnsupportedModel(f"layer {call.layer} of {name} has window {call.window}, configured is {window}")
        odd = sorted(key for key, value in call.extras.items() if key not in HARMLESS_EXTRAS and value is not None)
        if call.extras.get("is_causal") is False:
            raise UnsupportedModel(f"attention of {name} needs both directions, which we lack")
        if odd:
            raise AttendsOtherwise(f"attention of {name} needs {', '.join(odd)}, which we lack")
    _check_batch_independence(calls, layout_of(model, (1, context - 1)), name)
    for call in calls:
        _check_shapes(call, calls[0].key.dtype, name)
    kept: list[Kept] = [NothingKept()] * len(windows)
    for call in calls:
        kept[call.layer] = _kept(call)
    dtype = DTYPE_NAMES[calls[0].key.dtype if calls else model.dtype]
    return FoundKept(tuple(with_states(kept, states)), _sources(calls), dtype)


def find_own_kept(model: Any, layers: int, states: Sequence[StateModule] = ()) -> FoundKept:
    """Return what the layers of a model that attends by code of its own give to the library's cache, beside ``states``.

    Raises UnsupportedModel for what no page holds.
    """
    name, attending = model.config.model_type, layers_with_attention(model.config, layers)
    given = recorded(model, layers, attending)
    dtype = given[attending[0]].key.dtype if attending else model.dtype
    for layer, each in given.items():
        # Queries are not seen: as many as K, and as wide.
        call = AttentionCall(layer, each.key, each.key, each.value, 1.0, None, None, {})
        _check_shapes(call, dtype, name)
        if each.index is not None and each.index.dtype != each.key.dtype:
            raise UnsupportedModel(f"{name} has K of {each.key.dtype} and index keys of {each.index.dtype}")
    found = [_own_kept(given[layer]) if layer in given else NothingKept() for layer in range(layers)]
    kept = with_states(found, states)
    if not all(isinstance(each, HeadsKept) and each.k_dim == each.v_dim and each == kept[0] for each in kept):
        kept = [RowsKept(each.heads, each.k_dim, each.v_dim) if isinstance(each, HeadsKept) else each for each in kept]
    blocks = {layer: _blocks(model.config, layer, each) for layer, each in given.items() if each.weights}
    return FoundKept(tuple(kept), {}, DTYPE_NAMES[dtype], blocks)


def _blocks(config: Any, layer: int, given: Given) -> CompressedKept:
    """Return what a layer keeps of compressed blocks, see :mod:`services.worker.engine.compressed`."""
    kind = config.layer_types[layer]
    dims = {"compressor": config.head_dim, "indexer": config.index_head_dim}
    series = (
        Series(name, dims[name], kv.shape[-1], kv.dtype, gate.dtype) for name, (kv, gate) in given.weights.items()
    )
    return CompressedKept(config.compress_rates[kind], tuple(series))


def _own_kept(given: Given) -> Kept:
    """Return what a layer keeps: one row where there are index keys, or K and V of one head differ (latents)."""
    heads, k_dim, v_dim = given.key.shape[1], given.key.shape[-1], given.value.shape[-1]
    index = 0 if given.index is None else given.index.shape[-1]
    if given.value is given.key:
        return RowsKept(heads, k_dim, 0, index)
    if heads == 1 and (index or k_dim != v_dim):
        return LatentsKept(k_dim, v_dim, index)
    return RowsKept(heads, k_dim, v_dim, index) if index else HeadsKept(heads, k_dim, v_dim)


@torch.inference_mode()
def layout_of(model: Any, positions: tuple[int, int]) -> list[AttentionCall]:
    """Return the calls of attention for two tokens at ``positions``.

    At position 0 rotary embeddings of all kinds are alike.
    """
    probe = LayoutProbe()
    # Not the first tokens of a vocabulary: the embedding of a padding token is zero, and shows nothing.
    vocab_size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.tensor([[vocab_size // 2, vocab_size // 3]], device=model.device)
    with attending(probe):
        model(input_ids=tokens, position_ids=torch.tensor([positions], device=model.device), use_cache=False)
    return probe.calls


def _check_shapes(call: AttentionCall, dtype: torch.dtype, name: str) -> None:
    """Raise UnsupportedModel unless ``call`` has K and V as planes hold them, of this ``dtype``."""
    query, key, value = call.query, call.key, call.value
    query_heads, kv_heads = query.shape[1], key.shape[1]
    if query_heads % kv_heads or value.shape[1] != kv_heads:
        raise UnsupportedModel(
            f"{name} has {query_heads} query heads, {kv_heads} of K and {value.shape[1]} of V in layer {call.layer}"
        )
    if key.dtype not in DTYPE_NAMES or key.dtype != dtype or value.dtype != key.dtype:
        raise UnsupportedModel(f"{name} has K of {key.dtype} and V of {value.dtype} in layer {call.layer}")
    if call.latents is None and key.shape[-1] != query.shape[-1]:
        raise UnsupportedModel(
            f"{name} has queries of {query.shape[-1]} for keys of {key.shape[-1]} in layer {call.layer}"
        )


def _kept(call: AttentionCall) -> Kept:
    if call.latents is not None:
        return LatentsKept(call.latents.rank, call.latents.rope)
    return HeadsKept(call.key.shape[1], call.key.shape[-1], call.value.shape[-1])


def _sources(calls: Sequence[AttentionCall]) -> dict[int, int]:
    """Return the layers that were given the K and V of an earlier one, and which."""
    first: dict[tuple[int, int], int] = {}
    # All tensors of a pass are alive, so an address is that of one of them.
    found = {call.layer: first.setdefault((call.key.data_ptr(), call.value.data_ptr()), call.layer) for call in calls}
    return {layer: source for layer, source in found.items() if source != layer}


def _check_batch_independence(short: Sequence[AttentionCall], long: Sequence[AttentionCall], name: str) -> None:
    """Raise UnsupportedModel unless the first token of both batches has the same K and V, to the bit."""
    for one, other in zip(short, long, strict=True):
        _check_numbers(one.key, one.key.dtype, name)
        _check_numbers(one.value, one.value.dtype, name)
        if not torch.equal(one.key[:, :, 0], other.key[:, :, 0]) or not torch.equal(
            one.value[:, :, 0], other.value[:, :, 0]
        ):
            raise UnsupportedModel(
                f"KV of {name} depends on the longest position of the batch, so on the other requests in it"
            )


def _check_numbers(found: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Raise UnsupportedModel for NaN, which is unequal to itself: comparisons would name another fault.

    ``found`` is of a model in ``dtype``.
    """
    if found.isnan().any():
        kind = str(dtype).removeprefix("torch.")
        raise UnsupportedModel(f"{name} computes NaN in {kind}: its weights are damaged, or too large for that type")


def _own_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float()
    return found


class Verification:
    """Two prompts with the logits that the model gives them by its own attention, computed before we change it."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,
        tokens: int,
        windows: Sequence[int | None],
        attention: str = ATTENTION_NAME,
        *,
        is_rounded: bool = False,
    ) -> None:
        """Compute the expected logits of two prompts of ``tokens`` tokens each, at least 2.

        ``attention`` is how the model was loaded. Where KV ``is_rounded``, the model attends to rounded K and V here,
        too. Raises UnsupportedModel for attention that is not causal or has other windows than the layers' ``windows``,
        or other chunks than are set on its modules, and for logits that are NaN. Masks of a model with
        ``OWN_ATTENTION`` are its own in service, too.
        """
        self._model, self._name = model, model.config.model_type
        self._tolerance = _ROUNDED_TOLERANCE if is_rounded else _TOLERANCE[model.dtype]
        vocab_size = model.get_input_embeddings().weight.shape[0]
        prompts = torch.arange(2 * tokens, device=model.device) * 7919 % vocab_size
        self._prompts = unpadded(prompts, model.config).view(2, tokens)
        self._causality = CausalityCheck(model)
        attending = layers_with_attention(model.config, len(windows))
        try:
            with shortened(model, tokens):
                if attention != OWN_ATTENTION:
                    model.set_attn_implementation(MASK_PROBE_NAME)
                    self._causality.check_masks(model, self._prompts, [windows[layer] for layer in attending])
                    model.set_attn_implementation("eager")
                logits = rounding_logits if is_rounded else _own_logits
                self._expected = logits(model, self._prompts)
                _check_numbers(self._expected, model.dtype, self._name)
                self._causality.check(self._expected, logits(model, self._changed()))
        finally:
            if attention != OWN_ATTENTION:
                model.set_attn_implementation(attention)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._expected.shape[-1])

    def check(self, forward: Forward, *, pages: int, page_size: int) -> None:
        """Raise UnsupportedModel when ``forward`` over a pool gives other logits than expected.

        The pool has ``pages`` pages, which it overwrites. Both prompts share a batch, over pages in reverse order; the
        end of the first goes as chunks after context, one ending where a page does, and as a decode token.
        """
        with shortened(self._model, self._prompts.shape[1]):
            self._check_logits(forward, pages, page_size)
            self._check_causality(forward, pages, page_size)

    def _check_logits(self, forward: Forward, pages: int, page_size: int) -> None:
        tokens = self._prompts.shape[1]
        first = max(1, tokens - tokens // 3 - 1)
        page_end = min(tokens - 1, pages_for(first + 1, page_size) * page_size)
        steps = [
            [(0, 0, first), (1, 0, tokens)],
            [(0, first, page_end)],
            [(0, page_end, tokens - 1)],
            [(0, tokens - 1, tokens)],
        ]
        # All rows show the most; service asks for the last ones alone, which may be computed otherwise.
        for is_last_only in (False, True):
            for step in steps:
                work = [(prompt, start, end) for prompt, start, end in step if start < end]
                if work:
                    self._check_step(forward, work, pages, page_size, is_last_only=is_last_only)

    def _check_step(
        self, forward: Forward, work: list[tuple[int, int, int]], pages: int, page_size: int, *, is_last_only: bool
    ) -> None:
        meta = self._meta(work, pages, page_size)
        ids = torch.cat([self._prompts[prompt, start:end] for prompt, start, end in work])
        positions = torch.cat([torch.arange(start, end, device=ids.device) for _, start, end in work])
        expected = torch.cat([self._expected[prompt, start:end] for prompt, start, end in work])
        rows = torch.arange(len(ids), device=ids.device)
        if is_last_only:
            rows = torch.tensor([end - start for _, start, end in work], device=ids.device).cumsum(0) - 1
        self._compare(forward(ids, positions, meta, rows), expected[rows])

    def _check_causality(self, forward: Forward, pages: int, page_size: int) -> None:
        """Check that the paged forward is causal, too: later rows of a chunk change no earlier row."""
        tokens, device = self._prompts.shape[1], self._prompts.device
        meta = self._meta([(0, 0, tokens), (1, 0, tokens)], pages, page_size)
        positions, rows = torch.arange(tokens, device=device).repeat(2), torch.arange(2 * tokens, device=device)
        before, after = (
            forward(ids.flatten(), positions, meta, rows).view(2, tokens, -1)
            for ids in (self._prompts, self._changed())
        )
        self._causality.check(before, after)

    def _changed(self) -> torch.Tensor:
        return unpadded(self._causality.changed(self._prompts), self._model.config)

    def _meta(self, work: list[tuple[int, int, int]], pages: int, page_size: int) -> ForwardMeta:
        """Return a step of ``work``: prompt, first token, end."""
        per_prompt = pages_for(self._prompts.shape[1], page_size)
        numbers = np.arange(pages - 1, -1, -1, dtype=np.int32)
        tables = numbers[:per_prompt], numbers[per_prompt : 2 * per_prompt]
        segments = [Segment(end - start, start, tables[prompt], running=prompt) for prompt, start, end in work]
        return ForwardMeta.build(segments, page_size, self._prompts.device)

    def _compare(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        # All logits of a padding token may be alike, and rounding is not measured by a spread of nothing.
        spread = expected.std(dim=-1, keepdim=True).clamp_min(0.01 * expected.std().item() + 1e-12)
        deviation = ((logits - expected) / spread).square().mean(dim=-1).sqrt().mean().item()
        if not deviation <= self._tolerance:
            raise UnsupportedModel(
                f"paged attention gives {self._name} other logits than its own attention: "
                f"mean relative deviation {deviation:.2g}"
            )
