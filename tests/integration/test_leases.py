"""Leases on a whole cell: what a session keeps is there when it comes back, and usage says so."""

from __future__ import annotations

import random
import time

import pytest

from tests.cell import running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer

pytestmark = pytest.mark.integration

KEY = "an-admin-key-of-some-length"
PAGE_SIZE, PAGES = 16, 32
PAGE_BYTES = 3 * 2 * PAGE_SIZE * 2 * 16 * 4


async def test_a_session_comes_back_to_what_it_leased(checkpoints: Checkpoints, nats_server: NatsServer) -> None:
    """Both pools are filled by others meanwhile, twice over; what nobody leased is gone."""
    chance = random.Random(8)
    prompts = [[chance.randrange(8, VOCAB_SIZE) for _ in range(128)] for _ in range(18)]
    leased, other, *filler = prompts
    async with running_cell(
        nats_server.url,
        checkpoints["llama"][0],
        worker_settings={"page_size": PAGE_SIZE, "device_pages": PAGES},
        scheduler_settings={"policy": "lru", "pin_fraction": 0.5},
        gateway_settings={"admin_key": KEY, "max_leased_tokens": 256},
        host_kv_bytes=PAGES * (PAGE_BYTES + 64),
    ) as cell:

        async def ask(tokens: list[int], **fields: object) -> dict[str, object]:
            body = {"prompt": tokens, "max_tokens": 2, **fields}
            answer = await cell.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            await cell.settle()
            usage: dict[str, object] = answer.json()["usage"]
            return usage

        asked_s = time.time()
        first = await ask(leased, prompt_cache_key="session", prompt_cache_retention="24h")
        refused = await ask([*other, *leased, *other], prompt_cache_key="too-long", prompt_cache_retention="24h")
        for tokens in filler:
            await ask(tokens)
        listed = (await cell.http.get("/v1/cache/leases", headers={"x-admin-key": KEY})).json()["data"]
        back = await ask([*leased, 5], cache={"returns_in_s": 2.5})
        gone = await ask([*other, 5])

    lease = first["cache_lease"]
    assert isinstance(lease, dict)
    assert (lease["granted_tokens"], lease["refused"]) == (128, None)
    assert asked_s + 86_000 < lease["expires_at"] < asked_s + 87_000
    assert refused["cache_lease"] == {"granted_tokens": 0, "expires_at": None, "refused": "over_budget"}
    assert [(each["key"], each["tokens"]) for each in listed] == [("session", 128)]
    assert _details(first) == (0, 0, 128)
    assert _details(back) == (0, 128, 1)
    assert _details(gone)[:2] == (0, 0)


def _details(usage: dict[str, object]) -> tuple[int, int, int]:
    """Tokens found on the device and in host memory, and those that were written."""
    details = usage["prompt_tokens_details"]
    assert isinstance(details, dict)
    return details["device_tokens"], details["host_tokens"], details["cache_write_tokens"]
