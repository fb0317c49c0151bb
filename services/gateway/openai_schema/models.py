"""GET /v1/models, /version, /load and the health endpoints."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.openai_schema.errors import ErrorDetail


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model or adapter: OpenAI's fields, vLLM's ``root`` and ``max_model_len``, and the bound of token ids."""

    id: str
    object: str = "model"
    created: int
    root: str
    max_model_len: int
    vocab_size: int
    owned_by: str = "thermocline"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The base model, then the loaded adapters."""

    object: str = "list"
    data: list[ModelCard]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The version of this gateway's package."""

    version: str


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Choices in progress at this gateway, under vLLM's name."""

    server_load: int


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """A feature that a process of the cell (``component``) was configured for, by ``setting``, and lacks now.

    ``reason`` is empty for callers without the admin key.
    """

    component: str
    what: str
    reason: str
    setting: str


class ServingDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The device of a worker. ``note`` says why an existing GPU is not used."""

    worker_id: str
    kind: str
    name: str
    ranks: int = 1
    note: str = ""


class ServingPool(msgspec.Struct, frozen=True, kw_only=True):
    """A place of KV: ``tier`` is device, host, hidden, disk or remote, ``owner`` a worker or a storage.

    ``tokens`` and ``bytes`` are null where nothing bounds them. ``is_ready`` is false while a pool is being made.
    """

    tier: str
    owner: str
    tokens: int | None
    bytes: int | None
    is_ready: bool = True


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The devices and pools that serve requests.

    ``dtype`` is the type in which the model computes, ``kv_dtype`` that of K and V in pages. A request may have
    ``context_tokens``: ``model_context_tokens``, or the size of a device pool where that is less.
    """

    devices: list[ServingDevice]
    dtype: str
    kv_dtype: str = ""
    context_tokens: int
    model_context_tokens: int
    page_size: int
    page_bytes: int
    pools: list[ServingPool]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a gateway. ``status`` is ``live``, ``ready``, ``degraded`` or ``not_ready``.

    Readiness has the name of the cell (``--cell``, "" without one) and of its ``model``. ``degraded``: requests are
    answered, and a configured feature is missing. ``error`` and ``reasons`` are present when ``status`` is
    ``not_ready``, ``serving`` when requests are answered.
    """

    status: str
    cell: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    degraded: list[Shortfall] | UnsetType = UNSET
    reasons: list[str] | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    serving: Serving | UnsetType = UNSET
