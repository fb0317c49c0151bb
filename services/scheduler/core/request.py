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
    """The reason for which a waiting request waits (:data:`lifecycle.WAIT_TRANSITIONS`), and when a deferral began.

    ``subject`` names it: a producer's request id, a tree node, a fetch of KV or of hidden states.
    """

    kind: WaitKind = WaitKind.NOWHERE
    subject: str | int = 0
    since_ns: int = 0

    @property
    def is_deferred(self) -> bool:
        """Whether the request is out of the ready order."""
        return self.kind in DEFERRED

    @property
    def producer(self) -> str:
        """Id of the request that is to compute what both share; "" where it waits for none."""
        return str(self.subject) if self.kind is WaitKind.PRODUCER else ""

    @property
    def node(self) -> int:
        """Id of the node that is being loaded; 0 where it waits for none."""
        return int(self.subject) if self.kind is WaitKind.LOAD else 0

    @property
    def fetch(self) -> int:
        """Id of the fetch, of KV or of hidden states, that brings a part of its prefix; 0 where it waits for none."""
        return int(self.subject) if self.kind in (WaitKind.FETCH, WaitKind.RUN) else 0


class Patience(msgspec.Struct):
    """Bounds on how long a request may still be deferred before it is admitted."""

    timer: str = ""  # Runs from its first deferral for another request on.
    is_over: bool = False  # That timer fired: it is not deferred again.
    fetch_since_ns: int = 0  # When it was first deferred for a fetch.
    fetch_timer: str = ""  # Runs during that wait, where it is bounded.
    is_fetch_over: bool = False  # That timer fired: it waits for no fetch.


class QueuePlace(msgspec.Struct):
    """A request's place in its worker's queue, and its estimated cost there."""

    cost: int = 0  # Microseconds of its prefill, loads included.
    uncached: int = 0  # Tokens that it would compute.
    lane: str = ""  # The tenant whose share of the queue it waits in; "" where all share one.
    is_returned: bool = False  # It came back from a deferral and stands at the front.
    marks: int = 0  # Deepest node of its marks in the transient tree; 0: none.


class Prefetch(msgspec.Struct):
    """Fetches for a waiting request from below host memory, ahead of its turn."""

    fetch: int = 0  # The fetch that brings a part of its prefix, deferred for it or not; 0: none.
    end: int = 0  # End of its prefix after that fetch, in tokens.
    is_due: bool = False  # There may be something to fetch, which could not begin yet.
    follows: int = 0  # Another request's fetch of hidden states that is known to bring its next chunk.
    brought_to: int = 0  # Its prefix was fetched for it up to this token,
    brought_from: int = 0  # beginning with this one,
    brought_remote: int = 0  # with this many tokens from the object store.
    kv: FetchedKv | None = None  # A fetched part with a predicted cost, to be completed by its next load.
    lacks: StoreLacks = msgspec.field(default_factory=StoreLacks)
    counted: int = -1  # Tokens of its prefix cached at the last look for fetches; -1: not looked yet.
    is_again: bool = False  # A part of those was evicted when it was next, and fetched again.
    brought_lent: int = 0  # Tokens fetched for it from another node's host memory.
    is_loan_over: bool = False  # A lender failed, or is too slow: no other one is asked.
    raised_to: int = 0  # Disks of other nodes were asked for its prefix up to this token.
    looks_again: bool = False  # Another node may have the next chunk before its turn: look again.

    def forget_brought(self) -> None:
        """Forget what was fetched for it and from where."""
        self.brought_to = self.brought_from = self.brought_remote = self.brought_lent = 0

    @property
    def foreseen(self) -> int:
        """Tokens of its prefix that were cached or fetched: where it finds fewer, some were evicted again."""
        return max(self.counted, self.brought_to)


class PromptMatch(msgspec.Struct):
    """The part of a request's prompt that the tree is known to have.

    Its last match ended in ``node`` after ``tokens`` tokens: the next one continues from there. ``blocks`` are names by
    which the prompt may be referred to.
    """

    node: int = 0
    tokens: int = 0
    blocks: PromptBlocks = msgspec.field(default_factory=PromptBlocks)


class HiddenPart(msgspec.Struct):
    """The hidden states that a request is restored from, and those saved of it."""

    run: HiddenRun | None = None  # Hidden states that its prefix is restored from.
    lease: int = 0  # The lease under which its own are being saved; 0: none.
    refusals: int = 0  # Restorations of it that failed; past the first it is not restored again.


class SparsePart(msgspec.Struct):
    """The sparse prefix of a request that allows a lossy one."""

    choice: SparseChoice | None = None  # While it waits: the part to be read sparsely.
    span: SparseSpan | None = None  # The same once it is admitted: what this attempt computes is lossy.
    is_refused: bool = False  # Such a prefix could not be read: none is used from then on.


class Request(msgspec.Struct):
    """One request from acceptance to its end. Page fields are valid only while it is admitted.

    ``submit`` always has the whole prompt, even if it came with a base.

    ``pages`` is the page table as the worker has it; the tree owns its first ``shared`` pages, on the path that
    ends in ``node``, and the request owns the rest. KV is known to be valid for the first ``computed`` tokens
    (lossy behind a sparse prefix).
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
    shared: int = 0  # Leading pages that the tree owns.
    node: int = 0  # Deepest tree node that it holds a lock on; 0: none.
    planned: int = 0  # Tokens whose chunks were sent or whose KV is cached.
    computed: int = 0  # Tokens whose KV is valid.
    is_poisoned: bool = False  # A chunk failed; tokens that this attempt computed since are not to be trusted.
    ending: str = ""  # "cancelled" or "deadline" once it is to end; a code of shared.errors when it failed too often.
    lease_generated: int = -1  # ``generated`` of the last lease request that was granted.

    @property
    def request_id(self) -> str:
        """The id that its gateway gave it."""
        return self.submit.request_id

    @property
    def tokens(self) -> bytes:
        """Prompt and output so far, packed int32. Copies."""
        return self.submit.prompt + self.output if self.output else self.submit.prompt

    def advance_wait(self, event: WaitEvent, subject: str | int = 0, now_ns: int = 0) -> None:
        """Change what it waits for by the table of waits. Raises IllegalTransition where that has no entry."""
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
        """Number of tokens of the prompt and of the output so far."""
        return (len(self.submit.prompt) + len(self.output)) // 4

    @property
    def max_tokens_total(self) -> int:
        """Number of tokens of prompt and longest answer."""
        return self.submit.prompt_tokens + self.submit.sampling.max_tokens

    def pages_for(self, tokens: int, page_size: int) -> int:
        """Return the number of pages for ``tokens`` tokens, at most that of prompt and longest answer."""
        return -(-min(tokens, self.max_tokens_total) // page_size)

    @property
    def resume_timer(self) -> str:
        """Id of the timer that runs while its gateway is asked for the tokens to go on from."""
        return f"resume.{self.accepted_seq}.{self.attempt}"

    @property
    def own_pages(self) -> bytes:
        """Pages of its worker that no tree node owns, packed int32. Copies."""
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
