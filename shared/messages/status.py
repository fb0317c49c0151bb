"""Heartbeats, the cell's status, and request/reply calls; none of them is an input of the core."""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message
from shared.messages.tokens import TokenItem

Kind = Literal["gateway", "scheduler", "worker", "storage"]


class Heartbeat(Message, frozen=True):
    """Published by every process about once a second on ``heartbeat.<kind>.<id>``."""

    kind: Kind
    id: str
    incarnation: str
    last_plan: int = 0  # Highest plan number executed.
    draining: bool = False


class PoolStatus(Message, frozen=True):
    """Pages of one pool; free + cached + leased = total, and all leased are back at idle."""

    owner: str  # worker id or storage id
    tier: Literal["device", "host"]
    total: int
    free: int
    cached: int
    leased: int


class WorkerStatus(Message, frozen=True):
    worker_id: str
    incarnation: str
    running: int
    waiting: int


class CellStatus(Message, frozen=True):
    """Published by the active scheduler twice a second on ``status``, and on request at ``rpc.scheduler.status``."""

    scheduler_id: str
    epoch: int
    seq: int  # Last input folded.
    model: str
    page_size: int
    queued: int
    running: int
    max_queued: int
    max_context: int
    workers: tuple[WorkerStatus, ...] = ()
    storages: tuple[str, ...] = ()
    pools: tuple[PoolStatus, ...] = ()
    counters: dict[str, int] = {}  # Monotonic counters of the core, by name (hits, evictions, ...).
    nodes: int = 0
    deferred: int = 0  # Waiting requests that wait for KV which another is about to bring.
    in_queue_nodes: int = 0  # Transient nodes whose producers all wait.
    in_flight_nodes: int = 0  # Transient nodes that an admitted request is computing.


class GetStatus(Message, frozen=True):
    """Call ``rpc.scheduler.status``; answered by CellStatus."""


class GetOutputs(Message, frozen=True):
    """Call ``rpc.worker.<id>.outputs``: everything this worker emitted for a request from ``index`` on."""

    request_id: str
    attempt: int
    index: int


class Outputs(Message, frozen=True):
    """Answer: the items joined into one, or None if the worker no longer knows the request."""

    item: TokenItem | None


class GetInventory(Message, frozen=True):
    """Call ``rpc.worker.<id>.inventory`` or ``rpc.storage.<id>.inventory``."""


class Inventory(Message, frozen=True):
    """What a worker or storage really holds, for reconciliation and for tests."""

    id: str
    incarnation: str
    last_plan: int
    requests: tuple[str, ...] = ()
    pages_total: int = 0
    counters: dict[str, int] = {}  # e.g. prefill_tokens_computed, decode_tokens, pages_loaded, steps


class TakeSnapshot(Message, frozen=True):
    """Call ``rpc.scheduler.snapshot``: write a snapshot of the core now."""


class SnapshotTaken(Message, frozen=True):
    seq: int
    nbytes: int
