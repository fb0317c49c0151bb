"""Which modules of a model are divided, and how: as the model's own tensor-parallel plan in Hugging Face says.

The plan names modules by patterns, and of experts the weights themselves. ``colwise``: a rank has some output rows of
the weight. ``rowwise``: it has some input columns, and outputs are summed. ``packed_colwise`` and ``packed_rowwise``:
two weights lie one after the other along the dimension that is divided, and a rank has the same part of both.
``summed``: a module, such as the experts of a layer, whose weights are divided inside, and whose output is summed as a
whole. ``qkv``: rows of queries, of keys and of values follow one another, and a rank has those of its heads.
``transposed_colwise`` and ``transposed_rowwise``: likewise of weights that lie the other way round. ``once``: one rank
has it, and the others have zeros. A module without an entry is whole in every rank. Other styles join what was divided
in the middle of a layer, which needs collectives of their own: models that have them are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

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
"""What some plans leave whole, and heads and widths of a rank ask for. An entry of the plan itself goes first."""

_FUSED: dict[str, tuple[str, Style]] = {
    "layers.*.self_attn.qkv_proj": ("colwise_gather_output", "qkv"),
    "layers.*.self_attn.o_proj": ("rowwise_split_input", "rowwise"),
    "layers.*.mlp.gate_up_proj": ("colwise_gather_output", "packed_colwise"),
    "layers.*.mlp.down_proj": ("rowwise_split_input", "rowwise"),
}
"""The library joins what such a module has computed before it splits it. Here a rank's share of each of the fused
weights is contiguous, so that nothing has to be joined.
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
"""Plans of ours by model type, where the library has none, or one that leaves out what heads of a rank ask for. Each is
tried by the sweep of ``bench/model_support``, because nothing at the start of a group shows that it is wrong.
"""

_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise", "local_params", "mla_kv_a_proj")
"""Styles of what is whole in every rank here. Embeddings are only read, a row a token: dividing them saves memory, and
costs a sum over ranks in every step. The parameters of a module with *local* ones have entries of their own. Latents
are every rank's.
"""

_REJOINED = ("colwise_gather_output", "rowwise_split_input")
"""Styles of what the library joins behind a module, or divides before it. It may be whole in every rank as well, but in
attention, whose heads are divided here.
"""


class DivisionPlan:
    """The plan of one model."""

    def __init__(self, model: Any) -> None:
        """Raise UnsupportedModel when the model has none, or one with styles that are not served."""
        name, ours = type(model).__name__, _OURS.get(model.config.model_type)
        declared: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
        if not declared and ours is None:
            raise UnsupportedModel(f"{name} does not say how it divides among ranks")
        styles: dict[str, Style | Literal["refused"] | None] = {
            pattern: _style(pattern, style, declared) for pattern, style in (_COMMON | declared).items()
        }
        styles |= ours or {}
        odd = [f"{pattern} ({declared.get(pattern)})" for pattern, style in styles.items() if style == "refused"]
        if odd:
            raise UnsupportedModel(f"{name} has modules that are not divided among ranks here: {', '.join(odd)}")
        prefix = model.base_model_prefix
        kinds = getattr(model.config, "layer_types", None) or ()
        self._without_heads = {layer for layer, kind in enumerate(kinds) if kind in WITHOUT_ATTENTION}
        self._patterns = [
            (_pattern(f"{prefix}.{pattern}"), style) for pattern, style in styles.items() if style != "refused"
        ]

    def style(self, name: str) -> Style | None:
        """How the module or weight of this name is divided; None if it is whole, as are all modules with states."""
        layer = layer_of(name)
        if layer in self._without_heads and ".self_attn" in name:
            return None
        return next((style for pattern, style in self._patterns if pattern.fullmatch(name)), None)

    def divided(self, model: Any, style: Style) -> Iterator[str]:
        """Names of the modules of ``model`` that are divided in this way."""
        return (name for name, _ in list(model.named_modules()) if self.style(name) == style)


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a module or weight belongs to, if it does to one."""
    number = re.search(r"\.layers\.(\d+)\.", f"{name}.")
    return int(number[1]) if number else None


def _style(pattern: str, style: str, declared: Mapping[str, str]) -> Style | Literal["refused"] | None:
    """Return what a module of the library's ``style`` is here; None is whole."""
    if style in _WHOLE:
        return None
    if style in _REJOINED and pattern not in _FUSED and ".self_attn." not in pattern:
        return None
    fused, divided = _FUSED.get(pattern, ("", None))
    first = "qkv_proj" if "self_attn" in pattern else "gate_up_proj"
    is_fused = any(name.endswith(first) for name in declared)
    if divided is not None and style == fused and is_fused:
        return divided
    return _DIVIDED.get(style, "refused")


def _pattern(declared: str) -> re.Pattern[str]:
    """``*`` stands for one component of a name."""
    return re.compile(re.escape(declared).replace(r"\*", r"[^.]+"))
