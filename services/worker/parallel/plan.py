"""Which modules of a model are divided, and how, by the model's own tensor-parallel plan in Hugging Face.

The plan names modules by patterns, and for experts the weights themselves. ``colwise``: a rank has some output rows of
the weight. ``rowwise``: it has some input columns, and outputs are summed. ``packed_colwise`` and ``packed_rowwise``:
two weights lie one after the other along the dimension that is divided, and a rank has the same part of both.
``summed``: a module, such as the experts of a layer, whose weights are divided inside, and whose output is summed as a
whole. ``qkv``: rows of queries, of keys and of values follow one another, and a rank has those of its heads.
``transposed_colwise`` and ``transposed_rowwise``: likewise for transposed weights. ``once``: one rank has it, and the
others have zeros. ``joined``: a norm over the heads of all ranks is whole in each, computes over the joined heads, and
gives each rank its own. A module without an entry is whole in every rank. Other styles join what was divided in
the middle of a layer, which needs collectives of their own: models that have them are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from services.worker.engine.states.layers import WITHOUT_ATTENTION
from shared.errors import UnsupportedModel

Style = Literal[
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "qkv",
    "summed",
    "transposed_colwise",
    "transposed_rowwise",
    "once",
    "joined",
]

_DIVIDED: dict[str, Style] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "packed_colwise",
    "packed_rowwise": "packed_rowwise",
    "moe_tp_experts": "summed",
}
"""Styles by the library's words for them."""

_PROJECTIONS: dict[str, str] = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}

_COMMON: dict[str, str] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.gate_proj": "colwise",
    "layers.*.self_attn.g_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.out_proj": "rowwise",
    "layers.*.self_attn.sinks": "colwise",
    "layers.*.fc1": "colwise",
    "layers.*.fc2": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "layers.*.shared_mlp.input_linear": "packed_colwise",
    "layers.*.shared_mlp.output_linear": "rowwise",
    **{
        f"layers.*.{name}.{projection}": style
        for name in ("mlp", "mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp", "feed_forward")
        for projection, style in _PROJECTIONS.items()
    },
}
"""Entries for modules that some plans leave whole, though heads and widths of a rank need them divided. An entry of the
plan itself takes precedence.
"""

_FUSED: dict[str, tuple[str, Style]] = {
    "layers.*.self_attn.qkv_proj": ("colwise_gather_output", "qkv"),
    "layers.*.self_attn.o_proj": ("rowwise_split_input", "rowwise"),
    "layers.*.mlp.gate_up_proj": ("colwise_gather_output", "packed_colwise"),
    "layers.*.mlp.down_proj": ("rowwise_split_input", "rowwise"),
}
"""Styles of fused weights. The library joins the output of such a module before it splits it. Here a rank's share of
each of the fused weights is contiguous, so that nothing has to be joined.
"""

_OURS: dict[str, dict[str, Style]] = {
    "gpt_oss": {
        # Gate and up alternate, so a contiguous part of the columns has both.
        "layers.*.mlp.experts.gate_up_proj": "transposed_colwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "colwise",
        "layers.*.mlp.experts.down_proj": "transposed_rowwise",
        "layers.*.mlp.experts.down_proj_bias": "once",
        "layers.*.mlp.experts": "summed",
    },
    "nemotron_h": {
        "layers.*.mixer.q_proj": "colwise",
        "layers.*.mixer.k_proj": "colwise",
        "layers.*.mixer.v_proj": "colwise",
        "layers.*.mixer.o_proj": "rowwise",
        "layers.*.mixer.up_proj": "colwise",
        "layers.*.mixer.down_proj": "rowwise",
        "layers.*.mixer.shared_experts.up_proj": "colwise",
        "layers.*.mixer.shared_experts.down_proj": "rowwise",
    },
    **{name: {} for name in ("bamba", "falcon_h1", "lfm2", "lfm3")},
}
"""Plans of ours by model type, where the library has none, or one that lacks entries that heads of a rank need. Each is
tried by the sweep of ``bench/model_support``, because nothing at the start of a group shows that it is wrong.
"""

_BETWEEN_NORMS: dict[str, Style] = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
_WIDE_NORMS: dict[str, Style] = {"layers.*.self_attn.q_norm": "joined", "layers.*.self_attn.k_norm": "joined"}
"""Attention whose queries and keys have a norm over all heads. The library joins its projections for that, and computes
all heads in every rank. Here the norms alone join, so that heads and their KV are divided.
"""

_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise", "local_params", "mla_kv_a_proj")
"""Styles of modules that are whole in every rank here. Embeddings are only read, a row a token: dividing them saves
memory, and costs a sum over ranks in every step. The parameters of a module with *local* ones have entries of their
own. Every rank keeps all latents.
"""

_REJOINED = ("colwise_gather_output", "rowwise_split_input")
"""Styles of modules whose output the library joins, or whose input it divides. They may be whole in every rank as well,
except in attention, whose heads are divided here.
"""


class DivisionPlan:
    """The division of one model's modules and weights."""

    def __init__(self, model: Any) -> None:
        """Read the model's plan. Raises UnsupportedModel when it has none, or one with styles that are not served."""
        name, ours = type(model).__name__, _OURS.get(model.config.model_type)
        declared: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
        if not declared and ours is None and not _has_common_names(model):
            raise UnsupportedModel(f"{name} does not say how it divides among ranks")
        is_joined = declared.get("layers.*.self_attn.q_proj") == "colwise_gather_output"
        is_wide = is_joined and has_wide_norms(model)
        styles: dict[str, Style | Literal["refused"] | None] = {
            pattern: _style(pattern, style, declared, is_wide=is_wide)
            for pattern, style in (_COMMON | declared).items()
        }
        if is_wide:
            styles |= _WIDE_NORMS
        styles |= ours or {}
        odd = [f"{pattern} ({declared.get(pattern)})" for pattern, style in styles.items() if style == "refused"]
        if odd:
            raise UnsupportedModel(f"{name} has modules that are not divided among ranks here: {', '.join(odd)}")
        # Some classes name a base that is not theirs, but that of the model whose text part they are.
        prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
        kinds = getattr(model.config, "layer_types", None) or ()
        self._without_heads = {layer for layer, kind in enumerate(kinds) if kind in WITHOUT_ATTENTION}
        self._patterns = [(_pattern(prefix, pattern), style) for pattern, style in styles.items() if style != "refused"]

    def style(self, name: str) -> Style | None:
        """Return how the module or weight of this name is divided; None if it is whole, as modules with states are."""
        layer = layer_of(name)
        if layer in self._without_heads and ".self_attn" in name:
            return None
        return next((style for pattern, style in self._patterns if pattern.fullmatch(name)), None)

    def divided(self, model: Any, style: Style) -> Iterator[str]:
        """Yield the names of the modules of ``model`` that are divided in this way."""
        return (name for name, _ in list(model.named_modules()) if self.style(name) == style)


def has_wide_norms(model: Any) -> bool:
    """Return whether every attention of ``model`` has norms of queries and keys over more than one head."""
    found = [
        module for name, module in model.named_modules() if name.endswith(".self_attn") and hasattr(module, "q_norm")
    ]
    return bool(found) and all(
        _is_over_all(module.q_norm, getattr(module, "q_proj", None))
        and _is_over_all(getattr(module, "k_norm", None), getattr(module, "k_proj", None))
        for module in found
    )


def _is_over_all(norm: Any, projection: Any) -> bool:
    """Return whether ``norm`` is over all that a rank has of the projection, or over that of all ranks."""
    if not isinstance(norm, torch.nn.Module) or type(projection) is not torch.nn.Linear:
        return False
    sizes = [tuple(parameter.shape) for parameter in norm.parameters()]
    return bool(sizes) and all(len(size) == 1 and size[0] % projection.out_features == 0 for size in sizes)


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a module or weight belongs to; None for those outside of layers."""
    number = re.search(r"\.(?:layers|h)\.(\d+)\.", f"{name}.")
    return int(number[1]) if number else None


def _style(
    pattern: str, style: str, declared: Mapping[str, str], *, is_wide: bool
) -> Style | Literal["refused"] | None:
    """Return our style for a module of the library's ``style``; None is whole."""
    if style in _WHOLE:
        return None
    if style in _REJOINED and pattern not in _FUSED and ".self_attn." not in pattern:
        return None
    fused, divided = _FUSED.get(pattern, ("", None))
    first = "qkv_proj" if "self_attn" in pattern else "gate_up_proj"
    is_fused = any(name.endswith(first) for name in declared)
    if divided is not None and style == fused and is_fused:
        return divided
    if is_wide and ".self_attn." in pattern and style in _BETWEEN_NORMS:
        return _BETWEEN_NORMS[style]
    return _DIVIDED.get(style, "refused")


def _pattern(prefix: str, declared: str) -> re.Pattern[str]:
    """Return a pattern that matches names behind ``prefix``; ``*`` stands for one component."""
    # OPT has its layers in a decoder of its own.
    return re.compile(re.escape(f"{prefix}.") + r"(?:decoder\.)?" + re.escape(declared).replace(r"\*", r"[^.]+"))


def _has_common_names(model: Any) -> bool:
    """Return whether :data:`_COMMON` names all linear layers of the layers of ``model``, and nothing lies between them.

    A norm within attention or an MLP might be over what is divided.
    """
    patterns = [_pattern(model.base_model_prefix, pattern) for pattern in _COMMON]
    named = 0
    for name, module in model.named_modules():
        if layer_of(name) is None or next(module.parameters(recurse=False), None) is None:
            continue
        if type(module) is torch.nn.Linear and any(pattern.fullmatch(name) for pattern in patterns):
            named += 1
        elif not name.split(".")[-2].isdecimal() or next(module.parameters(recurse=False)).dim() != 1:
            return False  # Neither named nor a norm beside attention and MLP.
    return named > 0
