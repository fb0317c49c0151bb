"""What the fused forward computes: models built like Llama, whatever they are called.

A layer is RMSNorm, attention with rotated queries and keys (normed before, if the model does), RMSNorm, and an MLP with
a SiLU gate, with a residual around each. Everything here is read off the model's own modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.native.fused import LANES

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class NotOfTheFamily(Exception):
    """The model does something that the fused forward does not compute; the message says what."""


@dataclass(frozen=True, slots=True)
class LayerModules:
    """One layer of the model. ``window`` is that of its attention; the modules are Hugging Face's."""

    attention: Any
    mlp: Any
    input_norm: Any
    post_norm: Any
    window: int | None


@dataclass(frozen=True, slots=True)
class Family:
    """A model of the family, as read off its modules."""

    layers: tuple[LayerModules, ...]
    embedding: torch.nn.Embedding
    final_norm: Any
    head: torch.nn.Linear
    rotary: Any
    dtype: torch.dtype
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scaling: float

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        return self.head.out_features

    @property
    def is_tied(self) -> bool:
        """Whether the head's weights are the embedding's."""
        return self.head.weight is self.embedding.weight


def describe(model: Any, windows: Sequence[int | None], *, multiple: int = LANES) -> Family:
    """Describe ``model``, whose layers have these windows, and whose widths must be multiples of ``multiple``.

    Raises NotOfTheFamily, with every reason.
    """
    name = type(model).__name__
    if name not in FAMILY or not type(model).__module__.startswith("transformers.models."):
        raise NotOfTheFamily(f"{name} is not a model that it knows")
    config, base = model.config, model.model
    layers = tuple(
        LayerModules(each.self_attn, each.mlp, each.input_layernorm, each.post_attention_layernorm, window)
        for each, window in zip(base.layers, windows, strict=True)
    )
    first = layers[0]
    head_dim = int(first.attention.head_dim)
    family = Family(
        layers=layers,
        embedding=base.embed_tokens,
        final_norm=base.norm,
        head=model.lm_head,
        rotary=base.rotary_emb,
        dtype=base.embed_tokens.weight.dtype,
        hidden=int(config.hidden_size),
        intermediate=int(config.intermediate_size),
        query_heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        eps=float(base.norm.variance_epsilon),
        scaling=float(first.attention.scaling),
    )
    faults = [*_shape_faults(family, multiple), *_module_faults(family)]
    if config.hidden_act != "silu":
        faults.append(f"its MLP has {config.hidden_act}")
    if faults:
        raise NotOfTheFamily(f"{name}: {'; '.join(faults)}")
    return family


def linears(layer: LayerModules) -> tuple[Any, ...]:
    """Return all linear modules of a layer: queries, keys, values, output, gate, up, down."""
    attention, mlp = layer.attention, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


def _shape_faults(family: Family, multiple: int) -> list[str]:
    widths = {
        "hidden size": family.hidden,
        "intermediate size": family.intermediate,
        "head dimension": family.head_dim,
    }
    return [f"its {name} of {width} is no multiple of {multiple}" for name, width in widths.items() if width % multiple]


def _module_faults(family: Family) -> list[str]:
    faults = []
    queries, keys = family.query_heads * family.head_dim, family.kv_heads * family.head_dim
    expected = [
        *((family.hidden, width) for width in (queries, keys, keys)),
        (queries, family.hidden),
        *((family.hidden, family.intermediate),) * 2,
        (family.intermediate, family.hidden),
    ]
    for number, layer in enumerate(family.layers):
        for module, (inputs, outputs) in zip(linears(layer), expected, strict=True):
            if not _is_linear(module, inputs, outputs, family.dtype):
                faults.append(f"layer {number} has another linear layer than [{outputs}, {inputs}]")
        norms = [layer.input_norm, layer.post_norm]
        norms += [norm for kind in ("q_norm", "k_norm") if (norm := getattr(layer.attention, kind, None)) is not None]
        if not all(_is_norm(norm, family) for norm in norms):
            faults.append(f"layer {number} has another kind of norm")
        if layer.attention.scaling != family.scaling:
            faults.append(f"layer {number} scales scores by another factor")
    if not _is_linear(family.head, family.hidden, family.vocabulary, family.dtype) or family.head.bias is not None:
        faults.append("its head has a bias or another width")
    if type(family.embedding) is not torch.nn.Embedding or not _is_norm(family.final_norm, family):
        faults.append("its embedding or its last norm is of another kind")
    like = family.embedding.weight.new_empty(0)
    position = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
    cosines, _ = family.rotary(like, position)
    if cosines.shape[-1] != family.head_dim:
        faults.append(f"it rotates {cosines.shape[-1]} of {family.head_dim} dimensions")
    return faults


def _is_linear(module: Any, inputs: int, outputs: int, dtype: torch.dtype) -> bool:
    return (
        type(module) is torch.nn.Linear
        and (module.in_features, module.out_features) == (inputs, outputs)
        and module.weight.dtype == dtype
    )


def _is_norm(module: Any, family: Family) -> bool:
    return (
        type(module).__name__.endswith("RMSNorm")
        and module.weight.dtype == family.dtype
        and float(module.variance_epsilon) == family.eps
    )
