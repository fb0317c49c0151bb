"""The text part of a model that also takes images or sound: the only part that is served.

The library has a class of its own for most text parts. Such a class need not answer prompts of text as the whole model
does: some mask prompts otherwise. So it is used only for types that ``python -m bench.model_support`` has compared
token for token. Some text parts without a class of their own are computed by that of another type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from shared.errors import UnsupportedModel

PROVEN = frozenset(
    (
        "apertus1p5",
        "aria",
        "aya_vision",
        "cohere2_vision",
        "cohere_compass",
        "deepseek_vl",
        "deepseek_vl_hybrid",
        "exaone4_5",
        "fuyu",
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glmasr",
        "glmga",
        "got_ocr2",
        "granite_speech",
        "granite_speech_plus",
        "hyperclovax_vision_v2",
        "idefics2",
        "idefics3",
        "inkling2",
        "internvl",
        "janus",
        "kimi_k25",
        "lfm2_vl",
        "lfm3_vl",
        "lighton_ocr",
        "llama4",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "minicpm_ocr",
        "minicpmv4_6",
        "minicpmv4_7",
        "minimax_m3_vl",
        "mistral3",
        "moss_transcribe_diarize",
        "omniasr",
        "ovis2",
        "pp_chart2table",
        "qianfan_ocr",
        "qwen2_5_vl",
        "qwen2_audio",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_asr",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen4_exp",
        "shieldgemma2",
        "smolvlm",
        "video_llama_3",
        "video_llava",
        "vipllava",
        "voxtral",
    )
)
"""Model types whose text part answers text as the whole model does (docs/reference/models.md)."""

ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4v_text": ("glm4", {}),
    "glm4v_moe_text": ("glm4_moe", {}),
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
"""Text parts that the library has no class for, the type that computes the same, and its settings for that: they differ
in rotary embeddings of three positions (mRoPE), which are one and the same for each token of a text.
"""

_OF_THREE_POSITIONS = ("mrope_section", "mrope_interleaved")

_PREFIXES = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    # The library names Qianfan-OCR's and Kimi K2.5's so: it takes their text's layers for those of a vision part.
    r"^(?:model\.)?(?:language_model|text_model)\.model\.(?:encoder\.layers|blocks)\.": "model.layers.",
    r"^(?:model\.)?(?:language_model|text_model)\.model\.": "model.",
    r"^model\.(?:language_model|text_model)\.": "model.",
}
"""Patterns of tensor names of text parts in whole models, and the names in their own class."""


_CONVERTED_AS = {
    "glm4v_moe_text": "glm4v_moe",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
}
"""Text parts whose tensors have other names, or another layout, in checkpoints of the whole model, under which type
alone the library knows the conversion.
"""


def convert_as_whole(config: Any) -> None:
    """Have the library convert tensors of the text part ``config`` as it does those of the whole model."""
    whole = _CONVERTED_AS.get(config.model_type)
    if whole is not None and get_checkpoint_conversion_mapping(config.model_type) is None:
        register_checkpoint_conversion_mapping(config.model_type, get_checkpoint_conversion_mapping(whole))


def text_part(config: Any) -> Any:
    """Return ``config`` itself, or the configuration of its text part.

    Raises UnsupportedModel where that cannot be served.
    """
    text = config.get_text_config(decoder=True)
    _list_class(text)
    if text is config or getattr(config, "is_encoder_decoder", False):
        return config
    name = config.model_type
    if text.model_type in ALIKE:
        text = _as_alike(text)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{name} takes more than text, and the library has no class that serves its text part, {text.model_type}, "
            "by itself"
        )
    if name not in PROVEN:
        raise UnsupportedModel(
            f"{name} takes more than text, and its text part was not proven to answer text as the whole model does; "
            f"proven are {', '.join(sorted(PROVEN))}"
        )
    if hasattr(config, "tie_word_embeddings"):
        text.tie_word_embeddings = config.tie_word_embeddings
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(config, "dtype", None)
    return text


def _list_class(text: Any) -> None:
    """Have the library find its causal class for ``text`` where it lists it among those for images (Mistral 4)."""
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(text) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(text)]
        if found.__name__.endswith("ForCausalLM"):
            MODEL_FOR_CAUSAL_LM_MAPPING.register(type(text), found, exist_ok=True)


def _as_alike(text: Any) -> Any:
    """Return the configuration of the type that computes the same as ``text``, under the name of its own type."""
    fields = text.to_dict()
    fields["rope_parameters"] = {
        name: value for name, value in fields["rope_parameters"].items() if name not in _OF_THREE_POSITIONS
    }
    fields.setdefault("head_dim", text.hidden_size // text.num_attention_heads)
    kind, settings = ALIKE[fields.pop("model_type")]
    made = CONFIG_MAPPING[kind](**fields | settings)
    made.model_type = text.model_type
    return made


def tensor_names(raw: Mapping[str, Any]) -> dict[str, str] | None:
    """Return patterns of tensor names in a checkpoint, and their replacements in its text part.

    ``raw`` is the checkpoint's raw configuration. The result is None for a model of text.
    """
    return dict(_PREFIXES) if isinstance(raw.get("text_config"), dict) else None


def text_tensor_name(name: str) -> str:
    """Return one tensor's name in the text part, for its name in a whole model."""
    for pattern, target in _PREFIXES.items():
        name, found = re.subn(pattern, target, name)
        if found:
            break
    return name
