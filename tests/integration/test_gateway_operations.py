"""Health, metrics, tokenisation, the OpenAPI description, the page, and the reference in docs."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest

from services.gateway.cell_events import cell_event
from services.gateway.routes import tokenization
from services.gateway.tenant_file import write_tenants
from services.gateway.tokenizer import load_tokenizer
from shared import errors, subjects
from shared.codec import decode
from shared.messages.status import Degradation, Heartbeat
from tests.unit.gateway.running_gateway import MODEL_DIR, running_gateway, says, tokenizer
from tests.waiting import until

ADMIN_KEY = "an-admin-key-of-some-length"
REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "http-api.md"


def said_by(response: httpx.Response) -> dict[str, Any]:
    """What readiness says beside devices and pools, which the tests of its view are about, and the cell's names."""
    said: dict[str, Any] = response.json()
    assert said.pop("serving")
    assert (said.pop("cell"), said.pop("model")) == ("", "test-model")
    return said


async def test_ready_needs_a_worker() -> None:
    """200 with one, 503 with reasons and OpenAI's error shape without."""
    async with running_gateway() as harness:
        ready = await harness.client.get("/health/ready")
        await harness.cell.announce(workers=0)
        await until(lambda: bool(harness.gateway.reasons_not_ready()))
        not_ready = await harness.client.get("/health/ready")
        live = await harness.client.get("/health/live")
        heads = [await harness.client.head(path) for path in ("/health/ready", "/health", "/health/live")]

    assert (ready.status_code, said_by(ready)) == (200, {"status": "ready"})
    assert (not_ready.status_code, [head.status_code for head in heads]) == (503, [503, 503, 200])
    assert not_ready.json()["reasons"] == ["no worker has joined"]
    assert (not_ready.json()["cell"], not_ready.json()["model"]) == ("", "test-model")
    assert not_ready.json()["error"]["code"] == "service_unavailable"
    assert (live.status_code, live.json()) == (200, {"status": "live"})


async def test_what_is_missing_is_told_while_requests_are_answered(tmp_path: Path) -> None:
    """200 all the same, with who lacks what and by which setting, and why for the admin key; the cell's events too."""
    disk = Degradation(component="storage", what="disk", reason="in use by process 7", setting="--disk-dir")
    told = {"component": "storage", "what": "disk", "reason": "in use by process 7", "setting": "--disk-dir"}
    tenants = tmp_path / "tenants.toml"
    write_tenants(tenants, {})
    async with running_gateway(tenants=str(tenants), admin_key=ADMIN_KEY) as harness:
        await harness.cell.announce(degraded=(disk,))
        await until(lambda: bool(harness.gateway.degraded()))
        degraded = await harness.client.get("/health/ready", headers={"x-admin-key": ADMIN_KEY})
        to_strangers = await harness.client.get("/health/ready")
        event = cell_event(harness.gateway)
        tenants.write_text("no table")
        await harness.gateway.callers.reload()
        own = (await harness.client.get("/health/ready")).json()["degraded"]
        write_tenants(tenants, {})
        await harness.gateway.callers.reload()
        await harness.cell.announce()
        await until(lambda: not harness.gateway.degraded())
        ready = await harness.client.get("/health/ready")

    assert said_by(to_strangers) == {"status": "degraded", "degraded": [told | {"reason": ""}]}
    assert (degraded.status_code, said_by(degraded)) == (200, {"status": "degraded", "degraded": [told]})
    assert json.loads(event.decode().removeprefix("data: "))["degraded"] == [told]
    assert [(each["what"], each["setting"]) for each in own] == [("disk", "--disk-dir"), ("tenants", "--tenants")]
    assert (ready.status_code, said_by(ready)) == (200, {"status": "ready"})


async def test_metrics_count_requests_and_tokens() -> None:
    """Under the names that the field uses."""

    async def value(name: str) -> float:
        text = (await harness.client.get("/metrics")).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    names = {
        'thermocline_http_requests_total{method="POST",route="/v1/completions",status="200"}': 2,
        "thermocline_time_to_first_token_seconds_count": 2,
        "thermocline_e2e_request_latency_seconds_count": 2,
        "thermocline_prompt_tokens_total": 8,
        'thermocline_prompt_tokens_cached_total{tier="device"}': 4,
        'thermocline_prompt_tokens_cached_total{tier="host"}': 2,
        'thermocline_request_success_total{finished_reason="length"}': 2,
        "thermocline_generation_tokens_total": 6,
        "thermocline_inter_token_latency_seconds_count": 4,
    }
    async with running_gateway(says("one two three four five")) as harness:
        before = {name: await value(name) for name in names}
        for stream in (False, True):
            await harness.client.post("/v1/completions", json={"prompt": [5] * 4, "max_tokens": 3, "stream": stream})
        after = {name: await value(name) for name in names}

        assert {name: after[name] - before[name] for name in names} == names
        assert await value("thermocline_num_requests_in_flight") == 0


async def test_paths_that_do_not_exist_make_one_series() -> None:
    """A label is a route, never what a caller typed."""
    async with running_gateway() as harness:
        await harness.client.get("/secret-path")
        text = (await harness.client.get("/metrics")).text

    assert 'route="unmatched"' in text
    assert "secret-path" not in text


async def test_tokenize_and_detokenize_are_inverse() -> None:
    """In vLLM's shapes, for prompts and conversations."""
    async with running_gateway() as harness:
        made = (await harness.client.post("/tokenize", json={"prompt": "hello you", "return_token_strs": True})).json()
        back = (await harness.client.post("/detokenize", json={"tokens": made["tokens"]})).json()
        chat = (
            await harness.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hello you"}]})
        ).json()
        neither = await harness.client.post("/tokenize", json={})
        wrong = await harness.client.post("/detokenize", json={"tokens": [10**9]})

    assert made["tokens"] == tokenizer().encode_now("hello you", add_special_tokens=True)
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 512)
    assert "".join(made["token_strs"]) == "hello you"
    assert back == {"prompt": "hello you"}
    assert tokenizer().decode(chat["tokens"]).endswith("<|assistant|>")
    assert (neither.status_code, wrong.status_code) == (400, 400)


async def test_a_tokenizer_is_described_as_evaluation_tools_ask() -> None:
    """With its template, by which they render conversations themselves, and its special tokens."""
    async with running_gateway(api_keys=["an-ordinary-key"]) as harness:
        stranger = await harness.client.get("/tokenizer_info")
        harness.client.headers["authorization"] = "Bearer an-ordinary-key"
        told = (await harness.client.get("/tokenizer_info")).json()
        messages = [{"role": "user", "content": "hello you"}]
        made = (await harness.client.post("/tokenize", json={"messages": messages})).json()
        text = jinja2.Template(told["chat_template"]).render(messages=messages, add_generation_prompt=True)
        asked = {"prompt": text, "add_special_tokens": False}
        rendered = (await harness.client.post("/tokenize", json=asked)).json()
        end = (
            await harness.client.post("/tokenize", json={"prompt": told["eos_token"], "add_special_tokens": False})
        ).json()

    assert stranger.status_code == 401
    assert (told["tokenizer_class"], told["model_max_length"]) == (type(load_tokenizer(MODEL_DIR)).__name__, 512)
    assert {"bos_token", "pad_token", "unk_token"} < set(told)
    assert rendered["tokens"] == made["tokens"]
    assert end["count"] == 1


async def test_the_load_is_the_number_of_choices_in_progress() -> None:
    """As vLLM tells it, to those who may read metrics."""
    async with running_gateway() as harness, asyncio.TaskGroup() as tasks:
        before = (await harness.client.get("/load")).json()
        body = {"prompt": [5], "max_tokens": 1, "n": 2}
        asking = tasks.create_task(harness.client.post("/v1/completions", json=body))
        await until(lambda: len(harness.cell.submitted) == 2)
        during = (await harness.client.get("/load")).json()
        for request in harness.cell.submitted:
            await harness.cell.emit(request, [(5, "x")], finish="length")
        await asking
        after = (await harness.client.get("/load")).json()
    async with running_gateway(api_metrics="closed") as harness:
        closed = await harness.client.get("/load")

    assert [each["server_load"] for each in (before, during, after)] == [0, 2, 0]
    assert closed.status_code == 404


async def test_many_tokens_are_told_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the answer shows nothing."""
    monkeypatch.setattr(tokenization, "PIECE_TOKENS", 7)
    text = "hello you " * 40
    async with running_gateway() as harness:
        made = (await harness.client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()

    assert made["tokens"] == tokenizer().encode_now(text, add_special_tokens=True)
    assert "".join(made["token_strs"]) == text


async def test_the_openapi_description_names_every_route_and_resolves() -> None:
    """Every reference in it has its schema, and request bodies are the decoded types."""
    async with running_gateway() as harness:
        description = (await harness.client.get("/openapi.json")).json()

    assert set(description["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
        "/health/live", "/health/ready", "/metrics", "/version", "/v1/cache", "/v1/cache/stats", "/v1/cache/pins",
        "/v1/cache/pins/{name}", "/v1/cache/prewarm", "/v1/cache/flush", "/v1/cache/verify",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
        "/v1/cell", "/v1/cell/events", "/v1/cell/page-link", "/ui/key",
        "/v1/requests", "/v1/requests/{name}/explain", "/v1/cache/leases",
        "/v1/cache/divergences",
        "/reset_prefix_cache", "/flush_cache", "/load", "/tokenizer_info",
        "/v1/responses", "/v1/responses/input_tokens", "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel", "/v1/responses/compact",
        "/v1/responses/{response_id}/input_items", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings",
    }  # fmt: skip
    references = set(re.findall(r"#/components/schemas/(\w+)", str(description)))
    assert references <= set(description["components"]["schemas"])
    body = description["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert "temperature" in description["components"]["schemas"]["ChatRequest"]["properties"]


async def test_the_description_says_which_key_opens_what_and_what_streams() -> None:
    """So that generated clients send the key, and know the chunks."""
    async with running_gateway() as harness:
        description = (await harness.client.get("/openapi.json")).json()

    paths, schemes = description["paths"], description["components"]["securitySchemes"]
    assert paths["/v1/chat/completions"]["post"]["security"] == [{"apiKey": []}]
    assert paths["/v1/messages"]["post"]["security"] == [{"apiKey": []}, {"apiKeyHeader": []}]
    assert paths["/v1/cell"]["get"]["security"] == [{"adminKey": []}, {"adminBearer": []}]
    assert paths["/v1/requests"]["get"]["security"] == [{"apiKey": []}, {"adminKey": []}]
    assert paths["/health/live"]["get"]["security"] == []
    assert {
        name for path in paths.values() for each in path.values() for way in each["security"] for name in way
    } == set(schemes)
    content = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert content["text/event-stream"]["schema"] == {"$ref": "#/components/schemas/ChatChunk"}


async def test_the_description_is_a_page_too() -> None:
    """Each endpoint with its fields; it loads nothing and runs nothing."""
    async with running_gateway() as harness:
        page = await harness.client.get("/docs")
        description = (await harness.client.get("/openapi.json")).json()

    assert page.headers["content-type"].startswith("text/html")
    assert [path for path in description["paths"] if f" {path}</code>" not in page.text] == []
    for field in description["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{field}</code>" in page.text
    assert not re.search(r"https?://|<script|src=", page.text)


async def test_the_page_names_the_endpoints_and_loads_nothing() -> None:
    """No external resource, no script."""
    async with running_gateway() as harness:
        page = await harness.client.get("/")

    assert page.status_code == 200
    assert "/v1/chat/completions" in page.text
    assert not re.search(r"https?://|<script|src=", page.text)


async def test_every_response_has_a_request_id() -> None:
    """Good or bad, and each its own."""
    async with running_gateway() as harness:
        ids = [(await harness.client.get(path)).headers["x-request-id"] for path in ("/version", "/nope")]

    assert len(set(ids)) == 2


async def test_the_gateway_beats() -> None:
    """Under the id that its requests carry."""
    heard: list[Heartbeat] = []
    async with running_gateway() as harness:

        async def hear(delivery: object) -> None:
            heard.append(decode(delivery.data, Heartbeat))  # type: ignore[attr-defined]

        await harness.cell.bus.subscribe(subjects.HEARTBEATS, hear)
        await until(lambda: bool(heard))

    assert (heard[0].kind, heard[0].id) == ("gateway", harness.gateway.gateway_id)


def _every_error() -> list[type[errors.ThermoclineError]]:
    found, queue = [], [errors.ThermoclineError]
    while queue:
        kind = queue.pop()
        found.append(kind)
        queue += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == "shared.errors" and not issubclass(kind, errors.OperatorError)]


@pytest.mark.parametrize("kind", _every_error(), ids=lambda kind: kind.__name__)
def test_the_reference_lists_every_error(kind: type[errors.ThermoclineError]) -> None:
    """Code, status and type in the table of docs are those of the code."""
    row = f"| `{kind.code}` | {kind.status} | `{kind.kind}` |"

    assert row in REFERENCE.read_text(encoding="utf-8")


async def test_the_reference_names_every_endpoint_and_field() -> None:
    """A field that is decoded is documented."""
    from services.gateway.messages_api.schema import MessagesRequest
    from services.gateway.openai_schema.chat import ChatRequest
    from services.gateway.openai_schema.completions import CompletionRequest
    from services.gateway.responses.schema import ResponsesRequest

    text = REFERENCE.read_text(encoding="utf-8")
    async with running_gateway() as harness:
        paths = list((await harness.client.get("/openapi.json")).json()["paths"])
    schemas = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
    fields = {field for schema in schemas for field in schema.__struct_fields__}

    assert [path for path in paths if f"`{path}`" not in text] == []
    assert sorted(field for field in fields if f"`{field}`" not in text) == []
