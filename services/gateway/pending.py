"""Choices in progress: which request id belongs to which HTTP request, and how an answer waits for its tokens.

One HTTP request is one :class:`Generation` of several :class:`Choice`, one per prompt and choice. Everything
here runs on the event loop and never waits, but for :meth:`Generation.changed`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from services.gateway.assembly import Assembly, Placement
from services.gateway.replies.reading import Reply
from shared.errors import DeadlineExceeded, InternalError, RequestCancelled, ThermoclineError, TooManyConnections
from shared.messages.requests import PromptBase, SubmitRequest
from shared.messages.tokens import TokenItem

MAX_STREAM_BACKLOG_TOKENS = 65_536
"""Tokens that may wait for a slow client; one that is further behind is let go."""

RETRY_AFTER_MS = 1_000


class Choice:
    """One request of the cell, and its place in the answer. Times are seconds of the event loop's clock."""

    def __init__(
        self, request: SubmitRequest, position: int, prompt: int, now_s: float, reply: Reply | None = None
    ) -> None:
        """``position`` counts choices of the answer, ``prompt`` its prompts. Without a ``reply`` all is text."""
        self.request = request
        self.position = position
        self.prompt = prompt
        self.assembly = Assembly()
        self.reply = reply if reply is not None else Reply()
        self.failure: ThermoclineError | None = None
        self.is_settled = False  # The cell knows that it is over; there is nothing to cancel.
        self.workers: dict[int, str] = {}  # Worker by attempt, oldest first.
        self.started_s = now_s
        self.submitted_ns = 0  # The wall clock's time at ``started_s``, once it is about to be submitted.
        self.first_token_s = 0.0
        self.progress_s = now_s
        self.probed_s = now_s
        self.searched_s = now_s
        self.is_fetching = False
        self.blocks = (
            b""  # Digests of its prompt's whole blocks (``shared.prompt_chain``), where the scheduler takes them.
        )
        self.base: PromptBase | None = None  # What its prompt was told by, as long as that may be refused.
        self.is_compact = False  # The same of its tokens' form.
        self.reclaims = 0  # How often it was, or may have been, begun again because its end was lost.
        self.generation: Generation | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_abridged(self) -> bool:
        """Whether its prompt was told in a way that a scheduler may not take."""
        return self.base is not None or self.is_compact

    @property
    def is_over(self) -> bool:
        return self.failure is not None or self.assembly.is_finished

    def accept(self, worker_id: str, item: TokenItem, now_s: float, *, asked: bool = False) -> Placement:
        """Place an item, and wake the answer when there is news."""
        if self.failure is not None:
            return Placement.REPEATED
        had = self.assembly.next_index
        placement = self.assembly.fill(item) if asked else self.assembly.accept(item)
        if item.attempt not in self.workers and placement is not Placement.FENCED:
            self.workers[item.attempt] = worker_id
        if placement is Placement.ACCEPTED:
            # A worker that was asked and has nothing new to tell brings nothing forward.
            if self.assembly.next_index > had:
                self.progress_s = now_s
            if self.assembly.tokens and not self.first_token_s:
                self.first_token_s = now_s
            self._read_finish()
            self._wake()
        return placement

    def fail(self, error: ThermoclineError, *, is_settled: bool = False) -> None:
        """End without (the rest of) an answer; the first reason stays. ``is_settled``: the scheduler said so."""
        self.is_settled = self.is_settled or is_settled
        if not self.is_over:
            self.failure = error
            self._wake()

    def _read_finish(self) -> None:
        reason = self.assembly.finish
        self.is_settled = self.is_settled or reason is not None
        if reason == "deadline":
            self.failure = DeadlineExceeded("the request's deadline_ms passed before its answer was complete")
        elif reason == "cancelled":
            self.failure = RequestCancelled("the request was cancelled")
        elif reason == "error":
            self.failure = InternalError(self.assembly.error or "the worker could not finish this request")

    def _wake(self) -> None:
        if self.generation is not None:
            self.generation.touch(self.position)


class Generation:
    """The choices of one HTTP request."""

    def __init__(self, choices: Sequence[Choice], *, is_streaming: bool = False, model: str = "") -> None:
        """``model`` is the name that was asked for, as answers tell it."""
        self.choices = list(choices)
        self.model = model
        self.is_streaming = is_streaming
        self.abandoned: ThermoclineError | None = None
        self._touched: dict[int, None] = {}  # A dictionary, since it keeps its order.
        self.take_news: Callable[[list[Choice]], bool] | None = None
        """Takes news of choices that go on while somebody waits for :meth:`changed`, which then is not woken; False
        where it could not send them.
        """
        self._is_offering = False
        self._event = asyncio.Event()
        for choice in self.choices:
            choice.generation = self

    @property
    def is_over(self) -> bool:
        return all(choice.is_over for choice in self.choices)

    def first_failure(self) -> ThermoclineError | None:
        """Why the whole answer cannot be given, if so."""
        return self.abandoned or next((c.failure for c in self.choices if c.failure is not None), None)

    def touch(self, position: int) -> None:
        """Note news of one choice."""
        if self.is_streaming and self.choices[position].assembly.waiting_tokens > MAX_STREAM_BACKLOG_TOKENS:
            self.abandon(RequestCancelled("the client reads too slowly", code="client_too_slow"))
        self._touched[position] = None
        # A whole answer is wanted at its end only, so its tokens need not wake anybody.
        if self.take_news is not None:
            if not self._is_offering:  # Once all items of a step are placed, so that choices share a write.
                self._is_offering = True
                asyncio.get_running_loop().call_soon(self._offer_news)
        elif self.is_streaming or self.choices[position].is_over:
            self._event.set()

    def _offer_news(self) -> None:
        self._is_offering = False
        touched = [self.choices[position] for position in self._touched]
        if self.take_news is None or self.abandoned is not None or any(choice.is_over for choice in touched):
            self._event.set()
            return
        self._touched = {}
        if not self.take_news(touched):
            self._event.set()

    def abandon(self, reason: ThermoclineError) -> None:
        """Stop waiting, because the answer is not read any more or may no longer be given."""
        if self.abandoned is None:
            self.abandoned = reason
            self._event.set()

    async def changed(self, timeout_s: float) -> list[Choice] | None:
        """Wait for news; the choices that have some, or None after ``timeout_s`` without any."""
        if not self._event.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError:
                return None
        self._event.clear()
        touched, self._touched = self._touched, {}
        return [self.choices[position] for position in touched]

    async def finished(self, timeout_s: float) -> None:
        """Wait until every choice is over or one has failed. Raises DeadlineExceeded after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_over and self.first_failure() is None:
                    await self.changed(timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded("the answer took too long", code="request_timeout") from error


class Slots:
    """How many choices are in progress; bounds everything that an HTTP request may hold."""

    def __init__(self, limit: int, observe: Callable[[int], None] = lambda used: None) -> None:
        self.limit = limit
        self.used = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._observe = observe

    def check(self, count: int) -> None:
        """Raise TooManyConnections when so many are not available."""
        if self.used + count > self.limit:
            raise TooManyConnections(
                f"{self.used} requests are in progress, of at most {self.limit}; try again shortly",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def take(self, count: int) -> None:
        """Take so many. Raises TooManyConnections when they are not available."""
        self.check(count)
        self.used += count
        self.idle.clear()
        self._observe(self.used)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold one slot for a while."""
        self.take(1)
        try:
            yield
        finally:
            self.give_back(1)

    def give_back(self, count: int) -> None:
        self.used -= count
        assert self.used >= 0, "a slot was given back twice"
        if not self.used:
            self.idle.set()
        self._observe(self.used)


class PendingTable:
    """Choices by request id."""

    def __init__(self) -> None:
        self._choices: dict[str, Choice] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[Choice]:
        """Return an iterator over a snapshot, in order of submission."""
        return iter(list(self._choices.values()))

    def get(self, request_id: str) -> Choice | None:
        return self._choices.get(request_id)

    def add(self, generation: Generation) -> None:
        for choice in generation.choices:
            assert choice.request_id not in self._choices, "request ids are fresh"
            self._choices[choice.request_id] = choice

    def remove(self, generation: Generation) -> None:
        for choice in generation.choices:
            self._choices.pop(choice.request_id, None)
