"""Requests to the cell: submit, cancel, resume, reclaim. The only writer of this gateway's subject of inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from services.gateway import metrics
from services.gateway.known_prompts import MOST_BYTES, KnownPrompts
from services.gateway.outbox import Outbox
from services.gateway.pending import Choice, Generation, PendingTable
from services.gateway.prompt_bases import PromptBases
from shared import logs
from shared.backoff import Backoff
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.compact_messages import compact_request
from shared.errors import RequestCancelled, ThermoclineError, TransportError, Unavailable
from shared.messages.base import pack_int32
from shared.messages.requests import CancelRequest, ReclaimRequest, ResumeRequest, SubmitRequest

PARALLEL_SUBMITS = 32
APPEND_S = 3.0
SUBMIT_S = 12.0
"""How long to try to store a request while connected: after losing a broker, the others elect a leader in 4 to 9 s."""
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 1.0
RETRY_AFTER_MS = 2_000
INLINE_BYTES = 1 << 20
"""Longer packed prompts are hashed in a thread: they would block the event loop for more than a millisecond."""

_log = logs.get_logger("gateway.dispatcher")


class Dispatcher:
    """Submits choices to the scheduler, and keeps the pending table and the input stream consistent."""

    def __init__(
        self,
        bus: Bus,
        subject: str,
        gateway_id: str,
        pending: PendingTable,
        takes_bases: Callable[[], bool] = lambda: False,
        known_bytes: int = MOST_BYTES,
        takes_compact: Callable[[], bool] = lambda: False,
    ) -> None:
        """``known_bytes`` bounds the prompts kept to compare later ones with.

        ``takes_bases`` and ``takes_compact`` return whether the scheduler, by its last status, accepts a prompt as a
        base and a tail, and in compact form.
        """
        self.gateway_id = gateway_id
        self.pending = pending
        self.outbox = Outbox(bus, subject)
        self.bases = PromptBases()
        self._known = KnownPrompts(known_bytes)
        self._bus = bus
        self._subject = subject
        self._takes_bases, self._takes_compact = takes_bases, takes_compact
        self._gate = asyncio.Semaphore(PARALLEL_SUBMITS)
        self._resending: set[asyncio.Task[None]] = set()
        self._storing = 0  # Requests that are being stored, or tried again.
        self._stuck = ""  # Why the last request that had its whole time was not stored, as on a broker's full disk.

    def check_open(self) -> None:
        """Raise Unavailable when the broker is away, so that a client is told at once."""
        if not self._bus.is_connected:
            raise Unavailable("the message broker is not connected; try again shortly", retry_after_ms=RETRY_AFTER_MS)

    async def start(self, generation: Generation) -> None:
        """Submit every choice. If one cannot be stored, cancel all and raise its error."""
        self.check_open()
        if self._takes_bases():
            await self._find_blocks(generation)
        self.pending.add(generation)  # Before the first append: its tokens may come before the acknowledgement.
        gate = asyncio.Semaphore(PARALLEL_SUBMITS)

        async def submit(choice: Choice) -> ThermoclineError | None:
            async with gate:
                request = self.bases.abridged(choice.request, choice.blocks)
                choice.base = request.base
                metrics.PROMPTS_SENT.labels("whole" if request.base is None else "base").inc()
                if self._takes_compact():
                    request = compact_request(request)
                    choice.is_compact = bool(request.compact)
                return await self._store(request, request.request_id)

        try:
            if len(generation.choices) == 1:  # Without a task, which would begin in the loop's next turn.
                results = [await submit(generation.choices[0])]
            else:
                results = await asyncio.gather(*(submit(choice) for choice in generation.choices))
        except BaseException:
            self.end(generation)
            raise
        failure = next((result for result in results if result is not None), None)
        if failure is not None:
            self.end(generation, reason="not_submitted", error=failure)
            raise failure

    async def _find_blocks(self, generation: Generation) -> None:
        """Set the digests of the prompt's blocks on every choice. Choices of one prompt share them."""
        found: dict[int, bytes] = {}
        for choice in generation.choices:
            if choice.prompt not in found:
                namespace, prompt, keep = choice.request.namespace, choice.request.prompt, choice.request.cache.write
                digests = self._known.block_digests
                if len(prompt) > INLINE_BYTES:
                    found[choice.prompt] = await asyncio.to_thread(digests, namespace, prompt, keep=keep)
                else:
                    found[choice.prompt] = digests(namespace, prompt, keep=keep)
            choice.blocks = found[choice.prompt]

    def end(
        self, generation: Generation, reason: str = "client_disconnected", error: ThermoclineError | None = None
    ) -> None:
        """Forget a generation, and cancel those of its choices that still run.

        ``error`` is why they failed, if they did.
        """
        self.pending.remove(generation)
        for choice in generation.choices:
            if not choice.is_settled:
                self.cancel(choice.request_id, choice.failure.code if choice.failure else reason)
            elif choice.failure is None and choice.blocks:
                self.bases.answered(choice.request, choice.blocks, choice.assembly.tokens)
            choice.fail(error or RequestCancelled(f"cancelled: {reason}"))
            choice.generation = None  # Prompts are freed without the collector, which seldom looks at old objects.

    def cancel(self, request_id: str, reason: str) -> None:
        """Queue a cancellation for the scheduler; ``reason`` is a code such as ``client_disconnected``."""
        self.outbox.post(CancelRequest(request_id=request_id, gateway_id=self.gateway_id, reason=reason))

    def resume(self, choice: Choice, attempt: int) -> None:
        """Fence attempts older than ``attempt``, and send the scheduler the output tokens that have arrived."""
        choice.assembly.fence(attempt)
        self.outbox.post(
            ResumeRequest(
                request_id=choice.request_id,
                gateway_id=self.gateway_id,
                attempt=attempt,
                output=pack_int32(choice.assembly.tokens),
            )
        )

    def send_whole(self, choice: Choice) -> None:
        """Send the whole prompt of a choice whose base or compact form the scheduler cannot use.

        A second call does nothing: the prompt is being sent.
        """
        is_abridged, base = choice.is_abridged, choice.base
        choice.base, choice.is_compact = None, False
        if not is_abridged or choice.is_over:
            return
        metrics.PROMPTS_SENT.labels("wanted").inc()
        if base is not None:
            self.bases.gone(choice.blocks, base)
        task = asyncio.create_task(self._store_whole(choice))
        self._resending.add(task)
        task.add_done_callback(self._resending.discard)

    async def close(self) -> None:
        """Stop sending whole prompts."""
        for task in self._resending:
            task.cancel()
        await asyncio.gather(*self._resending, return_exceptions=True)

    async def reclaim(self, choice: Choice, now_s: float) -> None:
        """Have a request that the cell no longer knows restarted behind the tokens that arrived here.

        A failed append is not retried here: the next search for lost requests reclaims again.
        """
        choice.reclaims += 1
        request, age_ms = choice.request, int((now_s - choice.started_s) * 1000)
        if request.deadline_ms:
            request = msgspec.structs.replace(request, deadline_ms=max(1, request.deadline_ms - age_ms))
        message_id = f"{choice.request_id}.reclaim.{choice.reclaims}"
        try:
            await self._bus.append(
                self._subject, encode(ReclaimRequest(submit=request)), message_id=message_id, timeout_s=APPEND_S
            )
        except ThermoclineError as error:
            _log.warning("not_reclaimed", request_id=choice.request_id, reason=error.message)

    async def _store_whole(self, choice: Choice) -> None:
        """Store the request as it is.

        Its deadline is unchanged: it begins with its acceptance, which is still to come.
        """
        async with self._gate:
            # The broker would take it for the message with the base, which is stored under the request's own id.
            failure = await self._store(choice.request, f"{choice.request_id}.whole", choice)
        if failure is not None:
            choice.fail(failure)

    async def _store(
        self, request: SubmitRequest, message_id: str, choice: Choice | None = None
    ) -> ThermoclineError | None:
        """Append a request, and return the error if it cannot be stored.

        Retries have the same message id, so that the request is stored once. They stop once the ``choice`` is over: its
        cancellation may be stored already.

        After a request was tried in vain for the whole time, one at a time is tried, and the others are refused at
        once, until one is stored.
        """
        if self._stuck and self._storing and choice is None:
            return Unavailable(self._stuck, retry_after_ms=RETRY_AFTER_MS)
        self._storing += 1
        try:
            return await self._store_in_time(request, message_id, choice)
        finally:
            self._storing -= 1

    async def _store_in_time(
        self, request: SubmitRequest, message_id: str, choice: Choice | None
    ) -> ThermoclineError | None:
        data = encode(request)
        now_s = asyncio.get_running_loop().time
        begun_s = now_s()
        give_up_s = begun_s + min(SUBMIT_S, request.deadline_ms / 1000 or SUBMIT_S)
        backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)
        while choice is None or (not choice.is_over and self.pending.get(request.request_id) is choice):
            try:
                await self._bus.append(self._subject, data, message_id=message_id, timeout_s=APPEND_S)
                self._stuck = ""
                return None
            except TransportError as error:
                failure = Unavailable(_not_stored(error), retry_after_ms=RETRY_AFTER_MS)
            except Unavailable as error:
                failure = Unavailable(_not_stored(error), retry_after_ms=error.retry_after_ms or RETRY_AFTER_MS)
            except ThermoclineError as error:
                return error
            wait_s = backoff.next_s()
            if not self._bus.is_connected:
                return failure
            if now_s() + wait_s > give_up_s:
                if give_up_s >= begun_s + SUBMIT_S:
                    self._stuck = failure.message
                return failure
            await asyncio.sleep(wait_s)
        return None


def _not_stored(error: ThermoclineError) -> str:
    return f"the message broker does not store the request ({error.message}); try again shortly"
