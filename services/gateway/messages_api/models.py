"""Models in Anthropic's shape, for clients that send Anthropic's version header."""

from __future__ import annotations

from typing import Literal, Self

import msgspec

ANTHROPIC_VERSION = "anthropic-version"
"""The header by which a client asks for Anthropic's shape."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One model or adapter; ``max_input_tokens`` bounds prompt and answer together."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # RFC 3339.
    max_input_tokens: int
    lifecycle: Literal["active"] = "active"


class ModelInfoList(msgspec.Struct, frozen=True, kw_only=True):
    """All models, on one page."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False

    @classmethod
    def of(cls, models: list[ModelInfo]) -> Self:
        """Return the page of these models, with the ids of the first and the last."""
        ids = [model.id for model in models]
        return cls(data=models, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)
