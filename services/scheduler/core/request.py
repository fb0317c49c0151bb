"""One request from acceptance to its end: plain data of a snapshot."""

from __future__ import annotations

import msgspec
import numpy as np

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.cache.prompt_blocks import PromptBlocks
from services.scheduler.core.hidden.hidden_in_flight import HiddenRun
from services.scheduler.core.lifecycle import DEFERRED, RequestState, WaitEvent, WaitKind, next_wait
from services.scheduler.core.sparse.sparse_records import SparseChoice, SparseSpan
from services.scheduler.core.tiers.under_way import FetchedKv, StoreLacks
from shared.messages.requests import SubmitRequest


class Wait(msgspec.Struct, frozen=True):
    """What a waiting request waits for, by :data:`lifecycle.WAIT_TRANSITIONS`, and since when it stands aside for it.

    ``subject`` names it: a producer's request id, a tree node, a fetch of KV or of hidden states.
    """

    kind: WaitKind = WaitKind.NOWHERE
    subject: str | int = 0
    since_ns: int = 0

    @property
    def is_deferred(self) -> bool:
        """Whether it is out of the ready order."""
        return self.kind in DEFERRED

    @property
    def producer(self) -> str:
        """The request that is to compute what both share; "" where it waits for none."""
        return str(self.subject) if self.kind is WaitKind.PRODUCER else ""

    @property
    def node(self) -> int:
        """The node that is being loaded; 0 where it waits for none."""
        return int(self.subject) if self.kind is WaitKind.LOAD else 0

    @property
    def fetch(self) -> int:
        """The fetch, of KV or of hidden states, that brings a part of its prefix; 0 where it waits for none."""
        return int(self.subject) if self.kind in (WaitKind.FETCH, WaitKind.RUN) else 0


class Patience(msgspec.Struct):
    """How long a request may still be deferred before it is admitted."""

    timer: str = ""  # Runs from its first deferral for another on.
    is_over: bool = False  # That timer fired: it is not deferred again.
    fetch_since_ns: int = 0  # When it was first deferred for a fetch.
    fetch_timer: str = ""  # Runs while it is, where that wait is bounded.
    is_fetch_over: bool = False  # That timer fired: it waits for no fetch.


class QueuePlace(msgspec.Struct):
    """Where a request waits in its worker's queue, and what it was estimated to cost there."""

    cost: int = 0  # Microseconds of its prefill, loads included.
    uncached: int = 0  # Tokens that it would compute.
    lane: str = ""  # Whose share of the queue it waits in: its tenant's, or "" where all share one.
    is_returned: bool = False  # It came back from a deferral and stands at the front.
    marks: int = 0  # Deepest node of its marks in the transient tree; 0 is none.


class Prefetch(msgspec.Struct):
    """What is fetched for a waiting request from below host memory, ahead of its turn."""

    fetch: int = 0  # The fetch that brings a part of its prefix, deferred for it or not; 0 is none.
    end: int = 0  # How far that fetch can bring it, in tokens.
    is_due: bool = False  # There may be something to fetch, and that could not be begun yet.
    follows: int = 0  # A fetch of hidden states for another that brings what it needs next, as far as was known.
    brought_to: int = 0  # Its prefix was fetched for it up to this many tokens,
    brought_from: int = 0  # beginning with this one,
    brought_remote: int = 0  # and so many from the object store.
    kv: FetchedKv | None = None  # What its next load will complete, where that was predicted.
    lacks: StoreLacks = msgspec.field(default_factory=StoreLacks)
    counted: int = -1  # Tokens of its prefix that were there when fetches were looked for; -1 is not yet.
    is_again: bool = False  # A part of those had gone when it was next, and was looked for once more.
    brought_lent: int = 0  # Of what was fetched for it: tokens that came from another node's host memory.
    is_loan_over: bool = False  # A lender did not bring what it was to, or is too slow: no other one is asked.
    raised_to: int = 0  # Disks of other nodes were asked for its prefix up to this many tokens.
    looks_again: bool = False  # Another node may have what comes next before its turn: it is looked for again.

    def forget_brought(self) -> None:
        """Forget what was fetched for it."""
        self.brought_to = self.brought_from = self.brought_remote = self.brought_lent = 0

    @property
    def foreseen(self) -> int:
        """Tokens of its prefix that were there or were brought: where it finds fewer, some have gone again."""
        return max(self.counted, self.brought_to)


class PromptMatch(msgspec.Struct):
    """What of a request's prompt the tree is known to have.

    Its last match ended in ``node`` after so many ``tokens``: the next one goes on from there. ``blocks`` are names by
    which the prompt may be referred to.
    """

    node: int = 0
    tokens: int = 0
    blocks: PromptBlocks = msgspec.field(default_factory=PromptBlocks)


class HiddenPart(msgspec.Struct):
    """What a request has to do with hidden states."""

    run: HiddenRun | None = None  # Its prefix comes back from them.
    lease: int = 0  # Under which its own are being saved; 0 is none.
    refusals: int = 0  # Restorations of it that failed; past the first it is not restored again.


class SparsePart(msgspec.Struct):
    """What a request that allows a lossy prefix reads in part."""

    choice: SparseChoice | None = None  # While it waits: what is to be read in part of what follows.
    span: SparseSpan | None = None  # The same once it is admitted: what this attempt computes is lossy.
    is_refused: bool = False  # Such a prefix could not be read: it does without from then on.


class Request(msgspec.Struct):
    """One request from acceptance to its end. Page fields mean something only while it is admitted.

    ``submit`` has the whole prompt, however it came.

    ``pages`` is the page table as the worker has it; the tree owns its first ``shared`` pages, on the path that
    ends in ``node``, and the request owns the rest. KV is known to be valid for the first ``computed`` tokens,
    as far as that can be said of what stands on a sparse prefix.
    """

    submit: SubmitRequest
    accepted_seq: int  # Also its place in arrival order.
    accepted_ns: int
    state: RequestState = RequestState.WAITING
    attempt: int = 1
    failures: int = 0  # Lost workers and failed chunks so far.
    output: bytes = b""  # Output tokens of earlier attempts, packed.
    deadline_timer: str = ""
    worker_id: str = ""  # Where it waits or runs; "" is nowhere.
    wait: Wait = Wait()
    place: QueuePlace = msgspec.field(default_factory=QueuePlace)
    patience: Patience = msgspec.field(default_factory=Patience)
    prefetch: Prefetch = msgspec.field(default_factory=Prefetch)
    match: PromptMatch = msgspec.field(default_factory=PromptMatch)
    hidden: HiddenPart = msgspec.field(default_factory=HiddenPart)
    sparse: SparsePart = msgspec.field(default_factory=SparsePart)
    admission: int = 0  # Number of its last admission in the cell.
    pages: bytes = b""
    shared: int = 0  # pages
    node: int = 0  # Deepest tree node that it holds a lock on; 0 is none.
    planned: int = 0  # Tokens whose chunks were sent or whose KV is cached.
    computed: int = 0  # tokens
    is_poisoned: bool = False  # A chunk failed; what this attempt computed since is not to be trusted.
    ending: str = ""  # "cancelled" or "deadline" once it is to end; a code of shared.errors when it failed too often.
    lease_generated: int = -1  # ``generated`` of the last lease request that was granted.

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def tokens(self) -> bytes:
        """Prompt and output so far, packed. Copies."""
        return self.submit.prompt + self.output if self.output else self.submit.prompt

    def advance_wait(self, event: WaitEvent, subject: str | int = 0, now_ns: int = 0) -> None:
        """Wait for something else from now on, as the table has it. Raises IllegalTransition where it has no entry."""
        self.wait = Wait(next_wait(self.wait.kind, event), subject, now_ns)

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
    def resume_timer(self) -> str:
        """The timer that runs while its gateway is asked what this attempt is to go on from."""
        return f"resume.{self.accepted_seq}.{self.attempt}"

    @property
    def own_pages(self) -> bytes:
        """Pages of its worker that no tree node owns, packed. Copies."""
        behind = self.pages[self.shared * PAGE_NUMBER_BYTES :]
        if self.sparse.span is None:
            return behind
        table = np.frombuffer(behind, dtype="<i4")
        return table[table >= 0].tobytes() + self.sparse.span.pages


class LeaseWait(msgspec.Struct):
    """A running request that waits for ``pages`` more pages."""

    request_id: str
    generated: int
    pages: int
