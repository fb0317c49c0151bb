"""Model types whose configuration has a part of text among others, as the library lists them."""

from __future__ import annotations

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from services.worker.engine.text_parts import ALIKE

LISTED_FOR_IMAGES = ("mistral4",)
"""Types of text whose causal class the library lists only among those for images."""


def with_text_part() -> list[str]:
    """Types that answer prompts and whose text part has a causal class, its own or one that computes the same."""
    answering = {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    return sorted(name for name in answering if name in CONFIG_MAPPING and _has_text_part(name))


def _has_text_part(name: str) -> bool:
    kind = CONFIG_MAPPING[name]
    if "text_config" not in kind.sub_configs:
        return False
    try:
        config = kind()
        text = config.get_text_config(decoder=True)
    except Exception:  # A type whose defaults make no configuration has its row through the causal mapping, if at all.
        return False
    return text is not config and (type(text) in MODEL_FOR_CAUSAL_LM_MAPPING or text.model_type in ALIKE)


def swept() -> list[str]:
    """Return all types that have a row."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *with_text_part(), *LISTED_FOR_IMAGES})
