"""The longest context that a model's configuration names, for workers and gateways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""Names of the longest context, the most specific first: MPT has max_seq_len, BLOOM seq_length."""

BEHIND_PADDING = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Model types whose first position is one behind the number of the padding token."""

_PADDING = 1
"""The padding token of these types where a configuration names none: the library's default."""


def first_position(model_type: str, pad_token_id: int | None) -> int:
    """Return the position of a prompt's first token in the model's own count: 0 for nearly all."""
    if model_type not in BEHIND_PADDING:
        return 0
    return (_PADDING if pad_token_id is None else pad_token_id) + 1


def first_of(config: Any) -> int:
    """Return the same for one of the library's configurations, which may have no padding token."""
    return first_position(config.model_type, getattr(config, "pad_token_id", None))


def named_context(read: Callable[[str], Any]) -> int:
    """Return the tokens of the longest context of a configuration, 0 where it names none; ``read`` returns its fields.

    That is at least what YaRN extends the context of pretraining to: model cards have a user set its factor alone.
    Positions before the first token of a prompt are not counted.
    """
    named = next((found for field in _FIELDS if isinstance(found := read(field), int) and found > 0), 0)
    named = max([named, *_extended(read, named)])
    return max(0, named - first_position(str(read("model_type")), read("pad_token_id")))


def _extended(read: Callable[[str], Any], named: int) -> Iterator[int]:
    """Yield the context of each YaRN of a configuration: one for all layers, or for layers of each type."""
    rope = read("rope_scaling") or read("rope_parameters")
    for each in (rope, *rope.values()) if isinstance(rope, dict) else ():
        if isinstance(each, dict) and each.get("rope_type", each.get("type")) == "yarn":
            # The library's defaults.
            own = each.get("original_max_position_embeddings", named)
            original, factor = read("original_max_position_embeddings") or own, each.get("factor")
            if isinstance(original, int) and isinstance(factor, int | float):
                yield int(original * factor)


def named_in(config: Mapping[str, Any]) -> int:
    """Return the same for a raw configuration."""
    return named_context(config.get)
