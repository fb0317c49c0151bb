"""Every error leaves in OpenAI's shape, whoever made it and however malformed the request was."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.gateway.body import MOST_VALUES
from services.gateway.openai_schema.chat import REFUSED_CHAT_FIELDS
from services.gateway.openai_schema.sampling import REFUSED_FIELDS
from services.gateway.responses import schema as responses
from tests.cases import case
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.waiting import until


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, after checking that it is complete and typed."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    assert body["type"]
    return dict(body)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "model": "test-model", "max_tokens": 9},
}

BAD_BODIES = [
    b"", b"null", b"[]", b"{", b'{"prompt": "hi"', b'{"prompt": "\xff"}', b'{"prompt": "x", "unknown": "\xff"}',
    b'{"prompt": NaN}', b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "temperature": -0.1}',
    b'{"prompt": "x", "temperature": "1"}', b'{"prompt": "x", "temperature": 1e300}', b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "n": 129}', b'{"prompt": "x", "n": 1.5}', b'{"prompt": "x", "n": true}',
    b'{"prompt": "x", "max_tokens": -1}', b'{"prompt": "x", "max_tokens": 1' + b"0" * 400 + b"}",
    b'{"prompt": "x", "seed": 99999999999999999999999}', b'{"prompt": "x", "top_p": 0}', b'{"prompt": "x", "top_p": 2}',
    b'{"prompt": "x", "top_k": -2}', b'{"prompt": "x", "min_p": 2}', b'{"prompt": "x", "presence_penalty": 3}',
    b'{"prompt": "x", "repetition_penalty": 0}',
    b'{"prompt": "x", "repetition_penalty": 1e-300}', b'{"prompt": "x", "logprobs": 21}',
    b'{"prompt": "x", "stop": ""}',
    b'{"prompt": "x", "stop": ["' + b'a","' * 20 + b'"]}', b'{"prompt": "x", "stop": [1]}',
    b'{"prompt": "x", "logit_bias": {"x": 1}}', b'{"prompt": "x", "logit_bias": {"1": 101}}',
    b'{"prompt": "x", "logit_bias": [1]}', b'{"prompt": "x", "logit_bias": {"999999": 1}}', b'{"prompt": ""}',
    b'{"prompt": []}', b'{"prompt": [[]]}', b'{"prompt": [-1]}', b'{"prompt": [99999999]}',
    b'{"prompt": [1, "a"]}', b'{"prompt": [1.5]}', b'{"prompt": {"a": 1}}', b'{"prompt": 5}', b"{}",
    b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "x", "unknown": ' + b"[" * 100_000,
    b'{"prompt": "x", "unknown": ' + b'{"a":' * 100_000, b'{"prompt": "x"} trailing', b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "stream": "yes"}', b'{"prompt": "x", "cache": true}', b'{"prompt": "x", "deadline_ms": 0}',
    b'{"prompt": "x", "priority": 1001}', b'{"prompt": "x", "cache_salt": ""}', b'{"prompt": "x", "suffix": "y"}',
    b'{"prompt": "x", "stream_options": {"include_usage": true}}', b'{"prompt": "x", "min_tokens": 17}',
]  # fmt: skip


async def test_malformed_completion_bodies_are_refused() -> None:
    """With 400, and none of them reaches the cell."""
    async with running_gateway(says("x")) as harness:
        for body in BAD_BODIES:
            response = await harness.client.post("/v1/completions", content=body)
            assert (response.status_code, body[:60]) == (400, body[:60])
            assert error_of(response)["type"] == "invalid_request_error"

        assert harness.cell.submitted == []
        assert harness.gateway.slots.used == 0


BAD_CHATS: list[dict[str, Any]] = [
    {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "wizard", "content": "hi"}]}, {"messages": [{"content": "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    {"max_tokens": 0}, {"max_completion_tokens": -5}, {"logprobs": 3}, {"top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 21}, {"response_format": {"type": "json_schema"}},
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tools": "x"}, {"tool_choice": "required"},
    {"chat_template_kwargs": {"tokenize": True}}, {"n": 1000},
]  # fmt: skip


async def test_malformed_chat_bodies_are_refused() -> None:
    """With 400 and a reason."""
    async with running_gateway(says("x")) as harness:
        for change in BAD_CHATS:
            response = await harness.client.post("/v1/chat/completions", json={**CHAT, **change})
            assert (response.status_code, change) == (400, change)
            assert error_of(response)["type"] == "invalid_request_error"

        assert harness.cell.submitted == []


async def test_fields_that_would_change_the_answer_are_refused() -> None:
    """A caller who asks for them must not get an answer that was made without."""
    chat = (*REFUSED_FIELDS, *REFUSED_CHAT_FIELDS)
    messages = [name for name in chat if name != "thinking"]  # This API has a field of that name.
    fields = {
        "/v1/completions": REFUSED_FIELDS,
        "/v1/chat/completions": chat,
        "/v1/responses": (
            *chat,
            *responses.REFUSED_FIELDS,
            *responses.INSTEAD,
            "return_token_ids",
            "timing",
            "explain",
        ),
        "/v1/messages": (*messages, "container", "compaction", "logprobs", "return_token_ids", "explain"),
    }
    async with running_gateway(says("hi")) as harness:
        for endpoint, body in ENDPOINTS.items():
            for name in fields[endpoint]:
                with case(endpoint=endpoint, name=name):
                    for value in (None, False):
                        answer = await harness.client.post(endpoint, json=body | {name: value})
                        assert answer.status_code == 200
                    refused = await harness.client.post(endpoint, json=body | {name: True})
                    error = error_of(refused)
                    assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)


async def test_unknown_fields_are_ignored() -> None:
    """As OpenAI-compatible servers do."""
    async with running_gateway(says("x")) as harness:
        response = await harness.client.post("/v1/chat/completions", json={**CHAT, "not_a_field": {"a": [1]}})

    assert response.status_code == 200


async def test_routes_and_methods_that_do_not_exist() -> None:
    """404 and 405 are typed too, and 405 says what is allowed."""
    async with running_gateway() as harness:
        for method, path, status, code in (
            ("GET", "/nope", 404, "unknown_route"),
            ("POST", "/v1/", 404, "unknown_route"),
            ("GET", "/v1/completions", 405, "method_not_allowed"),
            ("DELETE", "/v1/models", 405, "method_not_allowed"),
            ("GET", "/v1/models/other", 404, "model_not_found"),
            ("GET", "/redoc", 404, "unknown_route"),
            ("BREW", "/v1/models", 405, "method_not_allowed"),
        ):
            with case(method=method, path=path):
                response = await harness.client.request(method, path)
                assert (response.status_code, error_of(response)["code"]) == (status, code)
                assert ("allow" in response.headers) == (status == 405)


async def test_an_unknown_model_is_not_found_everywhere() -> None:
    """On all endpoints that name one."""
    bodies = {
        "/v1/chat/completions": {**CHAT, "model": "x"},
        "/v1/completions": {"prompt": "hi", "model": "x"},
        "/tokenize": {"prompt": "hi", "model": "x"},
        "/detokenize": {"tokens": [1], "model": "x"},
    }
    async with running_gateway() as harness:
        for path, body in bodies.items():
            response = await harness.client.post(path, json=body)

            assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


async def test_prompts_beyond_the_context_name_both_numbers() -> None:
    """For texts, token ids and conversations, and for answers that are too long."""
    async with running_gateway(says("x")) as harness:
        found = [
            await harness.client.post("/v1/completions", json={"prompt": [5] * 600}),
            await harness.client.post("/v1/completions", json={"prompt": [5] * 500, "max_tokens": 100}),
            await harness.client.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": "q " * 2_000}]}
            ),
            await harness.client.post("/v1/responses", json={"input": "q " * 2_000}),
        ]

    for response, number in zip(found, ("600", "600", "", ""), strict=True):
        error = error_of(response)
        assert error["param"] in ("prompt", "max_tokens", "messages", "input")
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "512" in error["message"]
        assert number in error["message"]


CALL_TEXT = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": "x" * 5_000_000}}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_conversation_that_is_hopelessly_long_is_refused_unrendered(path: str) -> None:
    """Whatever makes it long: messages without content, arguments of calls, variables of the template."""
    bodies: dict[str, dict[str, Any]] = {
        "messages": {"messages": [{"role": "user", "content": ""}] * 513},
        "arguments": {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL_TEXT]}]},
        "variables": {**CHAT, "chat_template_kwargs": {"note": "x" * 5_000_000}},
    }
    async with running_gateway() as harness:
        for name, body in bodies.items():
            with case(long=name):
                response = await harness.client.post(path, json=body)
                error = error_of(response)
                found = (response.status_code, error["code"], error["param"])
                assert found == (400, "context_length_exceeded", "messages")


async def test_what_no_model_takes_is_refused_before_it_is_looked_at() -> None:
    """Also by what only translates between text and tokens; megabytes of text are not tokenised."""
    async with running_gateway() as harness:
        for path, param, value in (
            ("/v1/completions", "prompt", "x" * 5_000_000),
            ("/v1/completions", "prompt", "q " * 2_000),
            ("/tokenize", "prompt", "x" * 5_000_000),
            ("/tokenize", "prompt", "q " * 2_000),
            ("/detokenize", "tokens", [5] * 513),
            ("/v1/completions", "prompt", [5] * 513),
        ):
            with case(path=path, kind=type(value)):
                response = await harness.client.post(path, json={param: value})
                error = error_of(response)
                assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_a_body_of_millions_of_values_is_refused_before_it_is_decoded(path: str) -> None:
    """Decoding it would hold up every stream."""
    async with running_gateway() as harness:
        for start, value, values, end in (
            (b'{"prompt":[', b"1,", MOST_VALUES, b"1]}"),
            (b'{"messages":[{"role":"user","content":""}],"tools":[', b"{},", MOST_VALUES // 5 + 1, b"{}]}"),
            (b'{"prompt":"x","unknown":[', b"[],", MOST_VALUES // 5 + 1, b"[]]}"),
            (b'{"prompt":"', b"\\n", MOST_VALUES + 1, b'"}'),
        ):
            with case(start=start):
                response = await harness.client.post(path, content=start + value * values + end)
                assert (response.status_code, error_of(response)["code"]) == (413, "payload_too_large")


async def test_bodies_beyond_the_bound_are_refused_with_and_without_a_length() -> None:
    """While reading: a chunked body is cut off at the bound."""
    read = 0

    async def endless() -> Any:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b"x" * 1024
            await asyncio.sleep(0)

    async with running_gateway(max_body_bytes=64 * 1024) as harness:
        declared = await harness.client.post("/v1/completions", content=b"x" * 70_000)
        chunked = await harness.client.post("/v1/completions", content=endless())

    assert (declared.status_code, error_of(declared)["code"]) == (413, "payload_too_large")
    assert (chunked.status_code, error_of(chunked)["code"]) == (413, "payload_too_large")
    assert read < 100


async def test_a_prompt_beyond_the_brokers_payload_is_too_large() -> None:
    """The bus refuses it, and the client learns it as 413."""
    async with running_gateway(says("x"), max_payload=1024) as harness:
        response = await harness.client.post("/v1/completions", json={"prompt": [5] * 400})

        assert (response.status_code, error_of(response)["code"]) == (413, "payload_too_large")
        assert harness.gateway.slots.used == 0


async def test_a_body_must_say_that_it_is_json() -> None:
    """Every page may have a browser send other types anywhere, without being asked whether it may."""
    async with running_gateway(says("hi")) as harness:
        for told, status in (
            ("application/json", 200),
            ("Application/JSON; charset=utf-8", 200),
            ("application/vnd.api+json", 200),
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("multipart/form-data; boundary=x", 415),
            ("", 415),
        ):
            with case(told=told):
                response = await harness.client.post(
                    "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": told}
                )
                assert response.status_code == status
                if status != 200:
                    assert error_of(response)["code"] == "unsupported_content_type"


async def test_pages_elsewhere_may_call_where_the_operator_says_so() -> None:
    """A browser asks first, and shows an answer only to those that were allowed; by default nobody is."""
    asks = {"origin": "https://chat.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,openai-beta,x-stainless-retry-count,"
            "anthropic-dangerous-direct-browser-access"}  # fmt: skip
    async with running_gateway(says("hi"), api_keys=("key",), cors_origins=("https://chat.example",)) as harness:
        allowed = await harness.client.options("/v1/completions", headers=asks)
        stranger = await harness.client.options("/v1/completions", headers=asks | {"origin": "https://evil.example"})
        refused = await harness.client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"origin": "https://chat.example"}
        )
    async with running_gateway(says("hi")) as harness:
        closed = await harness.client.options("/v1/completions", headers=asks)

    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-origin" not in stranger.headers
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    assert refused.headers["access-control-expose-headers"] == "*"
    assert "access-control-allow-origin" not in closed.headers


async def test_an_encoded_body_is_refused() -> None:
    """Rather than read as JSON."""
    async with running_gateway() as harness:
        response = await harness.client.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})

    assert response.status_code == 400
    assert "content-encoding" in error_of(response)["message"]


async def test_keys_guard_the_api_and_nothing_else() -> None:
    """A wrong or missing key is 401; health and metrics need none."""
    async with running_gateway(says("x"), api_keys=["secret", "other"]) as harness:
        client = harness.client
        refused = await client.get("/v1/models")
        wrong = await client.get("/v1/models", headers={"authorization": "Bearer secreT"})
        right = await client.get("/v1/models", headers={"authorization": "Bearer other"})
        health = await client.get("/health/live")
        await client.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer secret"})
        tenant = harness.cell.submitted[0].tenant

    assert (refused.status_code, wrong.status_code, right.status_code, health.status_code) == (401, 401, 200, 200)
    assert error_of(refused)["type"] == "authentication_error"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert len(tenant) == 16
    assert tenant not in ("secret", "")


async def test_an_error_of_ours_is_a_typed_500(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text stays in the log."""
    async with running_gateway(says("x")) as harness:

        def explode(*_: object) -> None:
            raise RuntimeError("inner secret")

        monkeypatch.setattr(harness.gateway.dispatcher, "check_open", explode)
        response = await harness.client.post("/v1/chat/completions", json=CHAT)

    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "secret" not in response.text


async def test_an_error_in_the_middle_of_a_stream_is_an_event() -> None:
    """Text so far, an error object, and the end mark."""
    async with running_gateway(over_http=True) as harness:
        call = asyncio.create_task(harness.client.post("/v1/completions", json={"prompt": "hi", "stream": True}))
        await harness.cell.until(lambda: bool(harness.cell.submitted))
        request = harness.cell.submitted[0]
        await harness.cell.emit(request, [(5, "some ")])
        await harness.cell.emit(request, [(6, "text")], index=1)
        await until(lambda: harness.taken(request) == 2)
        await harness.cell.refuse(request, "attempts_exhausted")
        response = await call

    events = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert response.status_code == 200
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-2]) == "some text"
    assert json.loads(events[-2])["error"]["code"] == "attempts_exhausted"
    assert events[-1] == "[DONE]"


async def test_a_workers_error_is_a_typed_500() -> None:
    """With the worker's words."""
    async with running_gateway() as harness:
        call = asyncio.create_task(harness.client.post("/v1/completions", json={"prompt": "hi"}))
        await harness.cell.until(lambda: bool(harness.cell.submitted))
        await harness.cell.emit(harness.cell.submitted[0], [], finish="error", error="the kernel failed")
        response = await call

    assert (response.status_code, error_of(response)["message"]) == (500, "the kernel failed")


async def _raw(harness: Harness, data: bytes) -> bytes:
    port = int(harness.base_url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


async def test_bytes_that_are_no_http_get_openais_shape_too() -> None:
    """Even below the application."""
    async with running_gateway(over_http=True) as harness:
        for data in (
            b"GARBAGE\r\n\r\n",
            b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 100_000 + b"\r\n\r\n",
        ):
            with case(data=data[:40]):
                head, _, body = (await _raw(harness, data)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400")
                assert json.loads(body)["error"]["code"] == "invalid_http"


async def test_a_body_that_never_comes_ends_with_408() -> None:
    """And holds its slot no longer than that."""
    async with running_gateway(over_http=True, body_timeout_ms=100) as harness:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\nconnection: close\r\n\r\n{"
        )
        answer = await _raw(harness, head)

        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"body_timeout"' in answer
        assert harness.gateway.slots.used == 0
