"""A scheduler and a worker that follow a script, behind the real message contracts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from shared import subjects
from shared.bus.protocol import Bus, StreamLimits
from shared.codec import decode, decode_input, encode
from shared.messages.base import unpack_int32
from shared.messages.gateway_notices import GatewayNotice, GatewayWord, RequestFailed, ResumeNeeded
from shared.messages.requests import CancelRequest, ReclaimRequest, ResumeRequest, SubmitRequest
from shared.messages.status import CellStatus, GetOutputs, GetRequestStanding, Outputs, RequestStanding, WorkerStatus
from shared.messages.tokens import Timing, TokenBatch, TokenItem, TokenLogprob, Usage
from shared.messages.worker_events import FinishReason

WORKER = "worker-0"
INCARNATION = "life-1"

Step = tuple[int, str]
"""One token and the text that it completes."""


def idle_workers(count: int, draining: int = 0) -> tuple[WorkerStatus, ...]:
    """So many workers without requests, of which the first are about to leave."""
    return tuple(
        WorkerStatus(worker_id=f"worker-{n}", incarnation=INCARNATION, running=0, waiting=0, draining=n < draining)
        for n in range(count)
    )


def cell_status(**told: object) -> CellStatus:
    """The status of a cell with nothing to tell but this."""
    fields: dict[str, object] = {
        "scheduler_id": "scheduler-0", "epoch": 1, "seq": 1, "model": "", "page_size": 16, "queued": 0, "running": 0,
        "max_queued": 10, "max_context": 0,
    }  # fmt: skip
    return CellStatus(**(fields | told))  # type: ignore[arg-type]


def usage_and_timing(request: SubmitRequest) -> tuple[Usage, Timing]:
    """What a worker reports with a first item: half of the prompt was on the device, a quarter in host memory."""
    device, host = request.prompt_tokens // 2, request.prompt_tokens // 4
    at = request.received_ns
    ms = 1_000_000
    timing = Timing(
        received_ns=at,
        accepted_ns=at + 1 * ms,
        admitted_ns=at + 3 * ms,
        started_ns=at + 6 * ms,
        loaded_ns=at + 10 * ms,
        first_token_ns=at + 15 * ms,
    )
    return Usage(device_tokens=device, host_tokens=host, computed_tokens=request.prompt_tokens - device - host), timing


class ScriptedCell:
    """``script`` gives the steps of an answer; without one a test emits every item by hand."""

    def __init__(self, bus: Bus, script: Callable[[SubmitRequest], Sequence[Step]] | None = None) -> None:
        self.bus = bus
        self.script = script
        self.submitted: list[SubmitRequest] = []
        self.cancelled: list[CancelRequest] = []
        self.resumed: list[ResumeRequest] = []
        self.reclaimed: list[ReclaimRequest] = []
        self.forgotten: set[str] = set()  # Requests that the scheduler says it does not know.
        self.steps: dict[str, list[Step]] = {}
        self.finishes: dict[str, tuple[FinishReason, str | int | None]] = {}
        self.usage: Usage | None = None  # What every worker reports instead of ``usage_and_timing``.
        self.pace_s = 0.0
        self.notice_number = 0
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()
        self._answers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.bus.ensure_streams(StreamLimits())
        await self.bus.serve(subjects.rpc("worker", "outputs", WORKER), self._outputs)
        await self.bus.serve(subjects.rpc("scheduler", "request"), self._standing)
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        tasks = [task for task in (self._task, *self._answers) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def announce(self, workers: int = 1, **changes: object) -> None:
        """Publish a status as the active scheduler does."""
        status = cell_status(**({"workers": idle_workers(workers)} | changes))
        await self.bus.publish(subjects.STATUS, encode(status))

    async def until(self, claim: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until ``claim`` holds, looking after every input."""
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(claim)

    async def emit(
        self,
        request: SubmitRequest,
        steps: Sequence[Step],
        *,
        index: int = 0,
        attempt: int = 1,
        finish: FinishReason | None = None,
        stop_match: str | int | None = None,
        error: str = "",
        worker: str = WORKER,
    ) -> None:
        """Send one item with these tokens."""
        k = request.sampling.logprobs
        usage, timing = usage_and_timing(request) if index == 0 else (None, None)
        usage = self.usage if usage is not None and self.usage is not None else usage
        prompt_logprobs = None
        if index == 0 and request.sampling.prompt_logprobs is not None:
            prompt_logprobs = (
                None,
                *(TokenLogprob(token, -2.0, ((token, -2.0),)) for token in unpack_int32(request.prompt)[1:]),
            )
        item = TokenItem(
            request_id=request.request_id,
            attempt=attempt,
            index=index,
            tokens=tuple(token for token, _ in steps),
            text="".join(text for _, text in steps),
            logprobs=tuple(
                TokenLogprob(token=token, logprob=-0.5, top=((token, -0.5), (7, -1.5), (8, float("-inf")))[:k])
                for token, _ in steps
            )
            if k is not None
            else (),
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop_match=stop_match,
            error=error,
            usage=usage,
            timing=timing,
        )
        await self.send([item], request.gateway_id, worker)

    async def send(self, items: Sequence[TokenItem], gateway_id: str, worker: str = WORKER) -> None:
        batch = TokenBatch(worker_id=worker, incarnation=INCARNATION, step=1, items=tuple(items))
        await self.bus.publish(subjects.tokens(gateway_id), encode(batch))

    async def notify(self, gateway_id: str, word: GatewayWord, *, skip: int = 0) -> GatewayNotice:
        """Publish the next notice; ``skip`` leaves numbers out."""
        self.notice_number += 1 + skip
        notice = GatewayNotice(gateway_id=gateway_id, number=self.notice_number, epoch=1, cause=1, word=word)
        await self.bus.publish(subjects.gateway_output(gateway_id), encode(notice))
        return notice

    async def refuse(self, request: SubmitRequest, code: str, retry_after_ms: int = 0, message: str = "") -> None:
        text = message or f"refused: {code}"
        word = RequestFailed(request_id=request.request_id, code=code, message=text, retry_after_ms=retry_after_ms)
        await self.notify(request.gateway_id, word)

    async def lose_worker(self, request: SubmitRequest, attempt: int) -> None:
        await self.notify(request.gateway_id, ResumeNeeded(request_id=request.request_id, attempt=attempt))

    async def play(self, request: SubmitRequest, *, start: int = 0, attempt: int = 1) -> None:
        """Emit the scripted answer from position ``start`` on, one item a token."""
        assert self.script is not None
        steps = list(self.script(request))[: request.sampling.max_tokens]
        finish: FinishReason = "length" if len(steps) == request.sampling.max_tokens else "stop"
        self.steps[request.request_id] = steps
        self.finishes[request.request_id] = (finish, None)
        for index in range(start, len(steps)):
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            last = index == len(steps) - 1
            await self.emit(
                request, steps[index : index + 1], index=index, attempt=attempt, finish=finish if last else None
            )

    async def _follow(self) -> None:
        async for message in self.bus.follow(subjects.INPUTS_STREAM):
            decoded = decode_input(message.data)
            if isinstance(decoded, SubmitRequest):
                self.submitted.append(decoded)
                if self.script is not None:
                    self._answer(self.play(decoded))
            elif isinstance(decoded, CancelRequest):
                self.cancelled.append(decoded)
            elif isinstance(decoded, ResumeRequest):
                self.resumed.append(decoded)
                request = next(r for r in self.submitted if r.request_id == decoded.request_id)
                if self.script is not None:
                    self._answer(self.play(request, start=len(decoded.output) // 4, attempt=decoded.attempt))
            elif isinstance(decoded, ReclaimRequest):
                self.reclaimed.append(decoded)
            async with self._news:
                self._news.notify_all()

    async def _standing(self, data: bytes) -> bytes:
        request_id = decode(data, GetRequestStanding).request_id
        return encode(RequestStanding(is_known=request_id not in self.forgotten))

    def _answer(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _outputs(self, data: bytes) -> bytes:
        question = decode(data, GetOutputs)
        steps = self.steps.get(question.request_id)
        if steps is None:
            return encode(Outputs(item=None))
        rest = steps[question.index :]
        finish, stop_match = self.finishes.get(question.request_id, (None, None))
        item = TokenItem(
            request_id=question.request_id,
            attempt=question.attempt,
            index=question.index,
            tokens=tuple(token for token, _ in rest),
            text="".join(text for _, text in rest),
            finish=finish,
            stop_match=stop_match,
        )
        return encode(Outputs(item=item))
