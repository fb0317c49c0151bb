"""Leases over HTTP: what reaches the cell, and what usage says of them."""

from typing import Any

import msgspec

from shared.messages.requests import Lease, SubmitRequest
from shared.messages.tokens import Usage
from shared.messages.worker_plans import LeaseGrant
from tests.unit.gateway.running_gateway import Harness, running_gateway, says

CHAT = "/v1/chat/completions"
GRANT = LeaseGrant(tokens=6, expires_ns=1_700_000_300 * 10**9 + 5)
MARKED = {"type": "text", "text": "A long document.", "cache_control": {"type": "ephemeral"}}


async def ask(gateway: Harness, path: str, body: dict[str, Any]) -> tuple[SubmitRequest, dict[str, Any]]:
    """What the cell got of a request, and the usage in its answer."""
    answer = await gateway.client.post(path, content=msgspec.json.encode(body))
    assert answer.status_code == 200, answer.text
    return gateway.cell.submitted[-1], answer.json()["usage"]


async def test_breakpoints_reach_the_cell_with_the_budget_of_their_tenant() -> None:
    """And usage says how many tokens are kept, and until when."""
    async with running_gateway(says(" the"), max_leased_tokens=77) as gateway:
        gateway.cell.usage = Usage(device_tokens=2, host_tokens=1, leases=(GRANT, LeaseGrant(refusal="over_budget")))
        body = {"messages": [{"role": "user", "content": [MARKED]}], "prompt_cache_key": "s"}

        submitted, usage = await ask(gateway, CHAT, body)

    breakpoint_lease, session = submitted.cache.leases
    assert 0 < breakpoint_lease.tokens < session.tokens == submitted.prompt_tokens
    assert (session.key, submitted.cache.max_leased_tokens) == ("s", 77)
    assert usage["cache_lease"] == {"granted_tokens": 6, "expires_at": 1_700_000_300, "refused": "over_budget"}
    assert usage["prompt_tokens_details"]["cache_write_tokens"] == submitted.prompt_tokens - 3


async def test_a_request_that_says_nothing_of_caching_asks_for_nothing() -> None:
    """Its message is what it was before there were leases, and so is its usage."""
    async with running_gateway(says(" the")) as gateway:
        submitted, usage = await ask(gateway, CHAT, {"messages": [{"role": "user", "content": "Hi"}]})

    assert (submitted.cache.leases, submitted.cache.max_leased_tokens) == ((), 0)
    assert "cache_lease" not in usage


async def test_only_the_first_of_several_choices_leases() -> None:
    """A prompt is kept once."""
    async with running_gateway(says(" the")) as gateway:
        await ask(gateway, "/v1/completions", {"prompt": "Hello there", "n": 2, "prompt_cache_key": "k"})
        leases = [submitted.cache.leases for submitted in gateway.cell.submitted]

    assert leases == [(Lease(tokens=leases[0][0].tokens, ttl_ms=300_000, key="k", with_answer=True),), ()]


async def test_what_is_not_written_is_not_counted_as_written() -> None:
    """With ``cache.write`` false the request adds nothing to the cache."""
    async with running_gateway(says(" the")) as gateway:
        _, usage = await ask(gateway, "/v1/completions", {"prompt": "Hello there", "cache": {"write": False}})

    assert usage["prompt_tokens_details"]["cache_write_tokens"] == 0


async def test_senseless_wishes_are_refused() -> None:
    """Too many breakpoints, a key that is too long, and a return in the past are 400."""
    bodies = [
        {"messages": [{"role": "user", "content": [MARKED] * 5}]},
        {"messages": [{"role": "user", "content": "Hi"}], "prompt_cache_key": "k" * 257},
        {"messages": [{"role": "user", "content": "Hi"}], "prompt_cache_retention": "1y"},
        {"messages": [{"role": "user", "content": "Hi"}], "cache": {"returns_in_s": -1}},
    ]
    async with running_gateway(says(" the")) as gateway:
        answers = [await gateway.client.post(CHAT, content=msgspec.json.encode(body)) for body in bodies]

    assert [answer.status_code for answer in answers] == [400] * 4
