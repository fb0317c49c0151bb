"""Requests through a router over real sockets: what passes, where it goes, and what happens when a cell is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.gateway.router.health import ask
from tests.unit.gateway.router.scripted_gateway import (
    ADMIN_KEY,
    Call,
    ScriptedGateway,
    answers,
    chat_body,
    hangs,
    refuses,
    routing,
)
from tests.waiting import until

LONG = "a shared document " * 200


async def test_an_answer_passes_with_its_headers_and_names_its_cell() -> None:
    """Status, body and headers are the gateway's; the cell is added, and what is about the connection is not passed."""

    async def script(call: Call) -> None:
        headers = ("x-request-id: r1", "keep-alive: timeout=5", "date: Tue, 01 Dec 2026 00:00:00 GMT")
        await call.answer(418, b"tea", *headers, content_type="text/plain")

    async with routing({"lisbon": [ScriptedGateway(script)]}) as harness:
        response = await harness.client.post(
            "/v1/completions?echo=1",
            content=b'{"prompt": "x"}',
            headers={"authorization": "Bearer k", "te": "trailers"},
        )
        call = harness.gateways["lisbon"][0].calls[0]

    assert (response.status_code, response.content) == (418, b"tea")
    assert response.headers["x-request-id"] == "r1"
    assert response.headers["x-thermocline-cell"] == "lisbon"
    assert "keep-alive" not in response.headers
    assert len(response.headers.get_list("date")) == 1
    assert call.target == "/v1/completions?echo=1"
    assert call.body == b'{"prompt": "x"}'
    assert call.headers["authorization"] == "Bearer k"
    assert "te" not in call.headers


async def test_a_tokenizer_is_asked_of_a_cell_and_a_flush_of_none() -> None:
    """Evaluation tools find it behind a router; the admin key of a cell is not the router's."""

    async def script(call: Call) -> None:
        await call.answer(200, b"{}")

    async with routing({"a": [ScriptedGateway(script)]}) as harness:
        info = await harness.client.get("/tokenizer_info")
        ping = await harness.client.get("/ping")
        flush = await harness.client.post("/flush_cache")
        targets = [call.target for call in harness.gateways["a"][0].calls if not call.target.startswith("/v1/cell")]

    assert (info.status_code, ping.status_code, flush.status_code) == (200, 200, 404)
    assert "/tokenizer_info" in targets
    assert "/flush_cache" not in targets
    assert flush.json()["error"]["message"].endswith("the cells' gateways may have it")


async def test_events_pass_as_they_come() -> None:
    """An event is with the client before the next one is made, and one that is cut in two passes when it is whole."""
    may_go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: one\n\nda")
        await may_go_on.wait()
        await call.chunk(b"ta: two\n\n")
        await call.end_stream()

    async with (
        routing({"a": [ScriptedGateway(script)]}) as harness,
        harness.client.stream("POST", "/v1/chat/completions", json=chat_body("x")) as response,
    ):
        pieces = response.aiter_raw()
        first = await anext(pieces)
        may_go_on.set()
        rest = b"".join([piece async for piece in pieces])

    assert first == b"data: one\n\n"
    assert rest == b"data: two\n\n"


async def test_a_conversation_stays_and_shared_prefixes_meet() -> None:
    """Prompts with one head go to one cell, and other prompts to others."""
    async with routing({name: [ScriptedGateway()] for name in ("a", "b", "c")}) as harness:
        cells = set()
        for turn in range(4):
            response = await harness.chat(LONG + f" turn {turn}" * turn)
            cells.add(response.headers["x-thermocline-cell"])
        for number in range(12):
            await harness.chat(f"{number} " * 300)
        counts = harness.calls()

    assert len(cells) == 1
    assert min(counts.values()) > 0


async def test_a_session_stays_however_its_prompts_begin() -> None:
    """The header, or the body's prompt_cache_key, keeps requests in one cell."""
    async with routing({name: [ScriptedGateway()] for name in ("a", "b", "c")}) as harness:
        by_header, by_key = set(), set()
        for number in range(8):
            body = chat_body(f"{number} " * 300)
            response = await harness.client.post("/v1/chat/completions", json=body, headers={"X-Session-Id": "s"})
            by_header.add(response.headers["x-thermocline-cell"])
            response = await harness.chat(f"other {number} " * 300, prompt_cache_key="k")
            by_key.add(response.headers["x-thermocline-cell"])

    assert len(by_header) == len(by_key) == 1


async def test_a_cell_that_takes_no_connection_is_passed_over_at_once() -> None:
    """Its request is answered by another cell, and it is not asked again until it is back."""
    async with routing({"a": [ScriptedGateway()], "b": [ScriptedGateway()]}) as harness:
        first = (await harness.chat(LONG)).headers["x-thermocline-cell"]
        gone = harness.gateways[first][0]
        await gone.stop()
        elsewhere = await harness.chat(LONG)
        was_open = harness.router.cells.by_name[first].is_open
        await gone.start()
        await ask(harness.router, first, harness.router.gateways[first][0])
        is_back = harness.router.cells.by_name[first].is_open

    assert elsewhere.status_code == 200
    assert elsewhere.headers["x-thermocline-cell"] != first
    assert not was_open
    assert is_back


async def test_a_gateway_that_dies_before_its_answer_is_replaced_by_another_of_its_cell() -> None:
    """The prefix is cached in the cell, so its other gateway comes first."""

    async def dies(call: Call) -> None:
        call.drop()

    async with routing({"a": [ScriptedGateway(dies), ScriptedGateway()]}) as harness:
        response = await harness.chat(LONG)

    assert response.status_code == 200


async def test_an_answer_that_breaks_off_before_it_is_whole_is_asked_of_another_cell() -> None:
    """What is no stream is held until it is whole, so the client sees one whole answer."""

    async def breaks(call: Call) -> None:
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        call.drop()

    async with routing({"a": [ScriptedGateway(breaks)], "b": [ScriptedGateway(breaks)], "c": [ScriptedGateway()]}) as h:
        response = await h.chat(LONG)

    assert response.json() == {"ok": True}
    assert response.headers["x-thermocline-cell"] == "c"


async def test_a_stream_that_breaks_ends_with_an_error_in_openais_shape() -> None:
    """The client has whole events, then the error, then the end; nothing is asked of another cell."""

    async def breaks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"a": 1}\n\ndata: {"b')
        call.drop()

    async with routing({"a": [ScriptedGateway(breaks)], "b": [ScriptedGateway(breaks)]}) as harness:
        response = await harness.chat("x", stream=True)
        calls = sum(harness.calls().values())
    events = response.content.split(b"\n\n")

    assert response.status_code == 200
    assert events[0] == b'data: {"a": 1}'
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == "cell_lost"
    assert events[2:] == [b"data: [DONE]", b""]
    assert calls == 1


@pytest.mark.parametrize("is_at_shutdown", [False, True])
async def test_a_request_that_lasts_too_long_ends_with_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, is_at_shutdown: bool
) -> None:
    """Before its answer as a status, and within a stream as its last event; its gateway hears no more of it."""
    timeout_s = 61.5
    timers: list[Callable[[], object]] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def later(delay_s: float, callback: Callable[..., object], *values: Any, **named: Any) -> asyncio.TimerHandle:
        if delay_s == timeout_s:
            timers.append(lambda: callback(*values))
        return call_later(delay_s, callback, *values, **named)

    async def streams(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await hangs(call)

    monkeypatch.setattr(loop, "call_later", later)
    async with routing({"a": [ScriptedGateway(hangs)]}, request_timeout_ms=round(timeout_s * 1000)) as harness:
        (gateway,) = harness.gateways["a"]

        def end() -> None:
            if is_at_shutdown:
                harness.router.end_all()
            else:
                timers[-1]()

        asking = asyncio.create_task(harness.chat("x"))
        await until(lambda: len(gateway.calls) == 1)
        end()
        whole = await asking
        gateway.script = streams
        async with harness.client.stream("POST", "/v1/chat/completions", json=chat_body("x")) as response:
            pieces = response.aiter_raw()
            first = await anext(pieces)
            end()
            event, *rest = b"".join([piece async for piece in pieces]).split(b"\n\n")
        await until(lambda: gateway.gone == 2)
        calls = sum(harness.calls().values())

    assert whole.status_code == (503 if is_at_shutdown else 504)
    assert ("retry-after" in whole.headers) is is_at_shutdown
    assert first == b"data: 1\n\n"
    assert json.loads(event.removeprefix(b"data: "))["error"] == whole.json()["error"]
    assert whole.json()["error"]["code"] == ("service_unavailable" if is_at_shutdown else "request_timeout")
    assert rest == [b"data: [DONE]", b""]
    assert (calls, harness.router.slots.used, harness.router.cells.by_name["a"].own) == (2, 0, 0)


async def test_a_gateway_learns_its_clients_address_from_the_router() -> None:
    """As the router knows it: what a client says of itself would stand in the gateway's audit log."""
    async with routing({"a": [ScriptedGateway()]}) as harness:
        for said in ({}, {"x-forwarded-for": "198.51.100.1, 203.0.113.9"}):
            await harness.client.post("/v1/chat/completions", json=chat_body("x"), headers=said)
            await harness.client.get("/v1/models", headers=said)
        told = [call.headers["x-forwarded-for"] for call in harness.gateways["a"][0].calls]

    assert told == ["127.0.0.1"] * 2 + ["203.0.113.9"] * 2


async def test_sessions_of_two_callers_are_two_whatever_their_name() -> None:
    """Each stays where it began, and one caller's does not draw another's after it."""

    async def cell_of(session: str, key: str, text: str) -> str:
        headers = {"x-session-id": session, "authorization": f"Bearer {key}"}
        response = await harness.client.post("/v1/chat/completions", json=chat_body(text * 300), headers=headers)
        return response.headers["x-thermocline-cell"]

    async with routing({name: [ScriptedGateway()] for name in ("a", "b", "c")}) as harness:
        cells = {
            (key, session): {await cell_of(session, key, f"{key} {session} {turn} ") for turn in range(2)}
            for key in ("one", "two")
            for session in map(str, range(12))
        }

    assert all(len(each) == 1 for each in cells.values())
    assert any(cells["one", session] != cells["two", session] for session in map(str, range(12)))


async def test_a_full_cell_is_passed_over_and_all_full_ones_make_a_429() -> None:
    """429 of a full queue goes to the next cell; when none is left the client waits as long as the soonest says."""
    full = refuses(429, "queue_full", "7"), refuses(429, "queue_full", "3")
    async with routing({"a": [ScriptedGateway(full[0])], "b": [ScriptedGateway()]}) as harness:
        taken = await harness.chat("x")
    async with routing({"a": [ScriptedGateway(full[0])], "b": [ScriptedGateway(full[1])]}) as harness:
        refused = await harness.chat("x")

    assert taken.status_code == 200
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "3"
    assert refused.json()["error"]["code"] == "queue_full"


async def test_cells_that_shut_down_make_a_503_with_retry_after() -> None:
    """503 goes to the next cell, and to the client when all say it."""
    async with routing({"a": [ScriptedGateway(refuses(503, "service_unavailable", "2"))]}) as harness:
        response = await harness.chat("x")

    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["type"] == "server_error"


async def test_a_tenants_own_limit_is_no_reason_to_ask_another_cell() -> None:
    """Its answer passes as it is: as many limits as cells would be none."""
    async with routing({name: [ScriptedGateway(refuses(429, "rate_limit_exceeded", "9"))] for name in "ab"}) as harness:
        response = await harness.chat("x")
        calls = sum(harness.calls().values())

    assert calls == 1
    assert (response.status_code, response.headers["retry-after"]) == (429, "9")
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_tenants_place_in_the_queue_is_its_own_limit() -> None:
    """The gateways' code for it, in both APIs' statuses, is an answer: no other cell is asked."""
    async with routing({name: [ScriptedGateway(refuses(429, "tenant_queue_full", "9"))] for name in "ab"}) as harness:
        responses = [await harness.chat("x"), await harness.client.post("/v1/messages", json={})]
        calls = sum(harness.calls().values())

    assert calls == 2
    assert [response.status_code for response in responses] == [429, 429]
    assert responses[0].json()["error"]["code"] == "tenant_queue_full"


async def test_tries_are_bounded() -> None:
    """A request that every gateway refuses is tried as often as the settings say."""
    cells = {name: [ScriptedGateway(refuses(503, "service_unavailable"))] for name in "abcdef"}
    async with routing(cells, tries=3) as harness:
        response = await harness.chat("x")
        calls = sum(harness.calls().values())

    assert response.status_code == 503
    assert calls == 3


async def test_a_client_that_goes_ends_the_request_at_the_gateway() -> None:
    """Its connection is cut off, which the gateway takes for a cancellation."""
    async with routing({"a": [ScriptedGateway(hangs)]}) as harness:
        asking = asyncio.create_task(harness.chat("x"))
        gateway = harness.gateways["a"][0]
        await until(lambda: bool(gateway.calls))
        asking.cancel()
        await until(lambda: gateway.gone == 1)
        await until(lambda: harness.router.slots.used == 0)

    assert harness.router.cells.by_name["a"].own == 0


async def test_a_client_that_goes_in_a_stream_ends_it_at_the_gateway() -> None:
    """The same behind the first events."""

    async def streams(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await hangs(call)

    async with routing({"a": [ScriptedGateway(streams)]}) as harness:
        async with harness.client.stream("POST", "/v1/chat/completions", json=chat_body("x")) as response:
            await anext(response.aiter_raw())
        gateway = harness.gateways["a"][0]
        await until(lambda: gateway.gone == 1)
        await until(lambda: harness.router.slots.used == 0)

    assert harness.router.cells.by_name["a"].own == 0


async def test_what_waits_at_a_gateway_that_stops_answering_is_asked_of_another_cell() -> None:
    """A gateway that is frozen keeps its connections, so health decides."""
    async with routing({"a": [ScriptedGateway(hangs)], "b": [ScriptedGateway(hangs)]}) as harness:
        asking = asyncio.create_task(harness.chat(LONG))
        await until(lambda: sum(harness.calls().values()) == 1)
        first = next(name for name, calls in harness.calls().items() if calls)
        other = "b" if first == "a" else "a"
        harness.gateways[other][0].script = answers
        harness.router.lost(first, harness.router.gateways[first][0], "it is frozen")
        response = await asking

    assert response.headers["x-thermocline-cell"] == other


async def test_a_gateway_that_is_not_ready_gets_nothing_new_and_keeps_what_it_has() -> None:
    """503 of its health closes it; no request is taken from it."""
    async with routing({"a": [ScriptedGateway(hangs)]}) as harness:
        asking = asyncio.create_task(harness.chat("x"))
        gateway = harness.gateways["a"][0]
        await until(lambda: bool(gateway.calls))
        gateway.is_ready = False
        await ask(harness.router, "a", harness.router.gateways["a"][0])
        refused = await harness.chat("y")
        await gateway.calls[0].answer(200, b"{}")
        response = await asking

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_cell"
    assert response.status_code == 200


async def test_requests_in_progress_are_bounded() -> None:
    """One more than the bound gets 429 from the router itself."""
    async with routing({"a": [ScriptedGateway(hangs)]}, max_inflight=1) as harness:
        asking = asyncio.create_task(harness.chat("x"))
        await until(lambda: bool(harness.gateways["a"][0].calls))
        refused = await harness.chat("y")
        asking.cancel()
        await until(lambda: harness.router.slots.used == 0)

    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "too_many_requests"


async def test_silence_in_a_stream_is_bounded() -> None:
    """A gateway that says nothing for too long counts as lost."""

    async def silent(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await hangs(call)

    async with routing({"a": [ScriptedGateway(silent)]}, idle_timeout_ms=50) as harness:
        response = await harness.chat("x", stream=True)

    assert b"cell_lost" in response.content


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"messages": 3}', b'{"prompt": [1, "x", {}]}', b'{"messages": [{}]}'],
)
async def test_a_hostile_body_goes_to_a_cell_which_says_what_is_wrong(body: bytes) -> None:
    """The router refuses nothing that it need not understand."""
    async with routing({"a": [ScriptedGateway(refuses(400, "invalid_json"))]}) as harness:
        response = await harness.client.post("/v1/chat/completions", content=body)

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("body", [b"x" * 5_000_000, b'{"messages":[%s{}]}' % (b"{}," * 200_000)])
async def test_a_body_that_is_too_large_is_refused_here(body: bytes) -> None:
    """No gateway sees it. One of too many values would take seconds to read, in which no stream would go on."""
    async with routing({"a": [ScriptedGateway()]}, max_body_bytes=4_000_000) as harness:
        response = await harness.client.post("/v1/completions", content=body)

    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
    assert harness.calls() == {"a": 0}


async def test_a_long_body_that_is_no_json_goes_to_a_cell() -> None:
    """It says what is wrong."""
    async with routing({"a": [ScriptedGateway(refuses(400, "invalid_json"))]}) as harness:
        response = await harness.client.post("/v1/completions", content=b"x" * 500_000)

    assert (response.status_code, harness.calls()) == (400, {"a": 1})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: nonsense\r\n\r\n", 503),
        (b"no http at all\r\n\r\n", 503),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\n", 503),
    ],
)
async def test_a_gateway_that_talks_nonsense_counts_as_lost(answer: bytes, expected: int) -> None:
    """Its request is tried elsewhere, and refused with a typed error when there is no elsewhere."""

    async def script(call: Call) -> None:
        await call.write(answer)

    async with routing({"a": [ScriptedGateway(script)]}) as harness:
        response = await harness.chat("x")

    assert response.status_code == expected
    assert response.json()["error"]["code"] == "service_unavailable"


async def test_models_of_all_cells_are_joined() -> None:
    """Each model once; a wrong key's refusal passes."""

    def lists(name: str) -> ScriptedGateway:
        return ScriptedGateway(lambda call: call.answer(200, json.dumps({"data": [{"id": name}]}).encode()))

    async with routing({"a": [lists("x")], "b": [lists("y")], "c": [lists("x")]}) as harness:
        joined = (await harness.client.get("/v1/models")).json()
    async with routing({"a": [ScriptedGateway(refuses(401, "invalid_api_key"))]}) as harness:
        refused = await harness.client.get("/v1/models")

    assert sorted(card["id"] for card in joined["data"]) == ["x", "y"]
    assert refused.status_code == 401


async def test_the_one_answer_about_models_is_the_cells_own() -> None:
    """Its id, its cell and what the cell says of a refusal pass; a joined list has an id of the router."""

    def lists(name: str) -> ScriptedGateway:
        body = json.dumps({"data": [{"id": name}]}).encode()
        return ScriptedGateway(lambda call: call.answer(200, body, "x-request-id: r1", "keep-alive: timeout=5"))

    async def refused(call: Call) -> None:
        await call.answer(401, b'{"error": {}}', "x-request-id: r2", "www-authenticate: Bearer")

    async with routing({"a": [lists("x")]}) as harness:
        one = await harness.client.get("/v1/models")
        card = await harness.client.get("/v1/models/x")
    async with routing({"a": [lists("x")], "b": [lists("y")]}) as harness:
        joined = await harness.client.get("/v1/models")
    async with routing({"a": [ScriptedGateway(refused)]}) as harness:
        closed = await harness.client.get("/v1/models")

    for response in (one, card):
        assert (response.headers["x-request-id"], response.headers["x-thermocline-cell"]) == ("r1", "a")
        assert "keep-alive" not in response.headers
    assert joined.headers["x-request-id"].startswith("router-")
    assert (closed.headers["x-request-id"], closed.headers["www-authenticate"]) == ("r2", "Bearer")


async def test_every_answer_of_the_router_has_an_id() -> None:
    """Its own pages, errors and refusals."""
    async with routing({"a": [ScriptedGateway()]}) as harness:
        found = [
            await harness.client.get(path)
            for path in ("/health", "/health/ready", "/health/live", "/version", "/metrics", "/v1/cells", "/none")
        ]
        found.append(await harness.client.head("/health"))
        harness.router.is_draining = True
        unready = await harness.client.get("/health/ready")

    assert all(response.headers["x-request-id"].startswith("router-") for response in (*found, unready))
    assert len({response.headers["x-request-id"] for response in found}) == len(found)
    assert unready.headers["retry-after"]


async def test_operators_see_cells_under_the_admin_key_alone() -> None:
    """Health says how many cells answer; names and addresses need the key."""
    async with routing({"a": [ScriptedGateway()], "b": [ScriptedGateway()]}) as harness:
        harness.router.lost("b", harness.router.gateways["b"][0], "it is away")
        closed = await harness.client.get("/v1/cells")
        cells = (await harness.client.get("/v1/cells", headers={"x-admin-key": ADMIN_KEY})).json()["data"]
        health = (await harness.client.get("/health/ready")).json()
        metrics = (await harness.client.get("/metrics")).text

    assert closed.status_code == 401
    assert [(cell["name"], cell["is_open"]) for cell in cells] == [("a", True), ("b", False)]
    assert health == {"status": "degraded", "cells": 2, "cells_open": 1}
    assert 'thermocline_router_cell_up{cell="b"} 0.0' in metrics


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/cache", 404, None),
        ("GET", "/v1/completions", 405, "POST"),
        ("PUT", "/v1/responses/x", 405, "GET, DELETE"),
        ("POST", "/health", 405, "GET, HEAD"),
    ],
)
async def test_other_routes_are_refused_in_openais_shape(
    method: str, path: str, status: int, allowed: str | None
) -> None:
    """Unknown paths, and wrong methods with the right ones (RFC 9110, section 15.5.6)."""
    async with routing({"a": [ScriptedGateway()]}) as harness:
        response = await harness.client.request(method, path)

    assert (response.status_code, response.headers.get("allow")) == (status, allowed)
    assert response.json()["error"]["type"]


async def test_a_draining_router_says_so() -> None:
    """New requests get 503, and it is not ready."""
    async with routing({"a": [ScriptedGateway()]}) as harness:
        harness.router.is_draining = True
        refused, health = await harness.chat("x"), await harness.client.get("/health")

    assert refused.status_code == health.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert refused.headers["retry-after"]
