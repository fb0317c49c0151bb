"""The cell's status for operators: GET /v1/cell and GET /v1/cell/events."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from services.gateway.openai_schema.cache import PoolReport
from services.gateway.openai_schema.models import Shortfall


class CellDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The device of a worker; ``note`` says why an existing GPU is not used."""

    kind: str
    name: str
    ranks: int
    note: str


class CellBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a storage, in bytes; 0 is none. ``awaits_pool``: its host pool is being made."""

    storage_id: str
    host: int
    awaits_pool: bool
    disk: int
    has_remote: bool


class CellWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker. ``draining``: it gets no new requests and is about to end."""

    worker_id: str
    incarnation: str
    running: int
    waiting: int
    draining: bool
    device: CellDevice | None = None


class CellRestoration(msgspec.Struct, frozen=True, kw_only=True):
    """Times to restore prefixes from below host memory in one way: sums of seconds over ``count``.

    ``bias`` and ``error`` are smoothed relative errors of the predictions, with and without their sign.
    """

    kind: str
    count: int
    predicted_seconds: float
    observed_seconds: float
    bias: float
    error: float


class CellTenant(msgspec.Struct, frozen=True, kw_only=True):
    """The requests and cached bytes of a tenant, or of all other callers (``other``).

    Bytes are those of all pools of a tier. Tenants with one salt have one cache: each is shown all of it.
    """

    tenant: str
    running: int
    waiting: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int


class CellKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels that the cell's KV is computed with: their numerics ``epoch``, and the ``release`` that has them.

    ``files`` is the fingerprint of the model, whatever kernels compute it.
    """

    files: str
    epoch: int
    release: str = ""


class CellReplacement(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that gets the name of another once every worker has it, or that did not because of ``faults``."""

    digest: str
    workers: list[str] = []
    faults: dict[str, str] = {}
    room_waits: dict[str, str] = {}


class CellAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that requests may ask for: the ``workers`` that have it, and why others could not load it.

    ``requests`` wait or run with it, under any of its names. ``room_waits`` are workers that load it when an unloaded
    adapter has ended its last request, and which adapter that is.
    """

    name: str
    digest: str
    path: str
    workers: list[str]
    faults: dict[str, str]
    requests: int
    room_waits: dict[str, str] = {}
    replacement: CellReplacement | None = None


class CellFlow(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of KV moved from one place to another since the cell started. Rates are differences of two reports.

    ``source`` is a tier, ``computed``, or ``lent`` (another node); ``target`` is a tier. Loads from another worker's
    device count as ``host`` to ``device``.
    """

    source: str
    target: str
    tokens: int


class CellSavings(msgspec.Struct, frozen=True, kw_only=True):
    """Work that the cache saved since the cell started.

    ``tokens`` of prompts were reused, ``computed_tokens`` were not. ``prefill_seconds`` is how long the reused ones
    would have taken by the measured speed of their workers, ``load_seconds`` the time of loads that brought them back.
    """

    tokens: int
    computed_tokens: int
    prefill_seconds: float
    load_seconds: float


class CellReport(msgspec.Struct, frozen=True, kw_only=True):
    """The complete status of the cell by its active scheduler (``shared.messages.status.CellStatus``).

    ``age_ms`` is the time since this gateway received it, in milliseconds; 0 where it was requested. ``tenants`` are
    those of this gateway's file and ``other``; none without a file. ``degraded`` lists configured features that
    processes lack. ``models`` are the names that this gateway serves, the base model first. ``now_ms`` is Unix time in
    milliseconds by this gateway's clock, which dates its requests.
    """

    object: str = "cell"
    age_ms: float = 0.0
    scheduler_id: str
    epoch: int
    seq: int
    model: str
    kernels: CellKernels | None = None
    page_size: int
    queued: int
    running: int
    max_queued: int
    max_context: int
    workers: list[CellWorker]
    storages: list[str]
    storage_incarnations: dict[str, str]
    pools: list[PoolReport]
    counters: dict[str, int]
    nodes: int
    pins: int
    pinned_pages: int
    cache_leases: int = 0
    leased_pages: int = 0
    chunks: int
    hidden_chunks: int
    sparse_chunks: int
    fetches: int
    saves: int
    deferred: int
    in_queue_nodes: int
    in_flight_nodes: int
    restorations: list[CellRestoration]
    deferred_for_fetch: int = 0
    unplaced: int = 0
    tenants: list[CellTenant] = []
    degraded: list[Shortfall] = []
    dtype: str = ""
    page_bytes: int = 0
    budgets: list[CellBudget] = []
    adapters: list[CellAdapter] = []
    models: list[str] = []
    now_ms: int = 0
    chunk_tokens: int = 0
    flows: list[CellFlow] = []
    savings: CellSavings | None = None


class PageLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that opens the page at ``/ui`` once, before it expires; ``path`` follows the gateway's address."""

    object: str = "page_link"
    code: str
    path: str
    expires_in_s: float


class PageCode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The code behind ``#once=`` in such a link."""

    code: Annotated[str, Meta(min_length=1, max_length=128)]


class PageKey(msgspec.Struct, frozen=True, kw_only=True):
    """The key that the page sends with its requests."""

    object: str = "page_key"
    admin_key: str
