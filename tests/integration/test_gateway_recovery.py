"""Lost tokens, dead workers, a lost broker: the client's answer has no gap, no repeat and no changed token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec

from shared import subjects
from shared.codec import encode
from shared.messages.base import unpack_int32
from shared.messages.gateway_notices import ResumeNeeded
from shared.messages.requests import SubmitRequest
from tests.unit.gateway.running_gateway import Harness, running_gateway
from tests.waiting import until

STEPS = [(10 + i, f"<{i}>") for i in range(8)]
TEXT = "".join(text for _, text in STEPS)


async def begin(harness: Harness, **fields: Any) -> tuple[asyncio.Task[httpx.Response], SubmitRequest]:
    """Post a completion and wait until the cell has it."""
    had = len(harness.cell.submitted)
    body = {"prompt": "hi", "return_token_ids": True, **fields}
    call = asyncio.create_task(harness.client.post("/v1/completions", json=body))
    await harness.cell.until(lambda: len(harness.cell.submitted) > had)
    return call, harness.cell.submitted[-1]


def content(response: httpx.Response) -> tuple[str, list[int]]:
    """Text and token ids of an answer, streamed or not."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        bodies = [response.json()]
    else:
        bodies = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    choices = [choice for body in bodies for choice in body["choices"]]
    return "".join(c["text"] for c in choices), [token for c in choices for token in c["token_ids"]]


WHOLE = (TEXT, [token for token, _ in STEPS])


async def test_a_gap_is_fetched_from_the_worker() -> None:
    """Tokens 2 and 3 never arrive; the worker still knows them."""
    async with running_gateway(over_http=True) as harness:
        call, request = await begin(harness, stream=True)
        harness.cell.steps[request.request_id] = STEPS
        harness.cell.finishes[request.request_id] = ("stop", None)
        await harness.cell.emit(request, STEPS[:2])
        await harness.cell.emit(request, STEPS[4:5], index=4)

        assert content(await call) == WHOLE


async def test_a_repeat_is_dropped() -> None:
    """Every message comes twice."""
    async with running_gateway(over_http=True) as harness:
        call, request = await begin(harness, stream=True)
        for index, step in enumerate(STEPS):
            finish = "stop" if index == len(STEPS) - 1 else None
            for _ in range(2):
                await harness.cell.emit(request, [step], index=index, finish=finish)  # type: ignore[arg-type]

        assert content(await call) == WHOLE


async def test_a_lost_end_is_found_by_asking() -> None:
    """The last message is lost, so no gap shows; the quiet worker is asked."""
    async with running_gateway(over_http=True, probe_ms=50) as harness:
        call, request = await begin(harness)
        harness.cell.steps[request.request_id] = STEPS
        harness.cell.finishes[request.request_id] = ("stop", None)
        await harness.cell.emit(request, STEPS[:7])

        assert content(await call) == WHOLE


async def test_an_end_that_nobody_can_tell_any_more_is_reclaimed() -> None:
    """The worker died after it had ended the request; the client waits for the tokens that went with it, no longer."""
    async with running_gateway(over_http=True, probe_ms=50) as harness:
        call, request = await begin(harness, stream=True, deadline_ms=60_000)
        await harness.cell.emit(request, STEPS[:3])
        await until(lambda: harness.placed(request) == 3)
        harness.cell.forgotten.add(request.request_id)
        await harness.cell.until(lambda: bool(harness.cell.reclaimed))
        harness.cell.forgotten.clear()
        reclaimed = harness.cell.reclaimed[0].submit
        await harness.cell.lose_worker(request, attempt=2)
        await harness.cell.until(lambda: bool(harness.cell.resumed))
        await harness.cell.emit(request, STEPS[3:], index=3, attempt=2, finish="stop")
        answer = await call

    assert content(answer) == WHOLE
    assert 0 < reclaimed.deadline_ms < 60_000
    assert msgspec.structs.replace(reclaimed, deadline_ms=60_000) == request
    assert len(harness.cell.cancelled) == 0


async def test_a_dead_workers_stream_goes_on() -> None:
    """The resume tells the tokens so far, old tokens are fenced, and the text continues."""
    async with running_gateway(over_http=True) as harness:
        call, request = await begin(harness, stream=True)
        await harness.cell.emit(request, STEPS[:3])
        await until(lambda: harness.placed(request) == 3)
        await harness.cell.lose_worker(request, attempt=2)
        await harness.cell.until(lambda: bool(harness.cell.resumed))
        await harness.cell.emit(request, [(99, "WRONG")], index=3, attempt=1)
        await harness.cell.emit(request, STEPS[3:], index=3, attempt=2, finish="stop", worker="worker-1")
        answer = await call
        resumed = harness.cell.resumed[0]

    assert (resumed.attempt, unpack_int32(resumed.output)) == (2, WHOLE[1][:3])
    assert content(answer) == WHOLE


async def test_notices_that_were_lost_are_read_from_the_stream() -> None:
    """A later number shows the gap; the notice before it is acted on, in order and once."""
    async with running_gateway(over_http=True) as harness:
        call, request = await begin(harness)
        other, second = await begin(harness)
        handlers = [inbox for subject, inbox in harness.bus._inboxes if subject.startswith("tc.out.gateway")]
        put = handlers[0].put
        handlers[0].put = lambda *delivery: None  # type: ignore[method-assign]
        await harness.cell.lose_worker(request, attempt=2)
        handlers[0].put = put  # type: ignore[method-assign]
        await harness.cell.refuse(second, "queue_full")
        await harness.cell.until(lambda: bool(harness.cell.resumed))
        await harness.cell.emit(request, STEPS, attempt=2, finish="stop")

        assert content(await call) == WHOLE
        assert (await other).status_code == 429
        assert len(harness.cell.resumed) == 1


async def test_a_repeated_notice_is_acted_on_once() -> None:
    """A restarted scheduler publishes its outputs again."""
    async with running_gateway(over_http=True) as harness:
        call, request = await begin(harness)
        notice = await harness.cell.notify(request.gateway_id, ResumeNeeded(request_id=request.request_id, attempt=2))
        await harness.cell.until(lambda: bool(harness.cell.resumed))
        await harness.cell.bus.publish(subjects.gateway_output(request.gateway_id), encode(notice))
        await harness.cell.emit(request, STEPS, attempt=2, finish="stop")

        assert content(await call) == WHOLE
        assert len(harness.cell.resumed) == 1


async def test_a_resume_for_an_unknown_request_is_answered_with_a_cancellation() -> None:
    """Its client has gone, so the scheduler need not wait."""
    async with running_gateway() as harness:
        word = ResumeNeeded(request_id="gone", attempt=2)
        await harness.cell.notify(harness.gateway.gateway_id, word)
        await harness.cell.until(lambda: bool(harness.cell.cancelled))

    assert harness.cell.cancelled[0].request_id == "gone"


async def test_what_was_missed_while_the_broker_was_away_is_recovered() -> None:
    """Tokens, even of a request whose worker had not spoken yet, and notices."""
    async with running_gateway(over_http=True) as harness:
        call, request = await begin(harness, stream=True)
        harness.bus.disconnect()
        refused = await harness.client.post("/v1/completions", json={"prompt": "hi"})
        not_ready = await harness.client.get("/health/ready")
        harness.cell.steps[request.request_id] = STEPS
        harness.cell.finishes[request.request_id] = ("stop", None)
        await harness.cell.emit(request, STEPS, finish="stop")
        harness.bus.reconnect()
        answer = await call

    assert content(answer) == WHOLE
    assert (refused.status_code, not_ready.status_code) == (503, 503)
    assert "retry-after" in refused.headers


async def test_a_resume_waits_for_the_broker() -> None:
    """What must be stored is stored when the broker is back."""
    async with running_gateway(over_http=True) as harness:
        call, request = await begin(harness)
        harness.gateway.dispatcher._bus.disconnect()  # type: ignore[attr-defined]
        choice = harness.gateway.dispatcher.pending.get(request.request_id)
        assert choice is not None
        tries: list[str] = []
        append = harness.bus.append

        async def noted(subject: str, *arguments: Any, **options: Any) -> int:
            tries.append(subject)
            return await append(subject, *arguments, **options)

        harness.bus.append = noted  # type: ignore[method-assign]
        harness.gateway.dispatcher.resume(choice, 2)
        await until(lambda: len(tries) >= 2)
        assert harness.cell.resumed == []
        harness.bus.reconnect()
        await harness.cell.until(lambda: bool(harness.cell.resumed))
        await harness.cell.emit(request, STEPS, attempt=2, finish="stop")

        assert content(await call) == WHOLE


async def test_garbage_on_the_bus_is_logged_and_skipped() -> None:
    """On every subject that the gateway hears."""
    async with running_gateway(over_http=True) as harness:
        call, request = await begin(harness)
        for subject in (
            subjects.tokens(request.gateway_id),
            subjects.gateway_output(request.gateway_id),
            subjects.STATUS,
        ):
            await harness.cell.bus.publish(subject, b"\xc1garbage")
        await harness.cell.emit(request, STEPS, finish="stop")

        assert content(await call) == WHOLE
