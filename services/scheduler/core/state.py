"""The state that the fold carries: plain data, encoded as it stands (see :mod:`snapshot`).

Dictionaries keep the order of insertion, which is part of the state: it breaks ties.
"""

from __future__ import annotations

import msgspec

from services.scheduler.core.cache.candidates import Candidates
from services.scheduler.core.cache.eviction import Policy
from services.scheduler.core.cache.hotness.filter import HotnessFilter
from services.scheduler.core.cache.page_pool import PagePool
from services.scheduler.core.cache.pin import Pin
from services.scheduler.core.cache.prefix_tree import PrefixTree
from services.scheduler.core.cache.shares import ChunkShares
from services.scheduler.core.explain.recollection import Recollection
from services.scheduler.core.hidden.hidden_in_flight import HiddenFetch, HiddenLease, HiddenSave
from services.scheduler.core.members.drain import Drain
from services.scheduler.core.quotas.quota_accounts import Quotas
from services.scheduler.core.request import LeaseWait, Request
from services.scheduler.core.speed_fit import PredictionErrors, Rate, SpeedFit
from services.scheduler.core.step import Timer
from services.scheduler.core.store_answers import StoreBlanks
from services.scheduler.core.tiers.under_way import Batch, Fetch, LateRead, Promotion, Save, Transfer
from services.scheduler.core.waiting.fair_share import Queue
from services.scheduler.core.waiting.transient import TransientTree
from shared.messages.cell_events import CellConfig
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.worker_events import DeviceFacts, RestorationCosts


class Worker(msgspec.Struct):
    """A joined worker, its device pool and what it was told."""

    worker_id: str
    incarnation: str
    node: str
    handle: PoolHandle
    max_context: int
    pool: PagePool
    number: int = 0  # Last plan number.
    queue: Queue = msgspec.field(default_factory=Queue)  # Waiting requests that are ready to run.
    openings: dict[bytes, dict[str, None]] = {}  # Those of them that may reuse a prefix, by their first page of tokens.
    deferred: dict[str, int] = {}  # Waiting requests that are not, by when they will: tokens of their producer.
    load_waiters: dict[int, dict[str, int]] = {}  # Those of them that wait for a load, by node.
    queued_cost: int = 0  # Of all waiting requests, deferred ones included.
    unplanned: int = 0  # Tokens of running requests for which no chunk was sent yet.
    outstanding: int = 0  # Tokens of the chunks of ``batches``.
    speed: SpeedFit = msgspec.field(default_factory=SpeedFit)
    running: list[str] = []  # Admitted requests in order of admission.
    batches: list[Batch] = []  # Outstanding, oldest first.
    lease_waits: list[LeaseWait] = []
    leaving: int = 0  # Device pages that running backups will free, as far as is known.
    promotion: Promotion | None = None
    is_promotion_due: bool = False  # It has prefilled something since its last promotion was planned.
    neighbours: dict[str, bool] = {}  # Whose pools it was told to map, and whether loads from them may be planned.
    restoration: RestorationCosts | None = None  # As it said when it joined.
    restoring: Rate = msgspec.field(default_factory=Rate)  # Tokens restored, as observed.
    drain: Drain | None = None  # It was asked to end: it gets nothing new.
    device: DeviceFacts | None = None  # As it said when it joined.


class Storage(msgspec.Struct):
    """A joined storage and its host pool, once there is one."""

    storage_id: str
    incarnation: str
    node: str
    host_bytes: int
    number: int = 0
    is_pool_requested: bool = False
    handle: PoolHandle | None = None
    pool: PagePool | None = None
    late_backups: int = 0  # Backups whose deadline passed and that it has not answered yet.
    disk_bytes: int = 0  # Budget of its disk tier; 0 is none.
    has_remote: bool = False
    chunks: dict[bytes, None] = {}  # What its disk holds, as far as it said.
    saving: dict[bytes, int] = {}  # Chunks on their way to it, by save.
    unsaved: dict[int, int] = {}  # What there was no room for (:mod:`unsaved`): ends of paths, and the first chunk.
    fetching: dict[bytes, int] = {}  # Chunks on their way up from it, by fetch.
    fetch_pages: int = 0  # Host pages leased to fetches that are not over.
    late_fetches: int = 0  # Fetches whose deadline passed and that it has not answered yet.
    ahead: dict[str, int] = {}  # Host pages that were fetched for requests which still wait.
    due: dict[str, None] = {}  # Requests whose fetch waits for room, first come first served.
    late_saves: int = 0  # Saves whose deadline passed and that it has not answered yet.
    taken: dict[bytes, None] = {}  # Chunks that it took and does not have on its disk, lately,
    taken_from: int = 0  # by saves from this one on: those before it were flushed.
    fetched_tokens: float = 0.0  # What it brought up lately, and how long that took.
    fetched_us: float = 0.0
    disk_rate: Rate = msgspec.field(default_factory=Rate)  # Bytes read for fetches, as observed.
    disk_bytes_per_s: float = 0.0  # What its disk may be read with at the most; 0 is no limit.
    state_bytes: int = 0  # Budget of its state pool; 0 is none.
    is_hidden_requested: bool = False
    hidden_handle: PoolHandle | None = None
    hidden_pool: PagePool | None = None
    hidden_chunks: dict[bytes, None] = {}  # State that its disk holds, as far as it said.
    hidden_saving: dict[bytes, int] = {}  # Chunks whose state is on its way there, by lease, which may be over.
    blanks: StoreBlanks = msgspec.field(default_factory=StoreBlanks)
    overruled: int = 0  # Decisions since the last trial that only observed rates spoke for (see :mod:`exploration`).
    keeps_sparse: bool = False  # Its disk keeps chunks of KV a second time, so that they can be read in part.
    sparse_chunks: dict[bytes, None] = {}  # Those that it holds in that form, as far as it said.
    sparse_pace: Rate = msgspec.field(default_factory=Rate)  # Expected time of such reads over the time they took.
    sparse_overruled: int = 0  # Decisions against such reads for which only that pace spoke.
    shares: ChunkShares = msgspec.field(default_factory=ChunkShares)  # What was important of chunks read in part.


MOST_QUARANTINED = 64
"""Inputs left out that are remembered: more than are left out between two snapshots, and enough to look into."""


class Quarantined(msgspec.Struct, frozen=True):
    """An input that was left out of the fold; ``time_ns`` is when that was decided."""

    time_ns: int
    kind: str
    subject: str
    reason: str


class CellState(msgspec.Struct):
    """Everything that the fold knows."""

    config: CellConfig = CellConfig()
    is_configured: bool = False  # ``config`` was said; before, no pool is asked for, because a pool stays.
    policy: str = CellConfig().policy  # The policy in force; ``config.policy`` may name one that does not exist.
    epoch: int = 0
    last_seq: int = 0
    model: str = ""
    geometry: KvGeometry | None = None
    workers: dict[str, Worker] = {}
    storages: dict[str, Storage] = {}
    requests: dict[str, Request] = {}
    ended: dict[str, int] = {}  # Last attempt of requests that ended lately; fences events of a repeated id.
    unplaced: dict[str, int] = {}  # Waiting requests while no worker takes any, by their place in arrival order.
    queued: int = 0  # Waiting requests, wherever.
    queued_tokens: int = 0
    tenants: dict[str, int] = {}  # Waiting requests of each tenant that has any.
    transient: TransientTree = msgspec.field(default_factory=TransientTree)
    speed: SpeedFit = msgspec.field(default_factory=SpeedFit)  # Of all workers together, for those without reports.
    waiters: dict[str, dict[str, int]] = {}  # By producer: who waits for it, and until it has computed how much.
    tree: PrefixTree = msgspec.field(default_factory=PrefixTree)
    transfers: dict[int, Transfer] = {}
    next_transfer: int = 1
    next_promotion: int = 1
    saves: dict[int, Save] = {}
    next_save: int = 1
    key_ids: dict[str, str] = {}  # Whose key encrypts a namespace at rest, where anybody's does.
    fetches: dict[int, Fetch] = {}
    next_fetch: int = 1
    hidden_fetches: dict[int, HiddenFetch] = {}  # Numbered like ``fetches``.
    leases: dict[int, HiddenLease] = {}
    next_lease: int = 1
    hidden_saves: dict[int, HiddenSave] = {}  # Numbered like ``saves``.
    predictions: PredictionErrors = msgspec.field(default_factory=PredictionErrors)
    unwanted: dict[int, None] = {}  # Fetches that lost their last waiter in this step; empty between steps.
    roomy: dict[str, None] = {}  # Storages where fetches may find room that they did not; empty between steps.
    pins: dict[str, Pin] = {}
    timers: dict[str, Timer] = {}
    late_reads: dict[str, list[LateRead]] = {}  # By the timer that ends them.
    gateways: dict[str, int] = {}  # Last notice number of each gateway.
    counters: dict[str, int] = {}
    now_ns: int = 0  # Time of the input that is being folded, or was folded last.
    admissions: int = 0  # Requests admitted so far, repeats included.
    orders: dict[str, Policy] = {}  # Eviction policy of each pool, by tier and owner; apart in snapshots.
    candidates: dict[str, Candidates] = {}  # Of selective admission and promotion; empty while neither is in use.
    hotness: HotnessFilter = msgspec.field(default_factory=HotnessFilter)
    recollection: Recollection | None = None  # Decides nothing, and is in no snapshot; None where nobody asks.
    quotas: Quotas = msgspec.field(default_factory=Quotas)
    quarantined: dict[int, Quarantined] = {}  # Inputs that were left out lately, by their sequence.

    def count(self, name: str, amount: int = 1) -> None:
        """Raise a counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def storage_of(self, worker: Worker) -> Storage | None:
        """The storage that serves this worker's node: the first that joined there and has a host pool."""
        if not self.config.host_tier:
            return None
        for storage in self.storages.values():
            if storage.node == worker.node and storage.pool is not None:
                return storage
        return None

    def storage_id_of(self, worker: Worker) -> str:
        """The id of :meth:`storage_of`, or ""."""
        storage = self.storage_of(worker)
        return "" if storage is None else storage.storage_id


def new_state(*, remembers: bool = True) -> CellState:
    """The state before the first input. Unless it ``remembers``, no request can be explained afterwards."""
    return CellState(recollection=Recollection() if remembers else None)
