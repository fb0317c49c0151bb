"""Tenants at a gateway with its real routes: limits, headers, changes of the file, and namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import openai
import pytest

from services.gateway import callers
from services.gateway.keys import key_hash
from services.gateway.tenant_file import write_tenants
from services.gateway.tenants import Tenant
from shared.ids import key_digest
from shared.messages.cell_events import FlushCache
from shared.messages.requests import CacheQuota
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.unit.gateway.scripted_cache import ScriptedCache
from tests.waiting import until

ADMIN = {"x-admin-key": "an-admin-key-of-some-length"}
SALTS = {"a": "salt-of-tenant-a-0", "b": "salt-of-tenant-b-0"}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


def file_of(folder: Path, **limits: Mapping[str, int]) -> str:
    """A file of the tenants a and b."""
    path = folder / "tenants.toml"
    tenants = {
        name: Tenant(salt=salt, keys=(key_hash(f"key-of-{name}".encode()),), **limits.get(name, {}))
        for name, salt in SALTS.items()
    }
    write_tenants(path, tenants)
    return str(path)


def stands_still() -> float:
    """A clock by which no limit grows again."""
    return 1000.0


async def started(harness: Harness, count: int) -> None:
    await harness.cell.until(lambda: len(harness.cell.submitted) >= count)


async def test_beyond_its_rate_a_tenant_gets_429_and_others_do_not(tmp_path: Path) -> None:
    """In OpenAI's shape, with Retry-After and x-ratelimit headers; who has no limit is told none."""
    tenants = file_of(tmp_path, a={"requests_per_minute": 2})
    async with running_gateway(says("x"), tenants=tenants, limits_clock=stands_still) as harness:
        answers = [await harness.client.post("/v1/completions", json={"prompt": "hi"}, headers=key("a")) for _ in "123"]
        free = await harness.client.get("/v1/models", headers=key("a"))
        other = await harness.client.post("/v1/completions", json={"prompt": "hi"}, headers=key("b"))
        stranger = await harness.client.post("/v1/completions", json={"prompt": "hi"}, headers=key("c"))

    assert [answer.status_code for answer in (*answers, free, other, stranger)] == [200, 200, 429, 200, 200, 401]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    refused = answers[2]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]


async def test_openais_client_takes_it_for_its_own_rate_limit(tmp_path: Path) -> None:
    """The exception that its users catch, with the headers that they read."""
    tenants = file_of(tmp_path, a={"requests_per_minute": 1})
    async with (
        running_gateway(says("x"), over_http=True, tenants=tenants, limits_clock=stands_still) as harness,
        openai.AsyncOpenAI(base_url=f"{harness.base_url}/v1", api_key="key-of-a", max_retries=0) as client,
    ):
        answered = await client.completions.with_raw_response.create(model="test-model", prompt="hi")
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="test-model", prompt="hi")

    assert answered.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] == "60"


async def test_tokens_of_prompts_and_answers_count_once_each(tmp_path: Path) -> None:
    """A prompt is paid for before it is submitted, an answer at its end; a refused request reaches no cell."""
    tenants = file_of(tmp_path, a={"tokens_per_minute": 1000})
    async with running_gateway(says("one two three"), tenants=tenants, limits_clock=stands_still) as harness:
        first = await harness.client.post("/v1/completions", json={"prompt": [5] * 400, "n": 2}, headers=key("a"))
        usage = first.json()["usage"]
        second = await harness.client.post("/v1/completions", json={"prompt": [5] * 400}, headers=key("a"))
        third = await harness.client.post("/v1/completions", json={"prompt": [5] * 400}, headers=key("a"))
        submitted = len(harness.cell.submitted)

    assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
    left = 1000 - 400 - usage["completion_tokens"]
    assert first.headers["x-ratelimit-remaining-tokens"] == str(left)
    left -= 400 + second.json()["usage"]["completion_tokens"]
    assert second.headers["x-ratelimit-remaining-tokens"] == str(left)
    assert "tokens per minute" in third.json()["error"]["message"]
    assert int(third.headers["retry-after"]) > 0
    assert submitted == 3


@pytest.mark.parametrize(("n", "code", "left"), [(1, "queue_full", 1000), (2, "queue_full", 1000), (2, "", 600)])
async def test_a_prompt_that_the_cell_has_no_room_for_costs_nothing(
    tmp_path: Path, n: int, code: str, left: int
) -> None:
    """Else a client that tries again, as it is told to, runs out of its tokens; a client that goes pays."""
    tenants = file_of(tmp_path, a={"tokens_per_minute": 1000})
    async with running_gateway(tenants=tenants, limits_clock=stands_still) as harness:
        account = harness.gateway.callers.account("a")
        assert account is not None
        body = {"prompt": [5] * 400, "n": n}
        asking = asyncio.create_task(harness.client.post("/v1/completions", json=body, headers=key("a")))
        await started(harness, n)
        spent = account.headers()["x-ratelimit-remaining-tokens"]
        if code:
            await harness.cell.refuse(harness.cell.submitted[-1], code, 500)
            refused = await asking
            assert refused.status_code == 429
            assert refused.headers["x-ratelimit-remaining-tokens"] == str(left)
        else:
            asking.cancel()
        await until(lambda: account.in_progress == 0)

    assert spent == "600"
    assert account.headers()["x-ratelimit-remaining-tokens"] == str(left)


async def test_texts_that_are_only_tokenised_count_for_the_tenant(tmp_path: Path) -> None:
    """In tokens, and while they are worked on as requests in progress: the work is that of a prompt."""
    tenants = file_of(tmp_path, a={"tokens_per_minute": 1000, "max_concurrent": 1})
    async with running_gateway(tenants=tenants, limits_clock=stands_still) as harness:
        account = harness.gateway.callers.account("a")
        assert account is not None
        told = await harness.client.post("/detokenize", json={"tokens": [5] * 400}, headers=key("a"))
        made = await harness.client.post("/tokenize", json={"prompt": told.json()["prompt"]}, headers=key("a"))
        account.take(1)
        busy = [
            await harness.client.post("/tokenize", json={"prompt": "x"}, headers=key("a")),
            await harness.client.post("/detokenize", json={"tokens": [5]}, headers=key("a")),
        ]
        account.give_back(1)

    assert told.headers["x-ratelimit-remaining-tokens"] == "600"
    assert made.headers["x-ratelimit-remaining-tokens"] == str(600 - made.json()["count"])
    assert [answer.status_code for answer in busy] == [429, 429]
    assert account.in_progress == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_in_progress_are_bounded_for_each_tenant(tmp_path: Path, stream: bool) -> None:
    """And free again with the answer, or with the client's leaving."""
    tenants = file_of(tmp_path, a={"max_concurrent": 2})
    body = {"prompt": "hi", "n": 2, "stream": stream}
    async with running_gateway(over_http=True, tenants=tenants) as harness:
        running = asyncio.create_task(harness.client.post("/v1/completions", json=body, headers=key("a")))
        await started(harness, 2)
        refused = await harness.client.post("/v1/completions", json={"prompt": "hi"}, headers=key("a"))
        for request in harness.cell.submitted[:2]:
            await harness.cell.emit(request, [(5, "x")], finish="stop")
        answered = await running
        account = harness.gateway.callers.account("a")
        assert account is not None
        await until(lambda: account.in_progress == 0)
        never = await harness.client.post("/v1/completions", json={"prompt": "hi", "n": 3}, headers=key("a"))

        assert (answered.status_code, refused.status_code) == (200, 429)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert account.in_progress == harness.gateway.slots.used == 0


async def test_a_priority_is_bounded_for_each_caller(tmp_path: Path) -> None:
    """By its tenant, or by the gateway for those without: else whoever asks for the highest is always first."""
    tenants = file_of(tmp_path, a={"max_priority": 10}, b={})
    found = {}
    async with running_gateway(says("x"), tenants=tenants, api_keys=["plain"], max_priority=3) as harness:
        for caller, headers in (("a", key("a")), ("b", key("b")), ("plain", {"authorization": "Bearer plain"})):
            for priority in (-5, 0, 3, 10, 11):
                body = {"prompt": "hi", "priority": priority}
                answer = await harness.client.post("/v1/completions", json=body, headers=headers)
                found[caller, priority] = answer.status_code
                if answer.status_code != 200:
                    assert answer.json()["error"]["code"] == "priority_too_high"

    highest = {caller: max(asked for (who, asked), status in found.items() if who == caller and status == 200)
               for caller in ("a", "b", "plain")}  # fmt: skip
    assert highest == {"a": 10, "b": 0, "plain": 3}
    assert all(found[caller, -5] == 200 for caller in highest)


async def test_the_cell_is_told_whose_a_request_is_and_how_many_may_wait(tmp_path: Path) -> None:
    """The scheduler shares its queue out by the tenant, and bounds what waits of it."""
    tenants = file_of(tmp_path, b={"max_queued": 7})
    async with running_gateway(says("x"), tenants=tenants) as harness:
        for name in SALTS:
            await harness.client.post("/v1/completions", json={"prompt": "hi"}, headers=key(name))
        first, second = harness.cell.submitted

    assert [(request.tenant, request.max_queued) for request in (first, second)] == [("a", 0), ("b", 7)]


async def test_the_cell_is_told_what_a_tenants_cache_may_take(tmp_path: Path) -> None:
    """With each of its requests, bounds or none, and with those that an operator warms its cache by."""
    tenants = file_of(tmp_path, b={"device_bytes": 5, "disk_bytes": 2**60})
    async with (
        running_gateway(says("x"), tenants=tenants, admin_key=ADMIN["x-admin-key"]) as harness,
        ScriptedCache(harness.cell.bus),
    ):
        for name in SALTS:
            await harness.client.post("/v1/completions", json={"prompt": "hi", "cache_salt": "s"}, headers=key(name))
        warmed = {"prompts": [{"tokens": [5, 6], "tenant": "b"}]}
        await harness.client.post("/v1/cache/prewarm", json=warmed, headers=ADMIN)
        first, second, third = harness.cell.submitted

    quota = CacheQuota(owner=key_digest(SALTS["b"]), device_bytes=5, disk_bytes=2**60)
    assert [(request.tenant, request.quota) for request in (first, second, third)] == [
        ("a", CacheQuota(owner=key_digest(SALTS["a"]))),
        ("b", quota),
        ("operator", quota),
    ]


async def test_no_two_tenants_share_a_namespace_whatever_they_send(tmp_path: Path) -> None:
    """Not with the other's salt as their own; and one key encrypts all of a tenant."""
    salts = [None, SALTS["a"], SALTS["b"], "x"]
    async with running_gateway(says("x"), tenants=file_of(tmp_path), api_keys=["key-of-plain"]) as harness:
        for name in ("a", "b", "plain"):
            for salt in salts:
                extra = {} if salt is None else {"cache_salt": salt}
                await harness.client.post("/v1/completions", json={"prompt": "hi", **extra}, headers=key(name))
        requests = harness.cell.submitted

    assert len({request.namespace for request in requests}) == len(requests) == 12
    assert {request.key_id for request in requests[:4]} == {key_digest(SALTS["a"])}
    assert {request.key_id for request in requests[4:8]} == {key_digest(SALTS["b"])}


async def test_a_change_of_the_file_is_taken_while_requests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revoked key opens nothing more, and what it has begun is answered."""
    monkeypatch.setattr(callers, "CHECK_EVERY_S", 0.01)
    tenants = file_of(tmp_path)
    async with running_gateway(tenants=tenants) as harness:
        running = asyncio.create_task(harness.client.post("/v1/completions", json={"prompt": "hi"}, headers=key("a")))
        await started(harness, 1)
        write_tenants(
            Path(tenants), {"b": Tenant(salt=SALTS["b"], keys=(key_hash(b"key-of-b"), key_hash(b"key-of-n")))}
        )
        await until(lambda: harness.gateway.callers.account("a") is None)
        codes = [(await harness.client.get("/v1/models", headers=key(name))).status_code for name in ("a", "b", "n")]
        await harness.cell.emit(harness.cell.submitted[0], [(5, "x")], finish="stop")

        assert (await running).status_code == 200
        assert codes == [401, 200, 200]


async def test_the_administration_works_in_a_tenants_namespace(tmp_path: Path) -> None:
    """What is prewarmed, pinned or flushed for a tenant is what the tenant's requests find; no limit is spent on it."""
    tenants = file_of(tmp_path, a={"requests_per_minute": 1, "max_queued": 1})
    async with (
        running_gateway(says("x"), tenants=tenants, admin_key=ADMIN["x-admin-key"]) as harness,
        ScriptedCache(harness.cell.bus) as cache,
    ):
        client = harness.client
        asked = {"prompt": [5, 6], "cache_salt": "s"}
        own = await client.post("/v1/completions", json=asked, headers=key("a"))
        source = {"tokens": [5, 6], "cache_salt": "s", "tenant": "a"}
        warmed = await client.post("/v1/cache/prewarm", json={"prompts": [source]}, headers=ADMIN)
        pinned = await client.post("/v1/cache/pins", json=source, headers=ADMIN)
        await client.post("/v1/cache/flush", json={"tenant": "a", "cache_salt": "s"}, headers=ADMIN)
        missing = await client.post("/v1/cache/flush", json={"tenant": "nobody"}, headers=ADMIN)
        both = await client.get("/v1/cache", params={"tenant": "a", "namespace": "ab" * 16}, headers=ADMIN)
        first, second = harness.cell.submitted
        flushed = [order for order in cache.orders if isinstance(order, FlushCache)]

    assert (own.status_code, warmed.json()["failed"]) == (200, 0)
    assert (second.tenant, second.max_queued, second.key_id) == ("operator", 0, key_digest(SALTS["a"]))
    assert first.namespace == second.namespace == pinned.json()["namespace"] == flushed[0].namespace
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "tenant_not_found")
    assert (both.status_code, both.json()["error"]["param"]) == (400, "tenant")
