"""Tokens from workers to the choices that wait for them, and the search for lost tokens.

Core messages are delivered at most once. A gap shows in the next token's index; a loss at the end of an answer does
not, so tokens of choices that have been quiet for a while, and of all choices after the connection was lost, are
requested as well.

Where nothing of an attempt arrived, its worker is unknown, and every worker of the cell is asked. Thousands of requests
may wait in the cell's queue, which no worker knows: so such searches grow rarer as a wait grows longer
(``timeouts.needs_search``), and few of them run at a time, each with one call to one worker after the other.

A worker may also end with the only copy of the last tokens. Where neither a worker nor the scheduler knows a choice,
the request is over for the cell and not for its client: it is reclaimed, which restarts it behind the tokens that are
here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from services.gateway import metrics
from services.gateway.assembly import Placement
from services.gateway.pending import Choice, PendingTable
from shared import logs, subjects
from shared.backoff import Backoff
from shared.bus.protocol import Bus, Delivery
from shared.codec import decode, encode
from shared.errors import CodecError, ThermoclineError
from shared.messages.status import GetOutputs, GetRequestStanding, Outputs, RequestStanding
from shared.messages.tokens import TokenBatch, TokenItem

FETCH_TRIES = 5
FETCH_FIRST_S = 0.2
FETCH_MOST_S = 1.0
CALL_S = 2.0
PARALLEL_FETCHES = 32
PARALLEL_SEARCHES = 4

_log = logs.get_logger("gateway.relay")


class TokenRelay:
    """The receiver of ``tc.tokens.<gateway>``."""

    def __init__(
        self,
        bus: Bus,
        pending: PendingTable,
        clock: Callable[[], float],
        reclaim: Callable[[Choice, float], Awaitable[None]],
    ) -> None:
        """Place tokens in the choices of ``pending``; the caller subscribes :meth:`on_tokens`.

        ``clock`` is the clock of the choices' times, in seconds. ``reclaim`` gets a choice that the cell no longer
        knows and the present time, and restarts the choice.
        """
        self._bus = bus
        self._pending = pending
        self._clock = clock
        self._reclaim = reclaim
        self._gate = asyncio.Semaphore(PARALLEL_FETCHES)
        self._searches = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def on_tokens(self, delivery: Delivery) -> None:
        """Place every item of one step's message."""
        try:
            batch = decode(delivery.data, TokenBatch)
        except CodecError as error:
            _log.error("tokens_unreadable", reason=error.message)
            return
        now_s = self._clock()
        placed: dict[Placement, int] = {}
        for item in batch.items:
            choice = self._pending.get(item.request_id)
            if choice is not None:
                placement = self._observe_and_place(batch.worker_id, item, choice, now_s)
                placed[placement] = placed.get(placement, 0) + 1
        for placement, count in placed.items():
            metrics.PLACEMENTS[placement].inc(count)

    def probe(self, choices: Iterable[Choice]) -> None:
        """Ask the workers that have sent tokens of these choices for tokens that may be lost."""
        for choice in choices:
            if not choice.is_over:
                self._fetch(choice, [])

    def recover(self, choices: Iterable[Choice], worker_ids: Iterable[str]) -> None:
        """Request tokens that these choices may have missed; ``worker_ids`` are tried where the worker is unknown."""
        everyone = list(worker_ids)
        for choice in choices:
            if not choice.is_over:
                self._fetch(choice, everyone)
                # Where that fails, or a call from before the loss is still in progress, a search comes soon.
                choice.searched_s = choice.progress_s

    def search(self, choices: Iterable[Choice], worker_ids: Iterable[str]) -> None:
        """Ask every worker for these choices, as many as may be searched at a time; the others stay due."""
        everyone = list(worker_ids)
        for choice in choices:
            if not everyone or self._searches >= PARALLEL_SEARCHES:
                return
            if not choice.is_over and not choice.is_fetching:
                choice.is_fetching = True
                choice.probed_s = choice.searched_s = self._clock()
                self._searches += 1
                self._spawn(self._search(choice, everyone))

    async def close(self) -> None:
        """Cancel the calls and searches in progress."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _observe_and_place(self, worker_id: str, item: TokenItem, choice: Choice, now_s: float) -> Placement:
        had, before_s = choice.assembly.next_index, choice.progress_s
        placement = choice.accept(worker_id, item, now_s)
        if placement is Placement.GAP:
            self._fetch(choice, [worker_id])
        elif placement is Placement.ACCEPTED and choice.assembly.next_index > had:
            if had:
                metrics.INTER_TOKEN_LATENCY.observe(now_s - before_s)
            else:
                metrics.TIME_TO_FIRST_TOKEN.observe(now_s - choice.started_s)
        return placement

    def _fetch(self, choice: Choice, worker_ids: list[str]) -> None:
        if choice.is_fetching:
            return
        choice.is_fetching = True
        choice.probed_s = self._clock()
        self._spawn(self._fetch_until_joined(choice, worker_ids))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch_until_joined(self, choice: Choice, worker_ids: list[str]) -> None:
        """Ask the choice's workers, newest first, until one sends new tokens or all tries are used."""
        backoff = Backoff(FETCH_FIRST_S, FETCH_MOST_S)
        try:
            for _ in range(FETCH_TRIES):
                if self._is_gone(choice):
                    return
                before = choice.assembly.next_index
                async with self._gate:
                    is_known = await self._ask_all(choice, worker_ids)
                has_grown = choice.assembly.next_index > before
                if is_known and not choice.assembly.has_gap and not has_grown:
                    return
                if not has_grown:  # A reply may have been cut to fit a message: then ask again at once.
                    await asyncio.sleep(backoff.next_s())
        finally:
            choice.is_fetching = False

    async def _search(self, choice: Choice, worker_ids: list[str]) -> None:
        """Ask every worker once until one sends new tokens; one that knows the choice without new tokens is not enough.

        Where none knows it, ask the scheduler.
        """
        has_grown = is_known = False
        try:
            for attempt, worker_id in _questions(choice, worker_ids):
                if self._is_gone(choice) or has_grown:
                    break
                before = choice.assembly.next_index
                is_known |= await self._ask(choice, attempt, worker_id) is not None
                has_grown = choice.assembly.next_index > before
            if not is_known and not self._is_gone(choice):
                await self._reclaim_if_forgotten(choice)
        finally:
            self._searches -= 1
            choice.is_fetching = False
        if has_grown:  # The reply may have been cut to fit a message, and its worker is known now.
            self._fetch(choice, [])

    async def _reclaim_if_forgotten(self, choice: Choice) -> None:
        question = GetRequestStanding(request_id=choice.request_id)
        try:
            data = await self._bus.call(subjects.rpc("scheduler", "request"), encode(question), timeout_s=CALL_S)
            is_known = decode(data, RequestStanding).is_known
        except ThermoclineError as error:
            _log.info("standing_not_known", request_id=choice.request_id, reason=error.message)
            return
        # The notice of its end may have arrived during the call.
        if not is_known and not self._is_gone(choice):
            _log.warning("reclaimed", request_id=choice.request_id, tokens=choice.assembly.next_index)
            metrics.RECLAIMED.inc()
            await self._reclaim(choice, self._clock())

    async def _ask_all(self, choice: Choice, worker_ids: list[str]) -> bool:
        """Return whether some worker knew the request and its next tokens."""
        for attempt, worker_id in _questions(choice, worker_ids):
            placement = await self._ask(choice, attempt, worker_id)
            if placement not in (None, Placement.GAP, Placement.FENCED):
                return True
        return False

    async def _ask(self, choice: Choice, attempt: int, worker_id: str) -> Placement | None:
        """Return the placement of a worker's reply; None where it cannot be reached or does not know the request."""
        question = GetOutputs(request_id=choice.request_id, attempt=attempt, index=choice.assembly.next_index)
        try:
            data = await self._bus.call(
                subjects.rpc("worker", "outputs", worker_id), encode(question), timeout_s=CALL_S
            )
            item = decode(data, Outputs).item
        except ThermoclineError as error:
            _log.info("outputs_not_fetched", request_id=choice.request_id, worker=worker_id, reason=error.message)
            return None
        if item is None:
            return None
        metrics.FETCHED.inc()
        return choice.accept(worker_id, item, self._clock(), asked=True)

    def _is_gone(self, choice: Choice) -> bool:
        return choice.is_over or self._pending.get(choice.request_id) is not choice


def _questions(choice: Choice, worker_ids: list[str]) -> list[tuple[int, str]]:
    """Return (attempt, worker) in the order of asking: workers that sent output, newest first, and then others."""
    attempts: dict[str, int] = {}
    for attempt, worker_id in reversed(choice.workers.items()):
        attempts.setdefault(worker_id, attempt)
    for worker_id in worker_ids:
        attempts.setdefault(worker_id, choice.assembly.attempt)
    return [(attempt, worker_id) for worker_id, attempt in attempts.items()]
