"""The one attention function that every model calls, through Hugging Face's attention interface.

It owns nothing. The step under way decides what attention does: :class:`~services.worker.engine.paged_step.PagedStep`
in service, :class:`~services.worker.engine.probe.LayoutProbe` when a model is examined at load. It is a context
variable (:func:`attending`), because some models do not hand keywords on to their attention. No mask function is
registered under our name, so the models hand over no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import torch
from transformers import AttentionInterface

from shared.errors import InvariantViolated

if TYPE_CHECKING:
    from services.worker.engine.latents import Latents

ATTENTION_NAME = "thermocline"

CHUNK = "thermocline_attention_chunk"
"""Name of the attribute of attention modules that holds the keys of a chunk (:mod:`services.worker.engine.chunks`)."""


class Scoring(TypedDict):
    """How keys are scored and which of them are visible, as keywords for kernels; see :class:`AttentionCall`."""

    scaling: float
    window: int | None
    softcap: float | None
    chunk: int | None
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of attention over the flattened batch of T rows.

    query [1, heads, T, head_dim]; key and value [1, kv_heads, T, head_dim], after RoPE and K norm. ``window`` w
    lets row i see keys ``i - w < j <= i``, ``chunk`` c keys ``i // c * c <= j <= i``; a layer has at most one of them.
    ``softcap`` c replaces scores s by ``c * tanh(s / c)``. ``sinks`` [heads] is one more score of each query head, of
    a key whose value is zero (Xiao et al., arXiv 2309.17453, section 3.3). ``extras`` are the model's further keywords
    that are neither None nor ours.

    With ``latents`` key [1, 1, T, rank + rope] is what multi-head latent attention keeps of a token, value its first
    ``rank`` columns, and the query [1, heads, T, nope + rope] is for keys that ``latents`` would expand it to.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    extras: dict[str, Any]
    chunk: int | None = None
    sinks: torch.Tensor | None = None
    latents: Latents | None = None

    @property
    def scoring(self) -> Scoring:
        """The keywords of every attention kernel."""
        return Scoring(
            scaling=self.scaling, window=self.window, softcap=self.softcap, chunk=self.chunk, sinks=self.sinks
        )

    @property
    def value_dim(self) -> int:
        """Values of a head of the output."""
        return self.value.shape[-1] if self.latents is None else self.latents.value_dim


class AttentionStep(Protocol):
    """One forward pass, as attention sees it."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output, ``[T, heads, value_dim]``. It may be overwritten by the next call."""


_STEP: ContextVar[AttentionStep] = ContextVar("attention_step")


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """Have ``step`` compute attention of every model that this thread runs within the block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention by the step under way, and return it as [1, T, heads, value_dim].

    The function is the one that is registered with Hugging Face. Raises InvariantViolated outside :func:`attending`.
    """
    step = _STEP.get(None)
    if step is None:
        raise InvariantViolated("attention was called without a step")
    if getattr(module, "is_causal", True) is False:
        extras["is_causal"] = False
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        extras=extras if attention_mask is None else {**extras, "attention_mask": attention_mask},
        # Models express chunks in their masks alone, so loading sets this attribute on their modules.
        chunk=module.__dict__.get(CHUNK),
        sinks=s_aux,
        latents=getattr(module, "latents", None),
    )
    return step.attend(call)[None], None


AttentionInterface.register(ATTENTION_NAME, attend)
