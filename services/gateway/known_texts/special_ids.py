"""The special tokens that a tokenizer puts around a text. Pure."""

from __future__ import annotations

import itertools
from typing import Any

from services.gateway.known_texts.boundaries import links
from shared.packed_tokens import PackedTokens


def special_ids(post_processor: dict[str, Any] | None) -> tuple[PackedTokens, PackedTokens] | None:
    """Return the tokens put before a text's tokens and behind them.

    Returns None where this part of a ``tokenizer.json`` is unknown.
    """
    front: list[int] = []
    back: list[int] = []
    for step in links(post_processor, "processors"):
        match step["type"]:
            case "ByteLevel":
                continue
            case "TemplateProcessing":
                found = _of_template(step)
            case "BertProcessing" | "RobertaProcessing":
                found = [step["cls"][1]], [step["sep"][1]]
            case _:
                return None
        if found is None:
            return None
        front, back = [*found[0], *front], [*back, *found[1]]
    return PackedTokens.of(front), PackedTokens.of(back)


def _of_template(step: dict[str, Any]) -> tuple[list[int], list[int]] | None:
    pieces = step["single"]
    texts = [place for place, piece in enumerate(pieces) if "Sequence" in piece]
    if len(texts) != 1:
        return None
    known = step["special_tokens"]
    ids = [known[piece["SpecialToken"]["id"]]["ids"] if "SpecialToken" in piece else [] for piece in pieces]
    return [*itertools.chain(*ids[: texts[0]])], [*itertools.chain(*ids[texts[0] :])]
