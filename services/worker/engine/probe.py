"""What only running a model can show: the shape of its KV, and that our attention computes what its own does.

A model that bypasses the attention interface would run, warn at most, and answer wrongly. So before a model
serves anybody, forward passes without attention record every call to it, and a paged one is compared with the
model's own ``eager`` attention without a paged pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from services.worker.engine.attention import ATTENTION_NAME, AttentionCall, attending
from services.worker.engine.causality import MASK_PROBE_NAME, CausalityCheck
from services.worker.engine.chunks import shortened
from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.engine.model_faults import AttendsOtherwise
from services.worker.engine.own_attention import OWN_ATTENTION, recorded
from services.worker.engine.told_positions import unpadded
from services.worker.kv.device_pool import DTYPE_NAMES
from shared.errors import UnsupportedModel
from shared.messages.pools import KvGeometry

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


class LayoutProbe:
    """An attention step that computes nothing and remembers every call."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        _, heads, rows, _ = call.query.shape
        return call.query.new_zeros(rows, heads, call.value.shape[-1])


def find_geometry(model: Any, windows: list[int | None], page_size: int, context: int) -> KvGeometry:
    """Run two tokens through ``model`` and read its geometry off its calls to attention.

    Raises UnsupportedModel unless each layer calls attention once, in order, all alike, with the windows that
    the configuration promises, asks nothing of attention that we do not do, and gives a token the same K whether
    the batch is short or reaches to position ``context - 1``; AttendsOtherwise where attention of its own may do.
    """
    name, calls = model.config.model_type, _layout(model, (1, 2))
    if [call.layer for call in calls] != list(range(len(windows))):
        raise AttendsOtherwise(
            f"{name} has {len(windows)} layers but made {len(calls)} calls through the attention interface"
        )
    for call, window in zip(calls, windows, strict=True):
        if call.window != window:
            raise UnsupportedModel(f"layer {call.layer} of {name} has window {call.window}, configured is {window}")
        odd = sorted(key for key, value in call.extras.items() if key not in HARMLESS_EXTRAS and value is not None)
        if odd or call.extras.get("is_causal") is False:
            raise AttendsOtherwise(f"attention of {name} needs {', '.join(odd) or 'both directions'}, which we lack")
    _check_batch_independence(calls, _layout(model, (1, context - 1)), name)
    return _geometry(calls, name, page_size)


def find_own_geometry(model: Any, layers: int, page_size: int) -> KvGeometry:
    """The same of a model that attends by code of its own, from what its layers give to the library's cache.

    Raises UnsupportedModel.
    """
    return _geometry(recorded(model, layers), model.config.model_type, page_size)


def _geometry(calls: Sequence[AttentionCall], name: str, page_size: int) -> KvGeometry:
    for call in calls:
        _check_shapes(call, calls[0], name)
    key = calls[0].key
    return KvGeometry(
        layers=len(calls),
        kv_heads=key.shape[1],
        head_dim=key.shape[3],
        page_size=page_size,
        dtype=DTYPE_NAMES[key.dtype],
    )


def has_sinks(model: Any) -> bool:
    """Whether any layer of ``model`` has attention sinks."""
    return any(call.sinks is not None for call in _layout(model, (1, 2)))


@torch.inference_mode()
def _layout(model: Any, positions: tuple[int, int]) -> list[AttentionCall]:
    """What two tokens at ``positions`` ask of attention. At position 0 rotary embeddings of all kinds are alike."""
    probe = LayoutProbe()
    # Not the first tokens of a vocabulary: the embedding of a padding token is zero, and shows nothing.
    vocab_size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.tensor([[vocab_size // 2, vocab_size // 3]], device=model.device)
    with attending(probe):
        model(input_ids=tokens, position_ids=torch.tensor([positions], device=model.device), use_cache=False)
    return probe.calls


def _check_shapes(call: AttentionCall, first: AttentionCall, name: str) -> None:
    """Raise UnsupportedModel unless ``call`` has K and V as a page holds them, and ``first`` has the same."""
    query, key, value = call.query, call.key, call.value
    if value.shape != key.shape:
        raise UnsupportedModel(
            f"{name} has K and V of different sizes ({key.shape[1]} heads of {key.shape[-1]} and {value.shape[1]} of "
            f"{value.shape[-1]}, as in multi-head latent attention), and pages hold them alike"
        )
    if key.shape != first.key.shape or query.shape != first.query.shape:
        raise UnsupportedModel(
            f"{name} has layers with other heads than its first: {_heads(call)} in layer {call.layer}, {_heads(first)} "
            "before, and pages hold all layers alike"
        )
    if key.dtype not in DTYPE_NAMES or key.shape[-1] != query.shape[-1]:
        raise UnsupportedModel(f"{name} has K of {key.dtype} with head dimension {key.shape[-1]}")


def _heads(call: AttentionCall) -> str:
    return f"{call.query.shape[1]} query and {call.key.shape[1]} KV heads of {call.key.shape[-1]}"


def _check_batch_independence(short: Sequence[AttentionCall], long: Sequence[AttentionCall], name: str) -> None:
    """Raise UnsupportedModel unless the first token of both batches has the same K and V, to the bit."""
    for one, other in zip(short, long, strict=True):
        if not torch.equal(one.key[:, :, 0], other.key[:, :, 0]) or not torch.equal(
            one.value[:, :, 0], other.value[:, :, 0]
        ):
            raise UnsupportedModel(
                f"KV of {name} depends on the longest position of the batch, so on who else is computed"
            )


class Verification:
    """Two prompts with the logits that the model gives them by its own attention, taken before we change it."""

    @torch.inference_mode()
    def __init__(self, model: Any, tokens: int, windows: Sequence[int | None], attention: str = ATTENTION_NAME) -> None:
        """``tokens`` is the length of each prompt, at least 2; ``attention`` is how the model was loaded. Raises
        UnsupportedModel for attention that is not causal or has other windows than the layers' ``windows``, or other
        chunks than they were told. Masks of a model with ``OWN_ATTENTION`` are its own in service, too.
        """
        self._model, self._name, self._dtype = model, model.config.model_type, model.dtype
        vocab_size = model.get_input_embeddings().weight.shape[0]
        prompts = torch.arange(2 * tokens, device=model.device) * 7919 % vocab_size
        self._prompts = unpadded(prompts, model.config).view(2, tokens)
        self._causality = CausalityCheck(model)
        try:
            with shortened(model, tokens):
                if attention != OWN_ATTENTION:
                    model.set_attn_implementation(MASK_PROBE_NAME)
                    self._causality.check_masks(model, self._prompts, windows)
                    model.set_attn_implementation("eager")
                self._expected = model(input_ids=self._prompts, use_cache=False).logits.float()
                changed = self._changed()
                self._causality.check(self._expected, model(input_ids=changed, use_cache=False).logits.float())
        finally:
            if attention != OWN_ATTENTION:
                model.set_attn_implementation(attention)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._expected.shape[-1])

    def check(self, forward: Forward, *, pages: int, page_size: int) -> None:
        """Raise UnsupportedModel when ``forward`` over a pool of ``pages`` pages, which it overwrites, gives other
        logits than expected. Both prompts share a batch, over pages in reverse order; the end of the first goes
        as a chunk after context and as a decode token.
        """
        with shortened(self._model, self._prompts.shape[1]):
            self._check_logits(forward, pages, page_size)
            self._check_causality(forward, pages, page_size)

    def _check_logits(self, forward: Forward, pages: int, page_size: int) -> None:
        tokens = self._prompts.shape[1]
        first = max(1, tokens - tokens // 3 - 1)
        steps = [[(0, 0, first), (1, 0, tokens)], [(0, first, tokens - 1)], [(0, tokens - 1, tokens)]]
        for step in steps:
            work = [(prompt, start, end) for prompt, start, end in step if start < end]
            if not work:
                continue
            meta = self._meta(work, pages, page_size)
            ids = torch.cat([self._prompts[prompt, start:end] for prompt, start, end in work])
            positions = torch.cat([torch.arange(start, end, device=ids.device) for _, start, end in work])
            expected = torch.cat([self._expected[prompt, start:end] for prompt, start, end in work])
            # All rows show the most; the last ones alone are asked for in service, and may be computed otherwise.
            last = torch.tensor([end - start for _, start, end in work], device=ids.device).cumsum(0) - 1
            for rows in (torch.arange(len(ids), device=ids.device), last):
                self._compare(forward(ids, positions, meta, rows), expected[rows])

    def _check_causality(self, forward: Forward, pages: int, page_size: int) -> None:
        """The same of the paged forward: what comes later in a chunk changes no earlier row."""
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
        """A step of ``work``: prompt, first token, end."""
        per_prompt = pages_for(self._prompts.shape[1], page_size)
        numbers = np.arange(pages - 1, -1, -1, dtype=np.int32)
        tables = numbers[:per_prompt], numbers[per_prompt : 2 * per_prompt]
        segments = [Segment(end - start, start, tables[prompt]) for prompt, start, end in work]
        return ForwardMeta.build(segments, page_size, self._prompts.device)

    def _compare(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        # All logits of a padding token may be alike, and rounding is not measured by a spread of nothing.
        spread = expected.std(dim=-1, keepdim=True).clamp_min(0.01 * expected.std().item() + 1e-12)
        deviation = ((logits - expected) / spread).square().mean(dim=-1).sqrt().mean().item()
        if not deviation <= _TOLERANCE[self._dtype]:
            raise UnsupportedModel(
                f"paged attention gives {self._name} other logits than its own attention: "
                f"mean relative deviation {deviation:.2g}"
            )
