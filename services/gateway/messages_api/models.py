"""Models in Anthropic's shape, for clients that say that they are Anthropic's."""

from __future__ import annotations

from typing import Literal, Self

import msgspec

ANTHROPIC_VERSION = "anthropic-version"
"""The header by which they do."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # RFC 3339.
    max_input_tokens: int
    lifecycle: Literal["active"] = "active"


class ModelInfoList(msgspec.Struct, frozen=True, kw_only=True):
    """All on one page."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False

    @classmethod
    def of(cls, models: list[ModelInfo]) -> Self:
        ids = [model.id for model in models]
        return cls(data=models, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)
