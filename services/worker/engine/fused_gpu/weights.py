"""Merged matrices of a model on a GPU: one product gives queries, keys and values, another gate and up.

A weight is kept once. The model's own linear modules get views of the merged matrices, so that it still computes what
it did: the portable path, restoration from hidden states and the check at load go through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.worker.engine.fused.family import Family, LayerModules

_Linear = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [outputs, inputs] and bias [outputs] or None."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. ``norms`` are those of heads of queries and keys, and epsilon, or None."""

    input_norm: torch.Tensor
    qkv: _Linear
    norms: tuple[torch.Tensor, torch.Tensor, float] | None
    out: _Linear
    post_norm: torch.Tensor
    gate_up: _Linear
    down: _Linear


class GpuModel:
    """The weights of one model as a step reads them. Making it merges the model's weights, layer by layer."""

    @torch.inference_mode(False)
    def __init__(self, family: Family, context: int) -> None:
        """``context`` is the longest served, in tokens: the angles of its positions are computed here, once."""
        self.query_heads, self.kv_heads, self.head_dim = family.query_heads, family.kv_heads, family.head_dim
        self.dtype, self.eps, self.scaling, self.vocabulary = (
            family.dtype,
            family.eps,
            family.scaling,
            family.vocabulary,
        )
        self.windows = [layer.window for layer in family.layers]
        self.attention = [layer.attention for layer in family.layers]
        self.embedding, self.head = family.embedding.weight.detach(), family.head.weight.detach()
        self.final_norm = family.final_norm.weight.detach()
        self.layers = [_merged(layer, family.eps) for layer in family.layers]
        self.angles = Angles(family.rotary, family.dtype, self.embedding.device, context)


class Angles:
    """Cosines and sines of every position of the context, [context, head_dim / 2].

    They are as the model's own rotary embedding gives them.
    """

    def __init__(self, rotary: Any, dtype: torch.dtype, device: torch.device, context: int) -> None:
        """``rotary`` gives the same angle to a position in any batch, see ``probe.find_planes``."""
        self._rotary, self._like = rotary, torch.empty(0, dtype=dtype, device=device)
        cosines, sines = self.embeddings(torch.arange(context, device=device))
        half = cosines.shape[-1] // 2  # Both halves of a head are alike.
        self.cosines, self.sines = cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    @property
    def positions(self) -> int:
        """Length of the context whose positions have angles, in tokens."""
        return self.cosines.shape[0]

    def embeddings(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of ``positions``, int64 [T] on the device, as attention modules get them."""
        cosines, sines = self._rotary(self._like, positions[None])
        return cosines, sines


def _merged(layer: LayerModules, eps: float) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    normed = getattr(attention, "q_norm", None) is not None
    return LayerWeights(
        input_norm=layer.input_norm.weight.detach(),
        qkv=_merge([attention.q_proj, attention.k_proj, attention.v_proj]),
        norms=(attention.q_norm.weight.detach(), attention.k_norm.weight.detach(), eps) if normed else None,
        out=_merge([attention.o_proj]),
        post_norm=layer.post_norm.weight.detach(),
        gate_up=_merge([mlp.gate_proj, mlp.up_proj]),
        down=_merge([mlp.down_proj]),
    )


def _merge(modules: list[torch.nn.Linear]) -> _Linear:
    """Merge linear modules of the same input into one matrix and one bias, and make the modules views of these."""
    if len(modules) == 1:
        (module,) = modules
        return module.weight.detach(), None if module.bias is None else module.bias.detach()
    weight = torch.cat([module.weight.detach() for module in modules])
    bias = None
    if any(module.bias is not None for module in modules):
        bias = torch.cat([_bias_of(module) for module in modules])
    first = 0
    for module in modules:
        end = first + module.out_features
        module.weight = torch.nn.Parameter(weight[first:end], requires_grad=False)
        if module.bias is not None and bias is not None:
            module.bias = torch.nn.Parameter(bias[first:end], requires_grad=False)
        first = end
    return weight, bias


def _bias_of(module: torch.nn.Linear) -> torch.Tensor:
    """Return the bias of a linear module; zeros where it has none."""
    return module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()
