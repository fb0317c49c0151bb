"""Choices in progress: which request id belongs to which HTTP request, and how an answer waits for its tokens.

One HTTP request is one :class:`Generation` of several :class:`Choice`, one per prompt and choice. Everything here runs
on the event loop and never waits, except :meth:`Generation.changed` and :meth:`Generation.finished`.
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
"""Tokens that may wait for a slow client; one that is further behind is disconnected."""

RETRY_AFTER_MS = 1_000


class Choice:
    """One request to the cell, and its position in the answer. Times are seconds of the event loop's clock."""

    def __init__(
        self, request: SubmitRequest, position: int, prompt: int, now_s: float, reply: Reply | None = None
    ) -> None:
        """``position`` numbers the answer's choices, ``prompt`` its prompts. Without a ``reply`` all output is text."""
        self.request = request
        self.position = position
        self.prompt = prompt
        self.assembly = Assembly()
        self.reply = reply if reply is not None else Reply()
        self.failure: ThermoclineError | None = None
        self.is_settled = False  # The cell has ended it; there is nothing to cancel.
        self.workers: dict[int, str] = {}  # Worker by attempt, oldest first.
        self.started_s = now_s
        self.submitted_ns = 0  # The wall clock's time at ``started_s``, once it is about to be submitted.
        self.first_token_s = 0.0
        self.progress_s = now_s
        self.probed_s = now_s
        self.searched_s = now_s
        self.is_fetching = False
        self.blocks = (
            b""  # Digests of its prompt's whole blocks (``shared.prompt_chain``), if the scheduler accepts bases.
        )
        self.base: PromptBase | None = (
            None  # The base that its prompt was sent with, while the scheduler may still refuse it.
        )
        self.is_compact = False  # Its prompt was sent in compact form, which the scheduler may still refuse.
        self.reclaims = 0  # How often it was restarted, or may have been, because its end was lost.
        self.generation: Generation | None = None

    @property
    def request_id(self) -> str:
        """The cell's id of this choice: the answer's id and the position."""
        return self.request.request_id

    @property
    def is_abridged(self) -> bool:
        """Whether its prompt was sent with a base or in compact form, which a scheduler may refuse."""
        return self.base is not None or self.is_compact

    @property
    def is_over(self) -> bool:
        """Whether it has failed or its last item has arrived."""
        return self.failure is not None or self.assembly.is_finished

    def accept(self, worker_id: str, item: TokenItem, now_s: float, *, asked: bool = False) -> Placement:
        """Place an item of a worker, and wake the answer when it adds tokens or the end.

        If ``asked``, the item was asked for.
        """
        if self.failure is not None:
            return Placement.REPEATED
        had = self.assembly.next_index
        placement = self.assembly.fill(item) if asked else self.assembly.accept(item)
        if item.attempt not in self.workers and placement is not Placement.FENCED:
            self.workers[item.attempt] = worker_id
        if placement is Placement.ACCEPTED:
            # An item without new tokens, from a worker that was asked, is no progress.
            if self.assembly.next_index > had:
                self.progress_s = now_s
            if self.assembly.tokens and not self.first_token_s:
                self.first_token_s = now_s
            self._read_finish()
            self._wake()
        return placement

    def fail(self, error: ThermoclineError, *, is_settled: bool = False) -> None:
        """End the choice with an error; the first one stays. ``is_settled``: the scheduler has ended it, too."""
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
    """The choices of one HTTP request, and how its answer waits for them."""

    def __init__(self, choices: Sequence[Choice], *, is_streaming: bool = False, model: str = "") -> None:
        """``model`` is the name that the caller asked for, which the answer repeats."""
        self.choices = list(choices)
        self.model = model
        self.is_streaming = is_streaming
        self.abandoned: ThermoclineError | None = None
        self._touched: dict[int, None] = {}  # A dictionary, since it keeps its order.
        self.take_news: Callable[[list[Choice]], bool] | None = None
        """Sends new tokens of these choices while the answer waits in :meth:`changed`, which then is not woken; returns
        False where it could not send them.
        """
        self._is_offering = False
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        for choice in self.choices:
            choice.generation = self

    @property
    def is_over(self) -> bool:
        """Whether every choice is over."""
        return all(choice.is_over for choice in self.choices)

    def first_failure(self) -> ThermoclineError | None:
        """Return the error for which the whole answer cannot be given, or None."""
        return self.abandoned or next((c.failure for c in self.choices if c.failure is not None), None)

    def touch(self, position: int) -> None:
        """Note that a choice has new tokens or is over. A stream too far behind is abandoned."""
        if self.is_streaming and self.choices[position].assembly.waiting_tokens > MAX_STREAM_BACKLOG_TOKENS:
            self.abandon(RequestCancelled("the client reads too slowly", code="client_too_slow"))
        self._touched[position] = None
        # An answer that is not streamed is read at its end only, so its tokens wake no task.
        if self.take_news is not None:
            if not self._is_offering:  # Once all items of a step are placed, so that choices share a write.
                self._is_offering = True
                asyncio.get_running_loop().call_soon(self._offer_news)
        elif self.is_streaming or self.choices[position].is_over:
            self._tell()

    def _offer_news(self) -> None:
        self._is_offering = False
        touched = [self.choices[position] for position in self._touched]
        if self.take_news is None or self.abandoned is not None or any(choice.is_over for choice in touched):
            self._tell()
            return
        self._touched = {}
        if not self.take_news(touched):
            self._tell()

    def abandon(self, reason: ThermoclineError) -> None:
        """Stop waiting, because the client no longer reads the answer; the first reason stays."""
        if self.abandoned is None:
            self.abandoned = reason
            self._tell()

    async def changed(self, timeout_s: float) -> list[Choice] | None:
        """Wait for changes; return the choices that have some, or None after ``timeout_s`` without any.

        Only one task waits.
        """
        if not self._has_news:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._release)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
            if not self._has_news:
                return None
        self._has_news = False
        touched, self._touched = self._touched, {}
        return [self.choices[position] for position in touched]

    def _tell(self) -> None:
        self._has_news = True
        self._release()

    def _release(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def finished(self, timeout_s: float) -> None:
        """Wait until every choice is over or one has failed. Raises DeadlineExceeded after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_over and self.first_failure() is None:
                    await self.changed(timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded("the answer took too long", code="request_timeout") from error


class Slots:
    """The number of choices in progress, which bounds everything that HTTP requests hold."""

    def __init__(self, limit: int, observe: Callable[[int], None] = lambda used: None) -> None:
        """Begin with all ``limit`` slots free; ``observe`` gets the number in use after each change."""
        self.limit = limit
        self.used = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._observe = observe

    def check(self, count: int) -> None:
        """Raise TooManyConnections when fewer than ``count`` slots are free."""
        if self.used + count > self.limit:
            raise TooManyConnections(
                f"{self.used} requests are in progress, of at most {self.limit}; try again shortly",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def take(self, count: int) -> None:
        """Take ``count`` slots. Raises TooManyConnections when fewer are free."""
        self.check(count)
        self.used += count
        self.idle.clear()
        self._observe(self.used)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold one slot within the block. Raises TooManyConnections."""
        self.take(1)
        try:
            yield
        finally:
            self.give_back(1)

    def give_back(self, count: int) -> None:
        """Return ``count`` slots, and set ``idle`` once none is taken."""
        self.used -= count
        assert self.used >= 0, "a slot was given back twice"
        if not self.used:
            self.idle.set()
        self._observe(self.used)


class PendingTable:
    """The choices in progress, by request id."""

    def __init__(self) -> None:
        """Begin with no choices."""
        self._choices: dict[str, Choice] = {}

    def __len__(self) -> int:
        """Return the number of choices in progress."""
        return len(self._choices)

    def __iter__(self) -> Iterator[Choice]:
        """Return an iterator over a snapshot, in order of submission."""
        return iter(list(self._choices.values()))

    def get(self, request_id: str) -> Choice | None:
        """Return the choice of this request id, or None once it was removed."""
        return self._choices.get(request_id)

    def add(self, generation: Generation) -> None:
        """Add all choices of a generation, whose request ids must be new."""
        for choice in generation.choices:
            assert choice.request_id not in self._choices, "request ids are fresh"
            self._choices[choice.request_id] = choice

    def remove(self, generation: Generation) -> None:
        """Remove all choices of a generation; idempotent."""
        for choice in generation.choices:
            self._choices.pop(choice.request_id, None)
