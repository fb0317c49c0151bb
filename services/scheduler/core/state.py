"""The state that the fold carries: plain data, encoded as it stands (see :mod:`snapshot`).

Dictionaries keep the order of insertion, which is part of the state: it breaks ties.
"""

from __future__ import annotations

import msgspec
import numpy as np

from services.scheduler.core.cache.candidates import Candidates
from services.scheduler.core.cache.eviction import AnyPolicy
from services.scheduler.core.cache.hotness.filter import HotnessFilter
from services.scheduler.core.cache.page_pool import PagePool
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, PrefixTree
from services.scheduler.core.cache.recollection import Recollection
from services.scheduler.core.cache.shares import ChunkShares
from services.scheduler.core.hidden.hidden_in_flight import FetchedKv, HiddenFetch, HiddenLease, HiddenRun, HiddenSave
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.members.drain import Drain
from services.scheduler.core.prediction_error import PredictionErrors
from services.scheduler.core.quotas.quota_accounts import Quotas
from services.scheduler.core.sparse.sparse_records import SparseChoice, SparseSpan
from services.scheduler.core.speed_fit import Rate, SpeedFit
from services.scheduler.core.store_answers import StoreBlanks, StoreLacks
from services.scheduler.core.tiers.under_way import Fetch, Save, Transfer
from services.scheduler.core.waiting.fair_share import Queue
from services.scheduler.core.waiting.transient import TransientTree
from shared.messages.cell_events import CellConfig
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.requests import SubmitRequest
from shared.messages.worker_events import DeviceFacts, RestorationCosts


class Request(msgspec.Struct):
    """One request from acceptance to its end. Page fields mean something only while it is admitted.

    ``pages`` is the page table as the worker has it; the tree owns its first ``shared`` pages, on the path that
    ends in ``node``, and the request owns the rest. KV is known to be valid for the first ``computed`` tokens,
    as far as that can be said of what stands on a ``sparse`` prefix.
    """

    submit: SubmitRequest
    accepted_seq: int  # Also its place in arrival order.
    accepted_ns: int
    state: RequestState = RequestState.WAITING
    attempt: int = 1
    failures: int = 0  # Lost workers and failed chunks so far.
    output: bytes = b""  # Output tokens of earlier attempts, packed.
    deadline_timer: str = ""
    resume_timer: str = ""
    worker_id: str = ""  # Where it waits or runs; "" is nowhere.
    cost: int = 0  # Estimated microseconds of its prefill, loads included, at the worker where it waits.
    uncached: int = 0  # Tokens that it was estimated to compute there.
    lane: str = ""  # Whose share of the queue it waits in: its tenant's, or "" where all share one.
    is_returned: bool = False  # It came back from a deferral and stands at the front.
    transient: int = 0  # Deepest node of its marks in the transient tree; 0 is none.
    waits_for: str = ""  # Deferred until this producer has computed what both share ...
    waits_node: int = 0  # ... or until this node is not being loaded any more ...
    waits_fetch: int = 0  # ... or until this fetch has brought what it can.
    fetch: int = 0  # The fetch that brings a part of its prefix while it waits, deferred for it or not; 0 is none.
    fetch_end: int = 0  # How far that fetch can bring it, in tokens.
    is_fetch_due: bool = False  # There may be something to fetch for it, and that could not be begun yet.
    fetch_wait_ns: int = 0  # When it was first deferred for a fetch.
    prefetch_timer: str = ""  # Runs while it is, where the wait is bounded.
    is_fetch_overdue: bool = False  # That timer fired: it waits for no fetch before it is admitted.
    fetched_to: int = 0  # Its prefix was fetched for it up to this many tokens,
    fetched_from: int = 0  # beginning with this one,
    fetched_remote: int = 0  # of which so many came from the object store.
    deferred_ns: int = 0  # When the deferral began that it is in.
    deferral_timer: str = ""  # Runs from its first deferral until it is admitted.
    is_impatient: bool = False  # That timer fired: it is not deferred again.
    admission: int = 0  # Number of its last admission in the cell.
    pages: bytes = b""
    shared: int = 0  # pages
    node: int = 0  # Deepest tree node that it holds a lock on; 0 is none.
    planned: int = 0  # Tokens whose chunks were sent or whose KV is cached.
    computed: int = 0  # tokens
    is_poisoned: bool = False  # A chunk failed; what this attempt computed since is not to be trusted.
    ending: str = ""  # "cancelled" or "deadline" once it is to end; a code of shared.errors when it failed too often.
    lease_generated: int = -1  # ``generated`` of the last lease request that was granted.
    matched_node: int = 0  # Where its last match ended, and after how many tokens: the next one goes on from there.
    matched_tokens: int = 0
    run: HiddenRun | None = None  # Its prefix comes back from state below host memory.
    follows: int = 0  # A fetch of state for another that brings what it needs next, as far as was known.
    lease: int = 0  # Under which its own state is being saved; 0 is none.
    hidden_refusals: int = 0  # Restorations of it that failed; past the first it is not restored again.
    fetched_kv: FetchedKv | None = None  # What its next load will complete, where that was predicted.
    lacks: StoreLacks = msgspec.field(default_factory=StoreLacks)
    sparse_choice: SparseChoice | None = None  # While it waits: what is to be read in part of what follows.
    sparse: SparseSpan | None = None  # The same once it is admitted: what this attempt computes is lossy.
    is_sparse_refused: bool = False  # Such a prefix could not be read: it does without from then on.

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def tokens(self) -> bytes:
        """Prompt and output so far, packed. Copies."""
        return self.submit.prompt + self.output if self.output else self.submit.prompt

    @property
    def may_reuse(self) -> bool:
        """Whether it reads the cache at all; prompt logprobs need every token computed."""
        return self.submit.cache.read and self.submit.sampling.prompt_logprobs is None

    @property
    def arrival_order(self) -> tuple[int, int]:
        """Sort key: higher priority first, then earlier arrival. A request keeps its place over all attempts."""
        return (-self.submit.priority, self.accepted_seq)

    @property
    def token_count(self) -> int:
        return (len(self.submit.prompt) + len(self.output)) // 4

    @property
    def max_tokens_total(self) -> int:
        """Tokens of prompt and answer at the most."""
        return self.submit.prompt_tokens + self.submit.sampling.max_tokens

    @property
    def own_pages(self) -> bytes:
        """Pages of its worker that no tree node owns, packed. Copies."""
        behind = self.pages[self.shared * PAGE_NUMBER_BYTES :]
        if self.sparse is None:
            return behind
        table = np.frombuffer(behind, dtype="<i4")
        return table[table >= 0].tobytes() + self.sparse.pages


class Chunk(msgspec.Struct):
    """A chunk of an outstanding batch: tokens [start, end) of a request's attempt, computed or restored."""

    request_id: str
    attempt: int
    start: int
    end: int
    is_restored: bool = False


class Load(msgspec.Struct):
    """A load of an outstanding batch. It fills the ``loading`` pages of ``node`` and of the nodes above it.

    It begins ``depth`` tokens below the root; what is loading above that belongs to another load of the batch.
    ``storage_id`` is "" once that storage is lost. ``is_orphaned`` says that its request left before it had
    produced a token, so that nothing proves that the load took place.
    """

    request_id: str
    attempt: int
    node: int
    storage_id: str
    is_orphaned: bool = False
    depth: int = 0
    neighbour_id: str = ""  # Whose device it reads instead of a host pool, where the path to ``node`` is locked.


class Batch(msgspec.Struct):
    """A RunBatch that is not answered yet. ``tokens`` is the sum of its chunks."""

    plan: int
    chunks: list[Chunk]
    loads: list[Load]
    tokens: int = 0


class Promotion(msgspec.Struct):
    """A PromotePages that is not answered yet. It fills the ``loading`` pages of these nodes.

    ``storage_id`` is "" once that storage is lost. A node that was cut since stands for all its parts.
    """

    promotion_id: int
    storage_id: str
    nodes: list[int]


class LeaseWait(msgspec.Struct):
    """A running request that waits for ``pages`` more pages."""

    request_id: str
    generated: int
    pages: int


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


class Pin(msgspec.Struct):
    """A prefix that is to be kept: a host lock on every node from the root to ``node`` at this storage.

    ``node`` is 0 while nothing of it is held. ``refusal`` says why nothing is and nothing will be.
    """

    pin_id: str
    storage_id: str
    namespace: str
    prefix: bytes  # Its tokens, packed.
    expires_ns: int
    timer_id: str
    node: int = 0
    pages: int = 0  # Host pages that it holds.
    chunks: bytes = b""  # What the storage was told to keep on its disk.
    refusal: str = ""


class LateRead(msgspec.Struct):
    """What a worker that was given up may still be reading of a neighbour's device: the path to ``node``, locked."""

    neighbour_id: str
    node: int


class Timer(msgspec.Struct):
    """A timer of the shell.

    ``kind`` is deadline, deferral, prefetch, resume, backup, save, lease, fetch, state_fetch, pin, reads or drain.
    """

    at_ns: int
    kind: str
    subject: str


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
    orders: dict[str, AnyPolicy] = {}  # Eviction policy of each pool, by tier and owner.
    candidates: dict[str, Candidates] = {}  # Of selective admission and promotion; empty while neither is in use.
    hotness: HotnessFilter = msgspec.field(default_factory=HotnessFilter)
    recollection: Recollection = msgspec.field(default_factory=Recollection)  # Decides nothing; in no snapshot.
    quotas: Quotas = msgspec.field(default_factory=Quotas)

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


def new_state() -> CellState:
    """The state before the first input."""
    return CellState()
