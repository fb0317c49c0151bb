"""The verbs that speak HTTP: pin and prewarm, against a gateway that a test writes."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from shared.errors import OperatorError, TransportError
from thermocline.cache import gateway_client, prewarm
from thermocline.cache.gateway_client import GatewayRefused
from thermocline.cache.prewarm import warm_all, warmed_lines
from thermocline.cache.prompt_file import Prompt

PROMPTS = [Prompt(line=number, path="/v1/completions", body={"prompt": [number] * 8}) for number in (1, 3, 4)]
USAGE = {
    "prompt_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 6, "device_tokens": 4, "host_tokens": 2},
}


def gateway(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://gateway")


def error(status: int, message: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}}, headers=headers)


async def test_every_prompt_is_sent_once_behind_all_others() -> None:
    """As a completion of one token of the least priority, each with its own body."""
    bodies: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"usage": USAGE})

    async with gateway(answer) as http:
        warmed = await warm_all(http, PROMPTS, 2)

    assert [prompt.line for prompt in warmed] == [1, 3, 4]
    assert warmed[0].tiers == {"device": 4, "neighbour": 0, "host": 2, "lent": 0, "hidden": 0, "disk": 0, "remote": 0}
    assert sorted(str(body["prompt"]) for body in bodies) == [str([n] * 8) for n in (1, 3, 4)]
    assert {(body["max_tokens"], body["priority"], body["temperature"]) for body in bodies} == {(1, -1000, 0)}
    # What a lossy default loads in part is not cached.
    assert all(body["cache"] == {"fidelity": "exact"} for body in bodies)


async def test_a_full_queue_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the gateway says so, a bounded number of times; another error is final at once."""
    monkeypatch.setattr(prewarm, "LONGEST_PAUSE_S", 0.0)
    asked = {1: 0, 3: 0, 4: 0}

    def answer(request: httpx.Request) -> httpx.Response:
        line = json.loads(request.content)["prompt"][0]
        asked[line] += 1
        if line == 1 and asked[1] < 3:
            return error(429, "the queue is full", **{"retry-after": "1"})
        if line == 3:
            return error(503, "no worker", **{"retry-after": "7"})
        return error(400, "too long") if line == 4 else httpx.Response(200, json={"usage": USAGE})

    async with gateway(answer) as http:
        warmed = await warm_all(http, PROMPTS, 3)

    assert [prompt.error for prompt in warmed] == ["", "no worker", "too long"]
    assert asked == {1: 3, 3: prewarm.TRIES, 4: 1}
    lines = warmed_lines(warmed)
    assert lines[1].split() == ["1", "8", "4", "0", "2", "0", "0", "0", "0", "2"]
    assert lines[2].split()[0] == "all"
    assert lines[3:] == [
        "line 3 failed: no worker", "line 4 failed: too long", "1 of 3 prompts prewarmed",
    ]  # fmt: skip


async def test_answers_that_are_none_fail_their_prompt_only() -> None:
    """No usage, no JSON, no connection."""

    def answer(request: httpx.Request) -> httpx.Response:
        line = json.loads(request.content)["prompt"][0]
        if line == 4:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={}) if line == 1 else httpx.Response(502, text="<html>")

    async with gateway(answer) as http:
        warmed = await warm_all(http, PROMPTS, 1)

    assert ["usage" in warmed[0].error, "502" in warmed[1].error, "refused" in warmed[2].error] == [True] * 3


async def test_errors_of_a_gateway_are_one_line() -> None:
    """The API's message, or what stands there instead of a gateway."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            return error(404, "there is no pin 'x'")
        return httpx.Response(200, json=[])

    async with gateway(answer) as http:
        with pytest.raises(GatewayRefused, match="no pin 'x'"):
            await gateway_client.delete(http, "/v1/cache/pins/x")
        with pytest.raises(TransportError, match="no gateway"):
            await gateway_client.post(http, "/v1/cache/pins", {})


@pytest.mark.parametrize(
    ("url", "key"),
    [("gateway:8000", ""), ("http://", ""), ("http://g", "schlüssel"), ("http://g:65536", ""), ("http://g:0", "")],
)
def test_addresses_and_keys_without_sense_are_the_operators_fault(url: str, key: str) -> None:
    """Found before anything is sent."""
    with pytest.raises(OperatorError, match="--url"):
        gateway_client.client(url, {"x-admin-key": key})
