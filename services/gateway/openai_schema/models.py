"""GET /v1/models, /version and the health endpoints."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.openai_schema.errors import ErrorDetail


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's fields, vLLM's ``root`` and ``max_model_len``, and the bound of token ids."""

    id: str
    object: str = "model"
    created: int
    root: str
    max_model_len: int
    vocab_size: int
    owned_by: str = "thermocline"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``error`` and ``reasons`` are there when ``status`` is ``not_ready``."""

    status: str
    reasons: list[str] | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
