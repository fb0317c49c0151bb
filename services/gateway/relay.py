"""Tokens from workers to the choices that wait for them, and the search for tokens that got lost.

Core messages are delivered at most once. A gap shows itself by the next token's index; what is lost at the end
of an answer does not, so choices that have been quiet for a while, and all choices after the connection was
lost, are asked for as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from services.gateway import metrics
from services.gateway.assembly import Placement
from services.gateway.pending import Choice, PendingTable
from shared import logs, subjects
from shared.bus.protocol import Bus, Delivery
from shared.codec import decode, encode
from shared.errors import CodecError, ThermoclineError
from shared.messages.status import GetOutputs, Outputs
from shared.messages.tokens import TokenBatch, TokenItem

FETCH_TRIES = 5
FETCH_RETRY_S = 0.2
CALL_S = 2.0
PARALLEL_FETCHES = 32

_log = logs.get_logger("gateway.relay")


class TokenRelay:
    """Handler of ``tc.tokens.<gateway>``."""

    def __init__(self, bus: Bus, pending: PendingTable, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._pending = pending
        self._clock = clock
        self._gate = asyncio.Semaphore(PARALLEL_FETCHES)
        self._tasks: set[asyncio.Task[None]] = set()

    async def on_tokens(self, delivery: Delivery) -> None:
        """Place every item of one step. Never waits, so that one slow answer holds up no other."""
        try:
            batch = decode(delivery.data, TokenBatch)
        except CodecError as error:
            _log.error("tokens_unreadable", reason=error.message)
            return
        now_s = self._clock()
        for item in batch.items:
            choice = self._pending.get(item.request_id)
            if choice is not None:
                self._observe_and_place(batch.worker_id, item, choice, now_s)

    def recover(self, choices: Iterable[Choice], worker_ids: Iterable[str] = ()) -> None:
        """Ask for what these choices may have missed; ``worker_ids`` are tried where the worker is unknown."""
        everyone = list(worker_ids)
        for choice in choices:
            if not choice.is_over:
                self._fetch(choice, everyone)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _observe_and_place(self, worker_id: str, item: TokenItem, choice: Choice, now_s: float) -> None:
        had, before_s = choice.assembly.next_index, choice.progress_s
        placement = choice.accept(worker_id, item, now_s)
        metrics.PLACEMENTS[placement].inc()
        if placement is Placement.GAP:
            self._fetch(choice, [worker_id])
        elif placement is Placement.ACCEPTED and choice.assembly.next_index > had:
            if had:
                metrics.INTER_TOKEN_LATENCY.observe(now_s - before_s)
            else:
                metrics.TIME_TO_FIRST_TOKEN.observe(now_s - choice.started_s)

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
        """Ask the workers of this choice, newest first, until one brings it forward or all tries are spent."""
        try:
            for tried in range(FETCH_TRIES):
                if choice.is_over or self._pending.get(choice.request_id) is not choice:
                    return
                before = choice.assembly.next_index
                async with self._gate:
                    is_known = await self._ask_all(choice, worker_ids)
                has_grown = choice.assembly.next_index > before
                if is_known and not choice.assembly.has_gap and not has_grown:
                    return
                if not has_grown:  # An answer may have been cut to fit a message: then ask on at once.
                    await asyncio.sleep(FETCH_RETRY_S * (tried + 1))
        finally:
            choice.is_fetching = False

    async def _ask_all(self, choice: Choice, worker_ids: list[str]) -> bool:
        """True when some worker knew the request."""
        known = [(attempt, worker) for attempt, worker in reversed(list(choice.workers.items()))]
        others = [(choice.assembly.attempt, worker) for worker in worker_ids]
        for attempt, worker_id in dict.fromkeys(known + others):
            index = choice.assembly.next_index
            question = GetOutputs(request_id=choice.request_id, attempt=attempt, index=index)
            try:
                data = await self._bus.call(
                    subjects.rpc("worker", "outputs", worker_id), encode(question), timeout_s=CALL_S
                )
                item = decode(data, Outputs).item
            except ThermoclineError as error:
                _log.info("outputs_not_fetched", request_id=choice.request_id, worker=worker_id, reason=error.message)
                continue
            if item is None:
                continue
            placement = choice.accept(worker_id, item, self._clock(), asked=True)
            metrics.FETCHED.inc()
            if placement is not Placement.GAP:
                return True
        return False
