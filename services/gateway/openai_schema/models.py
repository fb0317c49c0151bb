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


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a process of the cell (``component``) was asked for, by ``setting``, and does not have now.

    ``reason`` is empty for callers without the admin key.
    """

    component: str
    what: str
    reason: str
    setting: str


class ServingDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker computes on. ``note`` says why a GPU that is there is not used."""

    worker_id: str
    kind: str
    name: str
    ranks: int = 1
    note: str = ""


class ServingPool(msgspec.Struct, frozen=True, kw_only=True):
    """Where KV is kept: ``tier`` is device, host, hidden, disk or remote, ``owner`` a worker or a storage.

    ``tokens`` and ``bytes`` are null where nothing bounds them. ``is_ready`` is false while a pool is being made.
    """

    tier: str
    owner: str
    tokens: int | None
    bytes: int | None
    is_ready: bool = True


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What answers requests. A request may have ``context_tokens``: ``model_context_tokens``, or what a device pool
    holds where that is less.
    """

    devices: list[ServingDevice]
    dtype: str
    context_tokens: int
    model_context_tokens: int
    page_size: int
    page_bytes: int
    pools: list[ServingPool]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``status`` is ``live``, ``ready``, ``degraded`` or ``not_ready``. ``degraded``: requests are answered, and
    something that was asked for is missing. ``error`` and ``reasons`` are there when ``status`` is ``not_ready``,
    ``serving`` when requests are answered.
    """

    status: str
    degraded: list[Shortfall] | UnsetType = UNSET
    reasons: list[str] | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    serving: Serving | UnsetType = UNSET
