"""The Responses and Messages APIs through a router: where requests go, and how streams end that break."""

from __future__ import annotations

import gzip
import json

import pytest

from services.gateway.responses.ids import new_message_id, new_response_id
from services.gateway.router import metrics
from tests.unit.gateway.router.scripted_gateway import Call, ScriptedGateway, refuses, routing


def refused() -> dict[str, float]:
    """Requests that routers of this process have refused so far, by code."""
    return {code: metrics.REFUSED.labels(code)._value.get() for code in ("response_cell_away", "no_cell")}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_stream_that_breaks_ends_in_the_shape_of_its_api(path: str) -> None:
    """With an event of the right name, and OpenAI's with the next number."""

    async def breaks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'event: a\ndata: {"type":"a"}\n\n\n\nevent: b\ndata: {"type":"b"}\n\nevent')
        call.drop()

    async with routing({"a": [ScriptedGateway(breaks)]}) as harness:
        response = await harness.client.post(path, json={"stream": True})
    *_, last, end = response.content.split(b"\n\n")
    name, _, data = last.partition(b"\ndata: ")
    error = json.loads(data)

    assert (name, end) == (b"event: error", b"")
    if path == "/v1/messages":
        assert error["error"]["type"] == "overloaded_error"
        assert error["error"]["code"] == "cell_lost"
    else:
        assert (error["type"], error["code"], error["sequence_number"]) == ("error", "cell_lost", 2)


async def test_a_kept_response_is_asked_of_its_cell() -> None:
    """Whatever the others hold: to look it up, to erase it and to go on from it. Where that cell is away, nobody else
    is asked; an id of no cell goes anywhere.
    """
    async with routing({name: [ScriptedGateway()] for name in "abc"}) as harness:
        for name in "abc":
            response_id = new_response_id(name)
            asked = [
                await harness.client.get(f"/v1/responses/{response_id}"),
                await harness.client.delete(f"/v1/responses/{response_id}"),
                await harness.client.get(f"/v1/responses/{response_id}/input_items?limit=1"),
                await harness.client.post("/v1/responses", json={"input": "x", "previous_response_id": response_id}),
                await harness.client.post("/v1/responses/input_tokens", json={"previous_response_id": response_id}),
            ]
            assert [answer.headers["x-thermocline-cell"] for answer in asked] == [name] * 5
        methods = [call.method for call in harness.gateways["c"][0].calls]
        await harness.gateways["c"][0].stop()
        before = refused()
        away = await harness.client.get(f"/v1/responses/{new_response_id('c')}")
        unknown = await harness.client.get("/v1/responses/resp_1")
        after = refused()

    assert methods == ["GET", "DELETE", "GET", "POST", "POST"]
    assert (away.status_code, away.json()["error"]["code"]) == (503, "response_cell_away")
    assert "the cell c, which keeps this response" in away.json()["error"]["message"]
    assert {code: after[code] - before[code] for code in after} == {"response_cell_away": 1.0, "no_cell": 0.0}
    assert unknown.status_code == 200


async def test_a_kept_response_is_not_looked_for_where_its_cell_refuses() -> None:
    """A full cell is the client's 429 as ever; one that shuts down is away."""
    response_id = new_response_id("a")
    full, closing = refuses(429, "queue_full", "7"), refuses(503, "service_unavailable", "2")
    async with routing({"a": [ScriptedGateway(full)], "b": [ScriptedGateway()]}) as harness:
        asked = {"input": "x", "previous_response_id": response_id}
        busy = await harness.client.post("/v1/responses", json=asked)
        harness.gateways["a"][0].script = closing
        away = await harness.client.post("/v1/responses", json=asked)
        elsewhere = harness.calls()["b"]

    assert (busy.status_code, busy.json()["error"]["code"], busy.headers["retry-after"]) == (429, "queue_full", "7")
    assert (away.status_code, away.json()["error"]["code"]) == (503, "response_cell_away")
    assert away.headers["retry-after"] == "2"
    assert elsewhere == 0


async def test_compaction_is_refused_by_a_cell() -> None:
    """As at a gateway: 400 with a reason, and not a method that is not allowed."""
    async with routing({"a": [ScriptedGateway(refuses(400, "unsupported_endpoint"))]}) as harness:
        response = await harness.client.post("/v1/responses/compact", json={})

    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_endpoint")


async def test_a_full_cell_is_passed_over_in_the_messages_api() -> None:
    """529 goes to the next cell; a tenant's own 429 passes."""
    full, limited = refuses(529, "queue_full", "7"), refuses(429, "rate_limit_exceeded", "9")
    async with routing({"a": [ScriptedGateway(full)], "b": [ScriptedGateway(full)]}) as harness:
        refused = await harness.client.post("/v1/messages", json={})
        tried = sum(harness.calls().values())
    async with routing({"a": [ScriptedGateway(limited)], "b": [ScriptedGateway(limited)]}) as harness:
        passed = await harness.client.post("/v1/messages", json={})
        asked = sum(harness.calls().values())

    assert (tried, refused.status_code, refused.headers["retry-after"]) == (2, 529, "7")
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert (asked, passed.status_code) == (1, 429)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/responses/resp_1", 405),
        ("GET", "/v1/responses/resp_1/other", 404),
        ("GET", "/v1/responses/", 404),
    ],
)
async def test_other_methods_and_paths_are_refused(method: str, path: str, status: int) -> None:
    """In the shape of the API that the path belongs to."""
    async with routing({"a": [ScriptedGateway()]}) as harness:
        response = await harness.client.request(method, path)

    assert response.status_code == status
    assert response.json()["error"]["type"]
    assert (response.json().get("type") == "error") is path.startswith("/v1/messages")


async def test_a_thread_goes_on_in_its_cell() -> None:
    """Where that is away it is not found, so its client sends the whole conversation, which any cell can answer."""
    async with routing({name: [ScriptedGateway()] for name in "abc"}) as harness:
        asked = [
            {"messages": [], "thread": {"type": "continue", "previous_message_id": new_message_id(name)}}
            for name in "abc"
        ]
        answers = [await harness.client.post("/v1/messages", json=body) for body in asked]
        await harness.gateways["c"][0].stop()
        away = await harness.client.post("/v1/messages", json=asked[-1])
        again = await harness.client.post("/v1/messages", json={"messages": [], "thread": {"type": "create"}})

    assert [answer.headers["x-thermocline-cell"] for answer in answers] == ["a", "b", "c"]
    assert (away.status_code, away.json()["error"]["details"]) == (404, {"error_code": "thread_not_found"})
    assert again.status_code == 200


async def test_a_request_that_a_lost_gateway_may_have_done_says_so() -> None:
    """To the gateway that is asked next, and only then: one that could not be reached has done nothing."""

    async def drops(call: Call) -> None:
        call.drop()

    response_id = new_response_id("a")
    async with routing({"a": [ScriptedGateway(drops), ScriptedGateway()]}) as harness:
        erased = await harness.client.delete(f"/v1/responses/{response_id}")
        lost, other = harness.gateways["a"]
        told = other.calls[-1].headers.get("x-thermocline-repeated")
        await lost.stop()
        await harness.client.delete(f"/v1/responses/{response_id}")
        not_told = other.calls[-1].headers.get("x-thermocline-repeated")

    assert (erased.status_code, len(lost.calls)) == (200, 1)
    assert (told, not_told) == ("1", None)


async def test_a_compressed_body_is_passed_on_as_what_it_says() -> None:
    """A router reads it anyway, and the gateway gets it without its encoding."""
    async with routing({"a": [ScriptedGateway()]}) as harness:
        headers = {"content-encoding": "gzip"}
        answer = await harness.client.post("/v1/messages", content=gzip.compress(b'{"messages": []}'), headers=headers)
        (call,) = harness.gateways["a"][0].calls

    assert answer.status_code == 200
    assert (call.body, "content-encoding" in call.headers) == (b'{"messages": []}', False)
