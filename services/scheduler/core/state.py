"""The state that the fold carries: plain data, encoded as it stands (see :mod:`snapshot`).

Dictionaries keep the order of insertion, which is part of the state: it breaks ties.
"""

from __future__ import annotations

import msgspec

from services.scheduler.core.adapters import Adapter, HeldAdapter, Replacement
from services.scheduler.core.cache.candidates import Candidates
from services.scheduler.core.cache.eviction import Policy
from services.scheduler.core.cache.eviction.policy import Renewal
from services.scheduler.core.cache.hotness.filter import HotnessFilter
from services.scheduler.core.cache.kept import CacheLeases, Pin, Return
from services.scheduler.core.cache.page_pool import LostPool, PagePool
from services.scheduler.core.cache.prefix_tree import PrefixTree
from services.scheduler.core.cache.prompt_blocks import HeldBlocks
from services.scheduler.core.explain.recollection import Recollection
from services.scheduler.core.hidden.hidden_in_flight import HiddenFetch, HiddenSave, HiddenTier, OpenHiddenLease
from services.scheduler.core.kept_texts import KeptTexts
from services.scheduler.core.members.drain import Drain, NodeDrain
from services.scheduler.core.quotas.quota_accounts import Quotas
from services.scheduler.core.request import LeaseWait, Request
from services.scheduler.core.sparse.sparse_records import SparseTier
from services.scheduler.core.speed_fit import PredictionErrors, Rate, SpeedFit
from services.scheduler.core.step import Timer
from services.scheduler.core.tiers.under_way import (
    DiskTier,
    Fetch,
    Fetching,
    Flush,
    LateRead,
    Moves,
    Save,
    Transfer,
    Work,
)
from services.scheduler.core.waiting.fair_share import Line
from services.scheduler.core.waiting.transient import TransientTree
from shared.messages.cell_events import CellConfig
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.worker_events import DeviceFacts, KernelFacts, RestorationCosts, WorkerJoined


class Worker(msgspec.Struct):
    """A joined worker, its device pool and its orders."""

    worker_id: str
    incarnation: str
    node: str
    handle: PoolHandle
    max_context: int
    pool: PagePool
    number: int = 0  # Last plan number.
    speed: SpeedFit = msgspec.field(default_factory=SpeedFit)
    lease_waits: list[LeaseWait] = []
    restoration: RestorationCosts | None = None  # Reported when it joined.
    restoring: Rate = msgspec.field(default_factory=Rate)  # Observed rate of restored tokens.
    drain: Drain | None = None  # Set once it was asked to end: it gets nothing new.
    device: DeviceFacts | None = None  # Reported when it joined.
    line: Line = msgspec.field(default_factory=Line)
    work: Work = msgspec.field(default_factory=Work)
    moves: Moves = msgspec.field(default_factory=Moves)
    texts: KeptTexts = msgspec.field(default_factory=KeptTexts)  # Texts that its admissions may refer to.
    takes_compact: bool = False  # It reads compact forms; reported when it joined.
    reads_no_parts: str = ""  # Why it attends over no part of a prefix; reported when it joined.
    has_read_parts: bool = False  # Its first sparse read, which also maps memory, was reported.
    adapters: dict[str, HeldAdapter] = {}  # By digest.


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
    disk: DiskTier = msgspec.field(default_factory=DiskTier)
    fetching: Fetching = msgspec.field(default_factory=Fetching)
    hidden: HiddenTier = msgspec.field(default_factory=HiddenTier)
    sparse: SparseTier = msgspec.field(default_factory=SparseTier)
    shares: str = ""  # How other nodes' storages read its host pool; reported when it joined.
    handover_bytes: int = 0  # Reported when it joined.
    is_released: bool = False  # It was told that it may leave: no new read of its host pool begins.
    takes_compact: bool = False  # It reads compact forms; reported when it joined.


MOST_QUARANTINED = 64
"""Remembered inputs that were left out: more than occur between two snapshots, and enough to look into."""


class Quarantined(msgspec.Struct, frozen=True):
    """An input that was left out of the fold; ``time_ns`` is when that was decided."""

    time_ns: int
    kind: str
    subject: str
    reason: str


class CellState(msgspec.Struct):
    """Everything that the fold knows."""

    config: CellConfig = CellConfig()
    is_configured: bool = False  # ``config`` was received; before, no pool is asked for, because a pool stays.
    policy: str = CellConfig().policy  # In force, or about to be; ``config.policy`` may name one that does not exist.
    epoch: int = 0
    last_seq: int = 0
    model: str = ""
    kernels: KernelFacts | None = None  # Part of ``model``; None while no worker has named them.
    geometry: KvGeometry | None = None
    workers: dict[str, Worker] = {}
    storages: dict[str, Storage] = {}
    requests: dict[str, Request] = {}
    ended: dict[str, int] = {}  # Last attempt of requests that ended lately; fences events of a repeated id.
    unplaced: dict[str, int] = {}  # Waiting requests without a worker, with their place in arrival order.
    queued: int = 0  # Waiting requests, with a worker or without.
    queued_tokens: int = 0
    tenants: dict[str, int] = {}  # Waiting requests of each tenant that has any.
    transient: TransientTree = msgspec.field(default_factory=TransientTree)
    speed: SpeedFit = msgspec.field(default_factory=SpeedFit)  # Of all workers together, for those without reports.
    waiters: dict[str, dict[str, int]] = {}  # By producer: waiting requests, and the tokens each needs computed.
    tree: PrefixTree = msgspec.field(default_factory=PrefixTree)
    transfers: dict[int, Transfer] = {}
    next_transfer: int = 1
    next_promotion: int = 1
    saves: dict[int, Save] = {}
    next_save: int = 1
    key_ids: dict[str, str] = {}  # Id of the key that encrypts a namespace at rest, if any.
    fetches: dict[int, Fetch] = {}
    next_fetch: int = 1
    hidden_fetches: dict[int, HiddenFetch] = {}  # Numbered like ``fetches``.
    leases: dict[int, OpenHiddenLease] = {}
    next_lease: int = 1
    hidden_saves: dict[int, HiddenSave] = {}  # Numbered like ``saves``.
    predictions: PredictionErrors = msgspec.field(default_factory=PredictionErrors)
    unwanted: dict[int, None] = {}  # Fetches that lost their last waiter in this step; empty between steps.
    roomy: dict[str, None] = {}  # Storages where fetches may find room that they did not; empty between steps.
    pins: dict[str, Pin] = {}
    returns: dict[int, Return] = {}  # By the deepest node of a session that is expected back, in order of announcement.
    returns_due_ns: int = 0  # None of them is late before this time.
    cache_leases: CacheLeases = msgspec.field(default_factory=CacheLeases)  # Prefixes that callers asked to keep.
    timers: dict[str, Timer] = {}
    late_reads: dict[str, list[LateRead]] = {}  # By the timer that ends them.
    gateways: dict[str, int] = {}  # Last notice number of each gateway.
    counters: dict[str, int] = {}
    now_ns: int = 0  # Time of the input that is being folded, or was folded last.
    admissions: int = 0  # Requests admitted so far, repeats included.
    orders: dict[str, Policy] = {}  # Eviction policy of each pool, by tier and owner; apart in snapshots.
    candidates: dict[str, Candidates] = {}  # Of selective admission and promotion; empty while neither is in use.
    hotness: HotnessFilter = msgspec.field(default_factory=HotnessFilter)
    retired: list[Policy] = []  # Replaced policies, to be released; decide nothing, and are in no snapshot.
    recollection: Recollection | None = None  # Decides nothing, and is in no snapshot; None where it is off.
    quotas: Quotas = msgspec.field(default_factory=Quotas)
    quarantined: dict[int, Quarantined] = {}  # Inputs that were left out lately, by sequence number.
    lost: dict[str, LostPool] = {}  # By tier and owner: pools that are gone and are still being struck from the tree.
    flushes: list[Flush] = []  # The first one is in progress.
    renewal: Renewal | None = None  # The next policies, until they know all resident nodes.
    arriving: dict[str, WorkerJoined] = {}  # Workers that join once the lost pool they wait for was struck.
    blocks: HeldBlocks = {}  # Places in the tree of blocks that gateways refer to.
    adapters: dict[str, Adapter] = {}  # By digest.
    replacements: dict[str, Replacement] = {}  # Adapters that are to get a name of another, by that name.
    next_attach: int = 1
    handing: dict[str, NodeDrain] = {}  # Storages of leaving nodes, whose host copies are handed on.

    def count(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to a counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def storage_of(self, worker: Worker) -> Storage | None:
        """Return the storage of this worker's node: the first that joined there with a host pool, or None.

        None also where the host tier is off.
        """
        if not self.config.host_tier:
            return None
        for storage in self.storages.values():
            if storage.node == worker.node and storage.pool is not None:
                return storage
        return None

    def storage_id_of(self, worker: Worker) -> str:
        """Return the id of :meth:`storage_of`, or ""."""
        storage = self.storage_of(worker)
        return "" if storage is None else storage.storage_id


def new_state(*, remembers: bool = True) -> CellState:
    """Return the state before the first input. Unless it ``remembers``, admissions cannot be explained afterwards."""
    return CellState(recollection=Recollection() if remembers else None)
