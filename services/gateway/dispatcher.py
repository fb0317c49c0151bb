"""Requests to the cell: submit, cancel, resume, reclaim. The only writer of this gateway's subject of the inputs."""

from __future__ import annotations

import asyncio

import msgspec

from services.gateway.outbox import Outbox
from services.gateway.pending import Choice, Generation, PendingTable
from shared import logs
from shared.backoff import Backoff
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.errors import RequestCancelled, ThermoclineError, TransportError, Unavailable
from shared.messages.base import pack_int32
from shared.messages.requests import CancelRequest, ReclaimRequest, ResumeRequest, SubmitRequest

PARALLEL_SUBMITS = 32
APPEND_S = 3.0
SUBMIT_S = 12.0
"""How long storing a request is tried while there is a broker: servers that lost one elect leaders in 4 to 9 s."""
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 1.0
RETRY_AFTER_MS = 2_000

_log = logs.get_logger("gateway.dispatcher")


class Dispatcher:
    """Keeps the pending table and the inputs stream in step."""

    def __init__(self, bus: Bus, subject: str, gateway_id: str, pending: PendingTable) -> None:
        self.gateway_id = gateway_id
        self.pending = pending
        self.outbox = Outbox(bus, subject)
        self._bus = bus
        self._subject = subject

    def check_open(self) -> None:
        """Raises Unavailable when the broker is away, so that a client learns it at once."""
        if not self._bus.is_connected:
            raise Unavailable("the message broker is not connected; try again shortly", retry_after_ms=RETRY_AFTER_MS)

    async def start(self, generation: Generation) -> None:
        """Submit every choice. When one cannot be stored, none goes on and the typed error is raised."""
        self.check_open()
        self.pending.add(generation)  # Before the first append: its tokens may come before the acknowledgement.
        gate = asyncio.Semaphore(PARALLEL_SUBMITS)

        async def submit(request: SubmitRequest) -> ThermoclineError | None:
            async with gate:
                return await self._store(request)

        try:
            results = await asyncio.gather(*(submit(choice.request) for choice in generation.choices))
        except BaseException:
            self.end(generation)
            raise
        failure = next((result for result in results if result is not None), None)
        if failure is not None:
            self.end(generation, reason="not_submitted", error=failure)
            raise failure

    def end(
        self, generation: Generation, reason: str = "client_disconnected", error: ThermoclineError | None = None
    ) -> None:
        """Forget a generation, and cancel those of its choices that still run; ``error`` is why they failed, if so."""
        self.pending.remove(generation)
        for choice in generation.choices:
            if not choice.is_settled:
                self.cancel(choice.request_id, choice.failure.code if choice.failure else reason)
            choice.fail(error or RequestCancelled(f"cancelled: {reason}"))

    def cancel(self, request_id: str, reason: str) -> None:
        self.outbox.post(CancelRequest(request_id=request_id, gateway_id=self.gateway_id, reason=reason))

    def resume(self, choice: Choice, attempt: int) -> None:
        """Fence older attempts, and tell the scheduler what has arrived."""
        choice.assembly.fence(attempt)
        self.outbox.post(
            ResumeRequest(
                request_id=choice.request_id,
                gateway_id=self.gateway_id,
                attempt=attempt,
                output=pack_int32(choice.assembly.tokens),
            )
        )

    async def reclaim(self, choice: Choice, now_s: float) -> None:
        """Have a request that the cell does not know any more begun again behind what is here.

        What cannot be stored is not tried again: the next search comes to the same.
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

    async def _store(self, request: SubmitRequest) -> ThermoclineError | None:
        """Append a request, once however often that is tried; returns why it cannot be stored."""
        data = encode(request)
        now_s = asyncio.get_running_loop().time
        give_up_s = now_s() + min(SUBMIT_S, request.deadline_ms / 1000 or SUBMIT_S)
        backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)
        while True:
            try:
                await self._bus.append(self._subject, data, message_id=request.request_id, timeout_s=APPEND_S)
                return None
            except TransportError as error:
                failure = Unavailable(str(error.message), retry_after_ms=RETRY_AFTER_MS)
            except Unavailable as error:
                failure = Unavailable(error.message, retry_after_ms=error.retry_after_ms or RETRY_AFTER_MS)
            except ThermoclineError as error:
                return error
            wait_s = backoff.next_s()
            if not self._bus.is_connected or now_s() + wait_s > give_up_s:
                return failure
            await asyncio.sleep(wait_s)
