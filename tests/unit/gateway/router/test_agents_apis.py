"""The Responses and Messages APIs through a router: where requests go, and how streams end that break."""

from __future__ import annotations

import json

import pytest

from services.gateway.responses.ids import new_response_id
from tests.unit.gateway.router.scripted_gateway import Call, ScriptedGateway, refuses, routing


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_stream_that_breaks_ends_in_the_shape_of_its_api(path: str) -> None:
    """With an event of the right name, and OpenAI's with the next number."""

    async def breaks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'event: a\ndata: {"type":"a"}\n\n: keep-alive\n\nevent: b\ndata: {"type":"b"}\n\nevent')
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
        away = await harness.client.get(f"/v1/responses/{new_response_id('c')}")
        unknown = await harness.client.get("/v1/responses/resp_1")

    assert methods == ["GET", "DELETE", "GET", "POST", "POST"]
    assert away.status_code == 503
    assert unknown.status_code == 200


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
