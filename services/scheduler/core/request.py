"""One request from acceptance to its end: plain data of a snapshot."""

from __future__ import annotations

import msgspec
import numpy as np

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.hidden.hidden_in_flight import FetchedKv, HiddenRun
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.sparse.sparse_records import SparseChoice, SparseSpan
from services.scheduler.core.store_answers import StoreLacks
from shared.messages.requests import SubmitRequest


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

    def pages_for(self, tokens: int, page_size: int) -> int:
        """Pages for so many tokens, never more than the longest possible answer needs."""
        return -(-min(tokens, self.max_tokens_total) // page_size)

    @property
    def own_pages(self) -> bytes:
        """Pages of its worker that no tree node owns, packed. Copies."""
        behind = self.pages[self.shared * PAGE_NUMBER_BYTES :]
        if self.sparse is None:
            return behind
        table = np.frombuffer(behind, dtype="<i4")
        return table[table >= 0].tobytes() + self.sparse.pages


class LeaseWait(msgspec.Struct):
    """A running request that waits for ``pages`` more pages."""

    request_id: str
    generated: int
    pages: int
