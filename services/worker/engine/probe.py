"""What only running a model can show: the shape of its KV, and that our attention computes what its own does.

A model that bypasses the attention interface would run, warn at most, and answer wrongly. So before a model
serves anybody, one forward pass records every call to attention, and a second, paged one is compared with the
model's own ``eager`` attention without a paged pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from services.worker.engine.attention import ATTENTION_NAME, AttentionCall
from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
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
"""Largest mean deviation of a row of logits, relative to the row's own spread. A wrong mask or position gives
values near 1; rounding of half precision through 30 layers gives a few hundredths."""


class LayoutProbe:
    """An attention step that computes nothing and remembers every call."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        _, heads, rows, head_dim = call.query.shape
        return call.query.new_zeros(rows, heads, head_dim)


@torch.inference_mode()
def find_geometry(model: Any, windows: list[int | None], page_size: int) -> KvGeometry:
    """Run two tokens through ``model`` and read its geometry off its calls to attention.

    Raises UnsupportedModel unless each layer calls attention once, in order, all alike, with the windows that
    the configuration promises, and asks nothing of attention that we do not do.
    """
    probe, device = LayoutProbe(), model.device
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    model(input_ids=tokens, position_ids=torch.arange(2, device=device)[None], use_cache=False, fwd=probe)
    name, calls = type(model).__name__, probe.calls
    if [call.layer for call in calls] != list(range(len(windows))):
        raise UnsupportedModel(
            f"{name} has {len(windows)} layers but made {len(calls)} calls through the attention interface"
        )
    for call, window in zip(calls, windows, strict=True):
        if call.window != window:
            raise UnsupportedModel(f"layer {call.layer} of {name} has window {call.window}, configured is {window}")
        odd = sorted(key for key, value in call.extras.items() if key not in HARMLESS_EXTRAS and value is not None)
        if odd or call.extras.get("is_causal") is False:
            raise UnsupportedModel(f"attention of {name} needs {', '.join(odd) or 'both directions'}, which we lack")
        if call.key.shape != calls[0].key.shape or call.value.shape != call.key.shape:
            raise UnsupportedModel(f"{name} has K and V of different shapes")
    key = calls[0].key
    if key.dtype not in DTYPE_NAMES or key.shape[-1] != calls[0].query.shape[-1]:
        raise UnsupportedModel(f"{name} has K of {key.dtype} with head dimension {key.shape[-1]}")
    return KvGeometry(
        layers=len(calls),
        kv_heads=key.shape[1],
        head_dim=key.shape[3],
        page_size=page_size,
        dtype=DTYPE_NAMES[key.dtype],
    )


class Verification:
    """Two prompts with the logits that the model gives them by its own attention, taken before we change it."""

    @torch.inference_mode()
    def __init__(self, model: Any, tokens: int) -> None:
        """``tokens`` is the length of each prompt, at least 2."""
        self._name, self._dtype = type(model).__name__, model.dtype
        vocab_size = model.get_input_embeddings().weight.shape[0]
        self._prompts = (torch.arange(2 * tokens, device=model.device) * 7919 % vocab_size).view(2, tokens)
        try:
            model.set_attn_implementation("eager")
            self._expected = model(input_ids=self._prompts, use_cache=False).logits.float()
        finally:
            model.set_attn_implementation(ATTENTION_NAME)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._expected.shape[-1])

    def check(self, forward: Forward, *, pages: int, page_size: int) -> None:
        """Raise UnsupportedModel when ``forward`` over a pool of ``pages`` pages, which it overwrites, gives other
        logits than expected. Both prompts share a batch, over pages in reverse order; the end of the first goes
        as a chunk after context and as a decode token.
        """
        tokens, device = self._prompts.shape[1], self._prompts.device
        per_prompt, first = pages_for(tokens, page_size), max(1, tokens - tokens // 3 - 1)
        numbers = np.arange(pages - 1, -1, -1, dtype=np.int32)
        tables = numbers[:per_prompt], numbers[per_prompt : 2 * per_prompt]
        steps = [[(0, 0, first), (1, 0, tokens)], [(0, first, tokens - 1)], [(0, tokens - 1, tokens)]]
        for step in steps:
            work = [(prompt, start, end) for prompt, start, end in step if start < end]
            if not work:
                continue
            segments = [Segment(end - start, start, tables[prompt]) for prompt, start, end in work]
            meta = ForwardMeta.build(segments, page_size, device)
            ids = torch.cat([self._prompts[prompt, start:end] for prompt, start, end in work])
            positions = torch.cat([torch.arange(start, end, device=device) for _, start, end in work])
            expected = torch.cat([self._expected[prompt, start:end] for prompt, start, end in work])
            # All rows show the most; the last ones alone are asked for in service, and may be computed otherwise.
            last = torch.tensor([segment.rows for segment in segments], device=device).cumsum(0) - 1
            for rows in (torch.arange(len(ids), device=device), last):
                self._compare(forward(ids, positions, meta, rows), expected[rows])

    def _compare(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        spread = expected.std(dim=-1, keepdim=True).clamp_min(1e-12)
        deviation = ((logits - expected) / spread).square().mean(dim=-1).sqrt().mean().item()
        if not deviation <= _TOLERANCE[self._dtype]:
            raise UnsupportedModel(
                f"paged attention gives {self._name} other logits than its own attention: "
                f"mean relative deviation {deviation:.2g}"
            )
