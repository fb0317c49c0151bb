"""Assembling one request's tokens, in whatever order or repetition they arrive. Pure.

Two rules:

* **Position.** ``TokenItem.index`` is the output position of an item's first token. What lies before the next
  position is a repeat and is dropped; what lies after it leaves a gap and is held until the gap is filled.
* **Attempt.** Once a new attempt was announced or has sent a token, items of older attempts are dropped, so a worker
  that was thought dead cannot add to a stream that another one continues.

Tokens that were asked for may be of an older attempt: an attempt that follows a preemption continues behind everything
that was sent before it. An attempt announced by ``ResumeNeeded`` continues behind what has arrived here instead, so
later tokens of older attempts are not its prefix. Exact attempts agree on those tokens too; lossy ones need not.

Text follows the same rules: an item's text is taken whole or not at all, since it cannot be cut by tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shared.messages.tokens import Timing, TokenItem, TokenLogprob, Usage
from shared.messages.worker_events import FinishReason

MAX_HELD_ITEMS = 1024


class Placement(Enum):
    """The outcome of placing an item."""

    ACCEPTED = "accepted"  # The item, and held items that follow it, are part of the answer now.
    REPEATED = "repeated"  # Known already.
    FENCED = "fenced"  # From an attempt that is over.
    GAP = "gap"  # Tokens before it are missing; ask the worker from ``next_index`` on.


@dataclass(slots=True)
class Delta:
    """Everything accepted since the last ``take``, several items coalesced into one."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None
    stop_match: str | int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing to send: no text, tokens, end or prompt logprobs."""
        return not self.text and not self.tokens and self.finish is None and self.prompt_logprobs is None


class Assembly:
    """The answer to one request so far. All methods change it unless they say otherwise."""

    def __init__(self) -> None:
        """Begin with no tokens; items of any attempt are accepted."""
        self.attempt = 0
        self.resumed = 0  # The last attempt that was announced; it began behind the tokens that were here then.
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.error = ""
        self.usage: Usage | None = None  # Of the first item: where the caller's prompt was found.
        self.lossy: dict[int, Usage] = {}  # By attempt, for attempts that loaded only a part of their prefix.
        self.timing: Timing | None = None
        self._texts: list[str] = []
        self._taken_tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._stop_match: str | int | None = None
        self._finish_taken = False
        self._held: dict[int, TokenItem] = {}

    @property
    def next_index(self) -> int:
        """The output position of the next token, counted from 0."""
        return len(self.tokens)

    @property
    def is_finished(self) -> bool:
        """Whether the item with the finish reason was accepted."""
        return self.finish is not None

    @property
    def has_gap(self) -> bool:
        """Whether later tokens are held until earlier ones arrive."""
        return bool(self._held)

    @property
    def waiting_tokens(self) -> int:
        """Number of tokens accepted and not yet taken."""
        return len(self.tokens) - self._taken_tokens

    def accept(self, item: TokenItem) -> Placement:
        """Place an item that a worker sent."""
        if self.is_finished:
            return Placement.REPEATED
        if item.attempt < self.attempt:
            return Placement.FENCED
        self._hear(item.attempt)
        return self._place(item)

    def fill(self, item: TokenItem) -> Placement:
        """Place an item that was asked for; it may be of the last announced attempt or a later one."""
        if self.is_finished:
            return Placement.REPEATED
        if item.attempt < self.resumed:
            return Placement.FENCED
        return self._place(item)

    def fence(self, attempt: int) -> None:
        """Accept tokens only of ``attempt`` and later ones: it continues behind what is here. Never moves back."""
        self.resumed = max(self.resumed, attempt)
        self._hear(attempt)

    def _hear(self, attempt: int) -> None:
        if attempt > self.attempt:
            self.attempt = attempt
            self._held.clear()

    def take(self) -> Delta:
        """Return everything accepted since the last call; an empty delta when there is nothing."""
        delta = Delta(
            text="".join(self._texts),
            tokens=self.tokens[self._taken_tokens :],
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )
        if self.finish is not None and not self._finish_taken:
            delta.finish, delta.stop_match = self.finish, self._stop_match
            self._finish_taken = True
        self._texts, self._logprobs, self._prompt_logprobs = [], [], None
        self._taken_tokens = len(self.tokens)
        return delta

    def _place(self, item: TokenItem) -> Placement:
        end = item.index + len(item.tokens)
        if item.index == self.next_index:
            self._append(item)
            if self._held:
                self._join_held()
            return Placement.ACCEPTED
        if item.index > self.next_index:
            if len(self._held) < MAX_HELD_ITEMS:
                self._held[item.index] = item
            return Placement.GAP
        if end > self.next_index:
            # It overlaps known tokens and adds new ones; its text cannot be cut, so ask only for the rest.
            return Placement.GAP
        if end == self.next_index and item.finish is not None:
            # A resumed attempt samples at least one token. That one is known already, but the end is new.
            self._note_usage(item)
            self._end(item)
            return Placement.ACCEPTED
        return Placement.REPEATED

    def _join_held(self) -> None:
        for index in sorted(self._held):
            if self.is_finished or index > self.next_index:
                break
            item = self._held.pop(index)
            if index == self.next_index:
                self._append(item)

    def _append(self, item: TokenItem) -> None:
        self.tokens.extend(item.tokens)
        if item.text:
            self._texts.append(item.text)
        self._logprobs.extend(item.logprobs)
        if item.prompt_logprobs is not None and item.index == 0:
            self._prompt_logprobs = item.prompt_logprobs
        self._note_usage(item)
        self.timing = self.timing or item.timing
        if item.finish is not None:
            self._end(item)

    def _note_usage(self, item: TokenItem) -> None:
        # A resumed attempt reports its own reuse; the caller's prompt was found where the first attempt says.
        self.usage = self.usage or item.usage
        # Whether tokens are lossy differs by attempt, though, and the usage report counts every lossy one.
        if item.usage is not None and item.usage.importance is not None:
            self.lossy[item.attempt] = item.usage

    def _end(self, item: TokenItem) -> None:
        self.finish, self._stop_match, self.error = item.finish, item.stop_match, item.error
        self._held.clear()
