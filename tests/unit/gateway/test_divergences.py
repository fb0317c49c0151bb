"""Where prompts leave the cache, over HTTP: who is told what, and for how long it is known in which message."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from services.gateway.keys import key_hash
from services.gateway.tenant_file import write_tenants
from services.gateway.tenants import Tenant
from shared import subjects
from shared.codec import decode, encode
from shared.messages.base import pack_int32
from shared.messages.explanations import (
    Admission,
    Admissions,
    CostlyPoint,
    DivergencePoint,
    Divergences,
    GetAdmissions,
    GetDivergences,
)
from tests.unit.gateway.running_gateway import Harness, running_gateway, says, tokenizer

KEY = "an-admin-key-of-some-length"
ADMIN = {"x-admin-key": KEY}
SYSTEM = "You are the harbour office. It is now 12:05. Answer briefly."
BODY = {
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}],
    "explain": True,
}


@contextlib.asynccontextmanager
async def diverging(**settings: Any) -> AsyncIterator[Harness]:
    """A gateway whose scheduler says that every prompt leaves the cache in the minutes of SYSTEM's time."""
    async with running_gateway(says("hello you"), admin_key=KEY, **settings) as harness:

        async def admissions(data: bytes) -> bytes:
            call = decode(data, GetAdmissions)
            return encode(Admissions(admissions=tuple(map(admission, call.request_ids))))

        async def divergences(data: bytes) -> bytes:
            call = decode(data, GetDivergences)
            points = [
                CostlyPoint(
                    namespace="0" * 32, point=a_point(), requests=n, lost_tokens=100 - n, lost_us=0, error_tokens=0,
                    request_id="r", at_ns=10**18,
                )
                for n in range(20)
            ]  # fmt: skip
            return encode(Divergences(since_ns=10**18, points=tuple(points[: call.most])))

        serving = [
            await harness.cell.bus.serve(subjects.rpc("scheduler", name), answer)
            for name, answer in (("admissions", admissions), ("divergences", divergences))
        ]
        yield harness
        for each in serving:
            await each.close()


def a_point() -> DivergencePoint:
    tokens = tokenizer().encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}])
    at = next(n for n in range(len(tokens)) if tokenizer().decode(tokens[: n + 1]).endswith("12:05"))
    other = [*tokens[:at], *tokenizer().encode_now("4. Answer briefly.", add_special_tokens=False)]
    return DivergencePoint(
        kind="diverged", position=at, page_start=at // 4 * 4, page_size=4, before=pack_int32(tokens[:at]),
        prompt=pack_int32(tokens[at:]), cached=pack_int32(other[at:]), lost_tokens=30, lost_us=4500,
    )  # fmt: skip


def admission(name: str) -> Admission:
    return Admission(
        request_id=name, attempt=1, worker_id="worker-0", accepted_ns=1, admitted_ns=2, point=a_point()
    )  # fmt: skip


async def chat(harness: Harness, **headers: str) -> Any:
    answer = await harness.client.post("/v1/chat/completions", json=BODY, headers=headers)
    return answer.json()["explanation"]


async def test_the_admin_key_is_told_both_sides_and_others_their_own() -> None:
    """With an answer and afterwards; the message is known for as long as it was looked up while it ran."""
    async with diverging() as harness:
        own = await chat(harness)
        seen = await chat(harness, **ADMIN)
        path = f"/v1/requests/{seen['request_id']}/explain"
        later = (await harness.client.get(path, headers=ADMIN)).json()
        later_own = (await harness.client.get(path)).json()
        plain = await harness.client.post("/v1/chat/completions", json=BODY | {"explain": False})
        unasked = (await harness.client.get(f"/v1/requests/{plain.json()['id']}/explain", headers=ADMIN)).json()

    told = seen["divergence"]
    assert (told["message"], told["role"], told["part"], told["cause"]) == (0, "system", "message", "date_or_time")
    assert told["cached"].startswith("4. Answer") or told["cached"].startswith("04. Answer")
    assert (told["lost_tokens"], told["lost_ms"]) == (30, 4.5)
    assert (own["divergence"]["cached"], own["divergence"]["lost_tokens"]) == (None, None)
    assert own["divergence"]["token"] % 4 == 0
    assert (own["divergence"]["message"], own["divergence"]["role"]) == (0, "system")
    assert (later["divergence"], later_own["divergence"]["cached"]) == (told, None)
    assert unasked["divergence"]["message"] is None
    assert unasked["divergence"]["cause"] == "date_or_time"


async def test_a_streams_explanation_knows_the_message_too() -> None:
    """The conversation is there until the last chunk is written."""
    async with diverging() as harness:
        stream = await harness.client.post("/v1/chat/completions", json=BODY | {"stream": True}, headers=ADMIN)

    chunks = [msgspec.json.decode(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    told = chunks[-1]["explanation"]["divergence"]
    assert (told["message"], told["role"], told["cause"]) == (0, "system", "date_or_time")


async def test_a_tenant_with_a_cache_of_its_own_is_told_all_of_it(tmp_path: Path) -> None:
    """One that shares its salt with another is not, nor is the holder of a mere API key."""
    tenants = {
        name: Tenant(salt=salt * 16, keys=(key_hash(f"key-{name}".encode()),))
        for name, salt in (("alone", "a"), ("one", "b"), ("two", "b"))
    }
    file = tmp_path / "tenants.toml"
    write_tenants(file, tenants)
    async with diverging(tenants=str(file), api_keys=["key-none"]) as harness:
        told = {
            name: (await chat(harness, authorization=f"Bearer key-{name}"))["divergence"]["cached"] is not None
            for name in ("alone", "one", "two", "none")
        }

    assert told == {"alone": True, "one": False, "two": False, "none": False}


async def test_an_answer_that_is_over_leaves_nothing_of_its_conversation() -> None:
    """The gateway keeps no prompt for those who may ask later."""
    async with diverging() as harness:
        explained = await chat(harness)
        known = harness.gateway.recent.find(explained["request_id"])

    assert known is not None
    assert known.conversation is None
    assert all("harbour" not in repr(place) for place in known.places.values())


async def test_the_cells_divergences_are_for_its_operators() -> None:
    """Ten unless more are asked for, with text as the listing of the tree has it."""
    async with diverging(api_keys=["one"]) as harness:
        closed = await harness.client.get("/v1/cache/divergences", headers={"authorization": "Bearer one"})
        opened = (await harness.client.get("/v1/cache/divergences", headers=ADMIN)).json()
        few = (await harness.client.get("/v1/cache/divergences", params={"limit": 3}, headers=ADMIN)).json()
        wrong = await harness.client.get("/v1/cache/divergences", params={"limit": 65}, headers=ADMIN)

    assert closed.status_code == 401
    assert (len(opened["data"]), len(few["data"]), wrong.status_code) == (10, 3, 400)
    assert (opened["data"][0]["lost_tokens"], opened["data"][0]["cause"]) == (100, "date_or_time")
    assert opened["since_ms"] == 10**12
