"""A request as the worker knows it, and the table of its life.

::

    waiting ──compute──▶ prefilling ──sample──▶ decoding ──sample──▶ decoding ...
       any live state ──finish──▶ finished    ──preempt──▶ preempted    ──replace──▶ replaced

A request ends once: the ended states have no entries, and a missing entry is an IllegalTransition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from services.worker.answer_grammars import AnswerGrammar
from services.worker.answers import Answer
from services.worker.lookup.request_lookup import RequestLookup
from services.worker.token_sequence import TokenSequence
from shared.errors import IllegalTransition
from shared.messages.base import unpack_int32
from shared.messages.requests import SamplingParams
from shared.messages.tokens import ImportanceUsage, TokenLogprob
from shared.messages.worker_plans import LeaseGrant, SparsePrefix

State = Literal["waiting", "prefilling", "decoding", "finished", "preempted", "replaced"]
Change = Literal["compute", "sample", "finish", "preempt", "replace"]

ASK_TOKENS = 32
"""Decode room at which a request asks for pages at the latest, where half of its lease is not less."""

_LIVE: tuple[State, ...] = ("waiting", "prefilling", "decoding")

TRANSITIONS: dict[tuple[State, Change], State] = {
    ("waiting", "compute"): "prefilling",
    ("prefilling", "compute"): "prefilling",
    ("prefilling", "sample"): "decoding",
    ("decoding", "sample"): "decoding",
    **{(state, "finish"): "finished" for state in _LIVE},
    **{(state, "preempt"): "preempted" for state in _LIVE},
    **{(state, "replace"): "replaced" for state in _LIVE},
}


class Milestones(msgspec.Struct):
    """Wall-clock nanoseconds; 0 is not yet (see ``shared.messages.tokens.Timing``)."""

    received_ns: int = 0
    accepted_ns: int = 0
    admitted_ns: int = 0
    started_ns: int = 0
    loaded_ns: int = 0
    restored_ns: int = 0
    first_token_ns: int = 0


@dataclass(slots=True)
class RunningRequest:
    """One attempt of one request. ``tokens`` is the caller's prompt (``prompt_ids``) and all output tokens.

    ``computed`` counts leading tokens whose KV is on the device, or will be once the loads of the batch at
    the head have landed. A decoding request has ``computed == len(tokens) - 1``.

    Tokens of a ``sparse`` prefix count as computed as soon as all before them are, and the entries of ``pages`` that
    would hold them are -1.
    """

    request_id: str
    attempt: int
    gateway_id: str
    prompt_ids: Sequence[int] | npt.NDArray[np.int32]
    tokens: TokenSequence
    pages: npt.NDArray[np.int32]
    page_size: int
    computed: int
    sampling: SamplingParams
    answer: Answer
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0
    neighbour_tokens: int = 0
    lent_tokens: int = 0
    computed_tokens: int = 0  # Prefill tokens computed for this attempt.
    milestones: Milestones = field(default_factory=Milestones)
    state: State = "waiting"
    items_sent: int = 0
    lease_tokens: int = 0  # Decode room of the latest grant.
    lease_requested: bool = False
    compute_failures: int = 0
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # By prompt position.
    restored: list[tuple[int, int]] = field(default_factory=list)  # Ranges [start, end) of hidden states, in order.
    sparse: SparsePrefix | None = None
    sparse_losses: int = 0  # Losses of KV before the sparse prefix; each voids its choice.
    importance: ImportanceUsage | None = None  # Set when the sparse prefix has been loaded.
    leases: tuple[LeaseGrant, ...] = ()  # Only reported with usage.
    grammar: AnswerGrammar | None = None
    lookup: RequestLookup | None = None
    held_logits: torch.Tensor | None = None  # Float32 [vocab], while the first token waits for the grammar.
    adapter: str = ""  # Digest of its LoRA adapter; "" is the base model.

    def change(self, change: Change) -> None:
        """Change the state as the table says. Raises IllegalTransition."""
        target = TRANSITIONS.get((self.state, change))
        if target is None:
            raise IllegalTransition(f"request {self.request_id} cannot {change} when {self.state}")
        self.state = target

    @property
    def prompt_tokens(self) -> int:
        """Length of the caller's prompt, without output of earlier attempts."""
        return len(self.prompt_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether the whole prompt is computed and the next step gives a token."""
        return self.state == "decoding"

    @property
    def capacity(self) -> int:
        """Tokens that the page table can hold."""
        return len(self.pages) * self.page_size

    @property
    def room(self) -> int:
        """Decode steps that the page table still allows, once the prompt is computed."""
        return self.capacity - len(self.tokens) + 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens are still to be computed."""
        # A resumed answer has had them with its first item.
        return self.sampling.prompt_logprobs is not None and len(self.tokens) == self.prompt_tokens

    @property
    def hidden_tokens(self) -> int:
        """Tokens of the caller's prompt whose KV was restored from hidden states."""
        return sum(max(0, min(end, self.prompt_tokens) - start) for start, end in self.restored)

    @property
    def sparse_tokens(self) -> int:
        """Tokens of the caller's prompt that lie in the sparse prefix, once that has been loaded."""
        if self.sparse is None or self.importance is None:
            return 0
        return max(0, min(self.sparse.end, self.prompt_tokens) - self.sparse.start)

    @property
    def pages_held(self) -> npt.NDArray[np.int32]:
        """All pages that the request reads or writes, int32."""
        if self.sparse is None:
            return self.pages
        chosen = np.array(unpack_int32(self.sparse.pages), dtype=np.int32)
        return np.concatenate((self.pages[self.pages >= 0], chosen))

    def grant(self, pages: npt.NDArray[np.int32]) -> None:
        """Append pages to the page table: a new lease."""
        self.pages = np.concatenate((self.pages, pages))
        self.lease_tokens = len(pages) * self.page_size
        self.lease_requested = False

    def extend_coverage(self, loaded: frozenset[int]) -> None:
        """Count pages in ``loaded`` that continue the computed prefix; the last token is always computed."""
        last = len(self.tokens) - 1
        while self.computed < last and int(self.pages[self.computed // self.page_size]) in loaded:
            self.reach(min(last, (self.computed // self.page_size + 1) * self.page_size))

    def reach(self, end: int) -> None:
        """Record that all tokens before ``end`` have their KV.

        If a sparse prefix begins at ``end``, its tokens count, too.
        """
        self.computed = max(self.computed, end)
        if self.sparse is not None and self.sparse.start <= self.computed < self.sparse.end:
            self.computed = self.sparse.end

    def can_compute(self, start: int, end: int) -> bool:
        """Return whether the KV of tokens ``[start, end)`` may be computed here: none of them is sparse."""
        return self.sparse is None or end <= self.sparse.start or start >= self.sparse.end

    def note_restored(self, start: int, end: int) -> None:
        """Note the KV of tokens ``[start, end)`` as restored from hidden pages; it counts like computed KV."""
        self.change("compute")
        self.reach(end)
        self.restored.append((start, end))

    def lose_pages(self, bad: frozenset[int]) -> int:
        """Forget KV from the first page in ``bad`` on.

        Return how many of the lost tokens had neither been restored from hidden states nor were sparse.
        """
        held = self.pages[: -(-self.computed // self.page_size)]
        hits = [index for index, page in enumerate(held.tolist()) if page in bad and page >= 0]
        if not hits:
            return 0
        before, self.computed = self.computed, hits[0] * self.page_size
        return before - self.computed - self._lose_restored() - self._lose_sparse(before)

    def _lose_sparse(self, before: int) -> int:
        """Void the choice of a sparse prefix if KV before it is gone; return how many tokens it holds then.

        ``before``: so many tokens had their KV.
        """
        if self.sparse is None or not self.computed < self.sparse.start or before < self.sparse.end:
            return 0
        self.sparse_losses += 1
        return self.sparse.end - self.sparse.start

    def _lose_restored(self) -> int:
        """Forget that tokens behind the computed ones were restored; return how many."""
        before = self.restored
        self.restored = [(start, min(end, self.computed)) for start, end in before if start < self.computed]
        return sum(end - start for start, end in before) - sum(end - start for start, end in self.restored)

    def lose_loaded(self, lost: int) -> None:
        """Take ``lost`` tokens off those counted as loaded.

        Tokens of the furthest tier lie deepest, and are taken off first.
        """
        for name in ("remote_tokens", "disk_tokens", "lent_tokens", "neighbour_tokens", "host_tokens"):
            gone = min(lost, getattr(self, name))
            setattr(self, name, getattr(self, name) - gone)
            lost -= gone

    def needs_lease(self, low_tokens: int) -> bool:
        """Return whether to ask for pages now: room is short, the answer may need more, and none were asked for yet."""
        return self._wants_lease(self._lease_mark(low_tokens))

    def may_join_lease(self, low_tokens: int) -> bool:
        """Return whether the request may ask together with another, as it would soon: half of its lease is used."""
        return self._wants_lease(max(self._lease_mark(low_tokens), min(self.lease_tokens // 2, 2 * ASK_TOKENS)))

    def _wants_lease(self, mark: int) -> bool:
        if not self.is_decoding or self.lease_requested or self.room > mark:
            return False
        return self.room < self.answer.max_tokens - len(self.answer.tokens)

    def _lease_mark(self, low_tokens: int) -> int:
        """Return the decode room at which to ask: half of a small lease.

        A mark above the lease would make every token ask.
        """
        return max(min(self.lease_tokens // 2, ASK_TOKENS), min(low_tokens, self.lease_tokens - self.page_size))
