"""The administration of the cache over HTTP, against a scripted scheduler and storage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.gateway.keys import key_hash
from services.gateway.openai_schema.cache import CacheNode, FlushRequest, Pin, PinRequest, PrewarmRequest, VerifyRequest
from services.gateway.tenant_file import write_tenants
from services.gateway.tenants import Tenant
from shared.ids import namespace_digest
from shared.messages.base import unpack_int32
from shared.messages.cell_events import FlushCache, PinPrefix, UnpinPrefix
from shared.messages.status import LeaseStatus, VerifyChunks
from tests.unit.gateway.running_gateway import FACTS, Harness, running_gateway, says, tokenizer
from tests.unit.gateway.scripted_cache import NAMESPACE, ScriptedCache, node
from tests.waiting import until

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "http-api.md"
KEY = "an-admin-key-of-some-length"


@contextlib.asynccontextmanager
async def administered(*, tenants: str = "", **script: Any) -> AsyncIterator[tuple[Harness, ScriptedCache]]:
    """A gateway whose client carries the admin key, and the cell behind it."""
    async with (
        running_gateway(says("yes"), admin_key=KEY, tenants=tenants) as harness,
        ScriptedCache(harness.cell.bus, **script) as cache,
    ):
        harness.client.headers["x-admin-key"] = KEY
        yield harness, cache


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and field of an error."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["param"]


async def test_nodes_are_listed_page_by_page() -> None:
    """With first tokens as ids and as text, tiers and pins, until there are no more."""
    nodes = [node(1, pins=("p",), disk={"storage-0": 2}), node(2, parent=1), node(3, namespace="cd" * 16)]
    async with administered(nodes=nodes) as (harness, _):
        first = (await harness.client.get("/v1/cache", params={"limit": 2})).json()
        second = (await harness.client.get("/v1/cache", params={"limit": 2, "after": first["next_after"]})).json()
        own = (await harness.client.get("/v1/cache", params={"namespace": NAMESPACE})).json()

    assert first["data"][0] == {
        "id": 1, "parent": None, "namespace": NAMESPACE, "depth": 0, "tokens": 16, "hits": 2, "head": [1, 2, 3],
        "head_text": tokenizer().decode([1, 2, 3]), "device": {"worker-0": 1}, "host": {"storage-0": 1},
        "disk": {"storage-0": 2}, "hidden": {}, "pins": ["p"],
    }  # fmt: skip
    assert (first["object"], first["has_more"], first["next_after"]) == ("list", True, 2)
    assert ([n["id"] for n in second["data"]], second["has_more"], second["next_after"]) == ([3], False, None)
    assert [n["parent"] for n in own["data"]] == [None, 1]


async def test_a_senseless_query_is_refused() -> None:
    """With 400 and the parameter's name."""
    cases = [
        ({"limit": "0"}, "limit"), ({"limit": "1025"}, "limit"), ({"limit": "x"}, "limit"), ({"after": "-1"}, "after"),
        ({"namespace": "xyz"}, "namespace"), ({"namespace": NAMESPACE, "cache_salt": "s"}, "cache_salt"),
    ]  # fmt: skip
    async with administered() as (harness, cache):
        for query, param in cases:
            response = await harness.client.get("/v1/cache", params=query)
            assert refusal(response) == (400, "invalid_request", param), query

    assert cache.calls == []


async def test_stats_unite_scheduler_and_storages() -> None:
    """A storage that does not answer is null rather than an error."""
    async with administered(storages=("storage-0",), disk=["a", "b"]) as (harness, cache):
        cache.storages = ("storage-0", "storage-1")
        stats = (await harness.client.get("/v1/cache/stats")).json()

    assert stats["pools"][0] == {
        "owner": "worker-0", "tier": "device", "total": 64, "cached": 4, "leased": 0, "free": 60,
        "form": "",
    }  # fmt: skip
    assert stats["hit_tokens"] == {"device": 96, "neighbour": 0, "host": 0, "lent": 0, "disk": 0, "remote": 0}
    assert (stats["storages"]["storage-0"]["disk_chunks"], stats["storages"]["storage-1"]) == (2, None)


async def test_leases_are_listed_by_namespace() -> None:
    """With whose they are, what they cover and until when."""
    async with administered() as (harness, cache):
        cache.leases = [
            LeaseStatus(tenant=name, namespace=space * 32, key="s", tokens=64, ttl_ms=300_000, expires_ns=10**18)
            for name, space in (("acme", "a"), ("zoo", "b"))
        ]
        every = (await harness.client.get("/v1/cache/leases")).json()["data"]
        (one,) = (await harness.client.get(f"/v1/cache/leases?namespace={'b' * 32}")).json()["data"]

    assert [lease["tenant"] for lease in every] == ["acme", "zoo"]
    assert one == {
        "object": "cache.lease", "tenant": "zoo", "namespace": "b" * 32, "key": "s", "tokens": 64, "ttl_s": 300.0,
        "expires_at": 1e9,
    }  # fmt: skip


async def test_a_pin_is_set_listed_and_let_go() -> None:
    """Its tokens and namespace are those that the API itself would give the prompt."""
    async with administered() as (harness, cache):
        body = {"prompt": "hello you " * 40, "ttl_s": 90, "cache_salt": "tenant", "name": "docs"}
        made = (await harness.client.post("/v1/cache/pins", json=body)).json()
        listed = (await harness.client.get("/v1/cache/pins")).json()["data"]
        gone = (await harness.client.delete("/v1/cache/pins/docs")).json()
        again = await harness.client.delete("/v1/cache/pins/docs")

    order = cache.orders[0]
    assert isinstance(order, PinPrefix)
    assert unpack_int32(order.tokens) == tokenizer().encode_now("hello you " * 40, add_special_tokens=True)
    assert order.namespace == namespace_digest(FACTS.fingerprint, salt="tenant")
    assert (order.pin_id, order.ttl_ms) == ("docs", 90_000)
    assert (made["name"], made["held_tokens"], made["pages"]) == ("docs", 32, 2)
    assert listed == [made]
    assert gone == {"object": "cache.pin", "name": "docs", "deleted": True}
    assert refusal(again) == (404, "pin_not_found", None)
    assert sum(isinstance(order, UnpinPrefix) for order in cache.orders) == 1


async def test_conversations_and_tokens_are_pinned_as_the_api_sees_them() -> None:
    """Through the chat template, or as they are; a name is made where none is given."""
    async with administered() as (harness, cache):
        messages = [{"role": "user", "content": "hello you"}]
        chat = (await harness.client.post("/v1/cache/pins", json={"messages": messages})).json()
        tokenized = (await harness.client.post("/tokenize", json={"messages": messages})).json()["tokens"]
        await harness.client.post("/v1/cache/pins", json={"tokens": [5] * 40})

    pins = [order for order in cache.orders if isinstance(order, PinPrefix)]
    assert [unpack_int32(pin.tokens) for pin in pins] == [tokenized, [5] * 40]
    assert chat["name"] == pins[0].pin_id
    assert chat["name"] != pins[1].pin_id
    assert pins[0].ttl_ms == 3_600_000


@pytest.mark.parametrize(
    ("script", "part"),
    [({"refusal": "there is no host pool"}, "no host pool"), ({"forgets_pins": True}, "its maximum of pins")],
)
async def test_a_refused_pin_is_an_error_with_its_reason(script: dict[str, Any], part: str) -> None:
    """409, whether the scheduler remembers the refusal or has no room even for that."""
    async with administered(**script) as (harness, _):
        response = await harness.client.post("/v1/cache/pins", json={"tokens": [5] * 40})

    assert refusal(response)[:2] == (409, "pin_refused")
    assert part in response.json()["error"]["message"]


async def test_malformed_bodies_are_refused() -> None:
    """With the field at fault, and nothing reaches the cell."""
    cases: list[tuple[str, object, str | None]] = [
        ("pins", {}, "prompt"), ("pins", {"prompt": "x", "tokens": [1]}, "tokens"), ("pins", {"tokens": []}, "tokens"),
        ("pins", {"tokens": [-1]}, "tokens"), ("pins", {"tokens": [10**7]}, "tokens"),
        ("pins", {"prompt": ""}, "prompt"),
        ("pins", {"prompt": "x", "ttl_s": 0}, "ttl_s"), ("pins", {"prompt": "x", "ttl_s": "1h"}, "ttl_s"),
        ("pins", {"prompt": "x", "name": "a b"}, "name"), ("pins", {"tokens": [1] * 600}, "tokens"),
        ("pins", {"prompt": "x", "tools": []}, "tools"), ("pins", {"messages": []}, "messages"),
        ("pins", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ("flush", {"tiers": []}, "tiers"), ("flush", {"tiers": ["moon"]}, "tiers[0]"),
        ("flush", {"namespace": "x"}, "namespace"), ("flush", {"tier": ["device"]}, "tier"),
        ("flush", {"namespace": NAMESPACE, "cache_salt": "s"}, "cache_salt"),
        ("verify", {"max_chunks": 0}, "max_chunks"), ("verify", {"cursor": "storage-9:"}, "cursor"),
        ("prewarm", {}, "prompts"), ("prewarm", {"prompts": []}, "prompts"),
        ("prewarm", {"prompts": ["x"] * 65}, "prompts"),
        ("prewarm", {"prompts": ["x", {"tokens": []}]}, "prompts[1].tokens"),
        ("prewarm", {"prompts": ["x", {"prompt": ""}]}, "prompts[1].prompt"), ("prewarm", [], None),
    ]  # fmt: skip
    async with administered() as (harness, cache):
        for path, body, param in cases:
            response = await harness.client.post(f"/v1/cache/{path}", json=body)

            assert (response.status_code, refusal(response)[2]) == (400, param), (path, body)
            assert response.json()["error"]["type"] == "invalid_request_error"
    assert cache.orders == []
    assert harness.cell.submitted == []


async def test_a_flush_says_what_went() -> None:
    """Of all namespaces or of one salt's; without a body, device and host."""
    async with administered(disk=["a", "b"]) as (harness, cache):
        salted = await harness.client.post("/v1/cache/flush", json={"tiers": ["disk"], "cache_salt": "s"})
        plain = await harness.client.post("/v1/cache/flush")

    assert salted.json() == {
        "object": "cache.flush", "tiers": ["disk"], "device_pages": 3, "host_pages": 2, "disk_chunks": 2,
        "responses": 0,
    }  # fmt: skip
    assert plain.json()["tiers"] == ["device", "host"]
    first, second = (order for order in cache.orders if isinstance(order, FlushCache))
    assert (first.tiers, first.namespace) == (("disk",), namespace_digest(FACTS.fingerprint, salt="s"))
    assert (second.tiers, second.namespace) == (("device", "host"), "")


@pytest.mark.parametrize(
    ("target", "tiers"),
    [
        ("/reset_prefix_cache", ("device", "host")),
        ("/reset_prefix_cache?reset_running_requests=false&reset_external=False", ("device", "host")),
        ("/reset_prefix_cache?reset_external=true", ("device", "host", "disk", "remote")),
        ("/flush_cache", ("device", "host")),
        ("/flush_cache?timeout=30.5", ("device", "host")),
    ],
)
async def test_load_generators_empty_the_cache_by_the_names_they_know(target: str, tiers: tuple[str, ...]) -> None:
    """vLLM's and SGLang's, with no body or any: all namespaces, and the report is that of a flush."""
    async with administered() as (harness, cache):
        answers = [
            await harness.client.post(target),
            await harness.client.post(target, content=b"", headers={"content-type": "application/octet-stream"}),
            await harness.client.post(target, headers={"x-admin-key": "", "authorization": f"Bearer {KEY}"}),
        ]

    assert [answer.status_code for answer in answers] == [200] * 3
    assert answers[0].json()["tiers"] == list(tiers)
    assert answers[0].json()["device_pages"] == 3
    orders = [order for order in cache.orders if isinstance(order, FlushCache)]
    assert [(order.tiers, order.namespace) for order in orders] == [(tiers, "")] * 3


@pytest.mark.parametrize(
    ("target", "code", "param"),
    [
        ("/reset_prefix_cache?reset_running_requests=true", "unsupported_parameter", "reset_running_requests"),
        ("/reset_prefix_cache?reset_external=perhaps", "invalid_request", "reset_external"),
        ("/reset_prefix_cache?namespace=ab", "invalid_request", "namespace"),
        ("/flush_cache?reset_external=true", "invalid_request", "reset_external"),
    ],
)
async def test_a_reset_that_would_do_something_else_is_refused(target: str, code: str, param: str) -> None:
    """Running requests keep their KV, and a parameter that is not known here might narrow what is meant."""
    async with administered() as (harness, cache):
        answer = await harness.client.post(target)
        got = await harness.client.get("/flush_cache")

    assert refusal(answer) == (400, code, param)
    assert got.status_code == 405
    assert cache.orders == []


@pytest.mark.parametrize(
    ("whose", "stay"),
    [
        ({}, []),
        ({"cache_salt": "s"}, ["one", "two"]),
        ({"tenant": "first"}, ["two"]),
        ({"tenant": "first", "cache_salt": "s"}, ["one", "two"]),
    ],
)
async def test_a_flush_erases_kept_responses_where_it_says_so(
    tmp_path: Path, whose: dict[str, str], stay: list[str]
) -> None:
    """All, a salt's, a tenant's, or a salt's of a tenant; without being told to, none."""
    path = tmp_path / "tenants.toml"
    keys = {"first": b"one", "second": b"two"}
    write_tenants(path, {name: Tenant(salt=name * 8, keys=(key_hash(key),)) for name, key in keys.items()})
    body = {"model": "test-model", "input": "hi"}
    async with administered(tenants=str(path)) as (harness, _):
        kept = {}
        for name, salt in (("one", ""), ("two", ""), ("salted", "s")):
            key = {"authorization": f"Bearer {'one' if name == 'salted' else name}"}
            more = {"cache_salt": salt} if salt else {}
            answer = await harness.client.post("/v1/responses", json=body | more, headers=key)
            kept[name] = (f"/v1/responses/{answer.json()['id']}", key, more)

        async def found() -> list[str]:
            asked = {name: harness.client.get(at, headers=key, params=more) for name, (at, key, more) in kept.items()}
            return [name for name, asking in asked.items() if (await asking).status_code == 200]

        await harness.client.post("/v1/cache/flush", json=whose)
        before = await found()
        report = await harness.client.post("/v1/cache/flush", json=whose | {"responses": True})
        after = await found()

    assert before == ["one", "two", "salted"]
    assert after == stay
    assert report.json()["responses"] == 3 - len(stay)


async def test_a_namespace_does_not_say_whose_responses_are_meant() -> None:
    """It is a digest of the model and both salts."""
    async with administered() as (harness, _):
        answer = await harness.client.post("/v1/cache/flush", json={"namespace": "0" * 32, "responses": True})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "responses")


async def test_a_verification_goes_through_all_disks() -> None:
    """Call after call by its cursor: each chunk once, bad ones named, storage after storage."""
    async with administered(storages=("storage-0", "storage-1"), disk=["a", "b", "c"], bad={"b": "checksum"}) as (
        harness,
        cache,
    ):
        cursor: str | None
        cursor, reports = "", []
        while cursor is not None:
            body = {"cursor": cursor, "max_chunks": 2}
            reports.append((await harness.client.post("/v1/cache/verify", json=body)).json())
            cursor = reports[-1]["next_cursor"]

    assert [(r["storage"], r["checked"], r["nbytes"], r["bad"]) for r in reports] == [
        ("storage-0", 2, 2048, ["b: checksum"]), ("storage-0", 1, 1024, []),
        ("storage-1", 2, 2048, ["b: checksum"]), ("storage-1", 1, 1024, []),
    ]  # fmt: skip
    assert [call.after for call in cache.calls if isinstance(call, VerifyChunks)] == ["", "b", "", "b"]


async def test_one_storage_can_be_verified_alone() -> None:
    """Its own disk only; one that is not there is 404, and a cell without any has nothing to check."""
    async with administered(storages=("storage-0", "storage-1"), disk=["a"]) as (harness, cache):
        one = (await harness.client.post("/v1/cache/verify", json={"storage": "storage-1"})).json()
        none = await harness.client.post("/v1/cache/verify", json={"storage": "storage-7"})
        cache.storages = ()
        empty = (await harness.client.post("/v1/cache/verify")).json()

    assert (one["storage"], one["checked"], one["next_cursor"]) == ("storage-1", 1, None)
    assert refusal(none) == (404, "storage_not_found", "storage")
    assert (empty["storage"], empty["checked"], empty["next_cursor"]) == (None, 0, None)


async def test_prewarming_answers_for_each_prompt() -> None:
    """One token each, behind all others, under the caller's salt and a tenant of its own."""
    async with administered() as (harness, _):
        body = {"prompts": ["hello you", {"tokens": [5] * 8, "cache_salt": "s"},
                            {"messages": [{"role": "user", "content": "hi"}]}]}  # fmt: skip
        report = (await harness.client.post("/v1/cache/prewarm", json=body)).json()
        submitted = sorted(harness.cell.submitted, key=lambda request: request.prompt_tokens)

    assert (report["object"], report["failed"]) == ("cache.prewarm", 0)
    assert [warmed["index"] for warmed in report["data"]] == [0, 1, 2]
    assert report["data"][1]["prompt_tokens"] == 8
    assert report["data"][1]["prompt_tokens_details"]["device_tokens"] == 4
    assert {(request.priority, request.sampling.max_tokens, request.tenant) for request in submitted} == {
        (-1000, 1, "operator")
    }
    salted = [request for request in submitted if unpack_int32(request.prompt) == [5] * 8]
    assert [request.namespace for request in salted] == [namespace_digest(FACTS.fingerprint, salt="s")]
    assert [bool(request.key_id) for request in salted] == [True]
    assert harness.gateway.slots.used == 0


async def test_a_prompt_that_fails_stops_no_other() -> None:
    """Its error stands in its place."""
    async with running_gateway(admin_key=KEY) as harness, ScriptedCache(harness.cell.bus):
        headers = {"x-admin-key": KEY}
        body = {"prompts": [{"tokens": [5] * 8}, {"tokens": [6] * 8}]}
        asking = asyncio.create_task(harness.client.post("/v1/cache/prewarm", json=body, headers=headers))
        await harness.cell.until(lambda: len(harness.cell.submitted) == 2)
        bad, good = sorted(harness.cell.submitted, key=lambda request: request.prompt)
        await harness.cell.refuse(bad, "queue_full", 500)
        await harness.cell.emit(good, [(7, "x")], finish="length")
        report = (await asking).json()

    assert report["failed"] == 1
    assert report["data"][0]["error"]["code"] == "queue_full"
    assert report["data"][1]["prompt_tokens_details"]["cached_tokens"] == 6


async def test_a_client_that_leaves_ends_its_prewarming() -> None:
    """What it had under way is cancelled, and no further prompt begins."""
    async with running_gateway(admin_key=KEY, over_http=True) as harness, ScriptedCache(harness.cell.bus):
        body = {"prompts": [{"tokens": [number] * 8} for number in range(5, 15)]}
        asking = asyncio.create_task(harness.client.post("/v1/cache/prewarm", json=body, headers={"x-admin-key": KEY}))
        await harness.cell.until(lambda: len(harness.cell.submitted) == 4)
        asking.cancel()
        await harness.cell.until(lambda: len(harness.cell.cancelled) == 4)
        await until(lambda: not harness.gateway.slots.used)

        assert len(harness.cell.submitted) == 4


async def test_a_silent_scheduler_is_503() -> None:
    """With Retry-After, on every endpoint that asks it."""
    calls: list[tuple[str, str, object]] = [
        ("GET", "cache", None), ("GET", "cache/stats", None), ("GET", "cache/divergences", None),
        ("GET", "cache/pins", None), ("POST", "cache/pins", {"tokens": [5] * 40}), ("DELETE", "cache/pins/p", None),
        ("POST", "cache/flush", {}), ("POST", "cache/verify", {}), ("POST", "cache/prewarm", {"prompts": ["x"]}),
        ("GET", "cell", None),
    ]  # fmt: skip
    async with running_gateway(says("x"), admin_key=KEY) as harness:
        for method, path, body in calls:
            response = await harness.client.request(method, f"/v1/{path}", json=body, headers={"x-admin-key": KEY})

            assert refusal(response)[:2] == (503, "service_unavailable"), path
            assert int(response.headers["retry-after"]) >= 1


async def test_calls_of_operators_are_bounded() -> None:
    """One too many at the same time is 429; the API's own places are not touched."""
    async with administered(folds=False) as (harness, _):
        waiting = {asyncio.create_task(harness.client.post("/v1/cache/flush")) for _ in range(9)}
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        used = harness.gateway.slots.used
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    assert [refusal(task.result())[:2] for task in done] == [(429, "too_many_requests")]
    assert used == 0


@pytest.mark.parametrize("schema", [PinRequest, PrewarmRequest, FlushRequest, VerifyRequest, Pin, CacheNode])
def test_the_reference_names_every_field(schema: type[msgspec.Struct]) -> None:
    """Of the administration's requests, and of what is listed."""
    text = REFERENCE.read_text(encoding="utf-8").partition("## Administration of the cache")[2].partition("\n## ")[0]
    fields = [field for field in schema.__struct_fields__ if field != "object"]

    assert [field for field in fields if f"`{field}`" not in text] == []
