"""Whether a model is causal, shown in two ways that need no tolerance.

The masks that it hands to its own attention let no row see a later key, nor one outside its window or chunk. And
changing later tokens of a prompt moves no logits of earlier ones: both passes have the same shapes and positions, so
every kernel does the same sums over an earlier row, and what a causal mask hides enters them as exact zeros. The logits
are equal to the bit then, in every data type. Models that route tokens among experts are the exception: how many rows
an expert computes at once depends on all tokens, and with it how it rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from services.worker.engine.chunks import chunks_of
from shared.errors import UnsupportedModel

MASK_PROBE_NAME = "thermocline_masks"

_ROUNDING_STEPS = 16
"""Largest deviation of routed models, in units of the data type's rounding of the largest logit: sums over other
numbers of rows round otherwise in each layer."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_MASKS: ContextVar[list[torch.Tensor | None]] = ContextVar("masks_seen")


def record_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Record the mask of a call, and return zeros [1, T, heads, value_dim] in the place of attention."""
    _MASKS.get().append(attention_mask)
    return query.new_zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(MASK_PROBE_NAME, record_mask)
AttentionMaskInterface.register(MASK_PROBE_NAME, eager_mask)


def routes_tokens(config: Any) -> bool:
    """Return whether a model routes tokens among experts, so that the rounding of a row depends on the other rows."""
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)


class CausalityCheck:
    """Both checks of one model. The caller switches the model's attention between them."""

    def __init__(self, model: Any) -> None:
        """Note the name, data type, vocabulary size and routing of ``model``, which is not kept."""
        self._name, self._dtype = model.config.model_type, model.dtype
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._routes = routes_tokens(model.config)

    @torch.inference_mode()
    def check_masks(self, model: Any, prompts: torch.Tensor, windows: Sequence[int | None]) -> None:
        """Raise UnsupportedModel unless each layer's mask is exactly the causal one of its window or chunk.

        ``model`` must have attention ``MASK_PROBE_NAME``. A layer that is given no mask is left to :meth:`check`.
        """
        with _masks() as masks:
            model(input_ids=prompts, use_cache=False)
        rows = torch.arange(prompts.shape[1], device=prompts.device)
        distance = rows[:, None] - rows
        chunks = chunks_of(model)
        for layer, (mask, window) in enumerate(zip(masks, windows, strict=False)):
            if mask is None:
                continue
            seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            if (seen & (distance < 0)).any():
                raise UnsupportedModel(f"{self._name} is not causal: tokens see later ones in layer {layer}")
            expected = (distance >= 0) & (distance < (window or len(rows)))
            chunk = chunks.get(layer)
            if chunk is not None:
                expected &= rows[:, None] // chunk == rows // chunk
            if (seen != expected).any():
                bound = f"window {window}" if chunk is None else f"chunk {chunk}"
                raise UnsupportedModel(f"the mask of layer {layer} of {self._name} is not that of its {bound}")

    def changed(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``prompts`` [P, T] with other tokens from ``T // 2`` on."""
        other = prompts.clone()
        half = prompts.shape[1] // 2
        other[:, half:] = (prompts[:, half:] + 1 + self._vocab_size // 3) % self._vocab_size
        return other

    def check(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Raise UnsupportedModel when logits before and after a change of prompts differ in the first halves.

        ``before`` [P, T, vocab] are the logits of prompts, ``after`` those of their changed form.
        """
        half = before.shape[1] // 2
        one, other = before[:, :half], after[:, :half]
        if torch.equal(one, other):
            return
        moved = (one - other).abs().max().item()
        allowed = _ROUNDING_STEPS * torch.finfo(self._dtype).eps * one.abs().max().item() if self._routes else 0.0
        if not moved <= allowed:
            raise UnsupportedModel(
                f"{self._name} is not causal: other tokens at the end of a prompt move logits before them ({moved:.2g})"
            )


@contextmanager
def _masks() -> Iterator[list[torch.Tensor | None]]:
    seen: list[torch.Tensor | None] = []
    token = _MASKS.set(seen)
    try:
        yield seen
    finally:
        _MASKS.reset(token)
