"""The administration of the cache over HTTP, on a whole cell."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer

pytestmark = pytest.mark.integration

KEY = "an-admin-key-of-some-length"
API_KEY = "an-ordinary-key"
PAGE_SIZE, PAGES = 16, 64
PAGE_BYTES = 3 * 2 * PAGE_SIZE * 2 * 16 * 4


async def call(cell: Cell, method: str, path: str, body: object = None) -> dict[str, Any]:
    """An answer of the administration."""
    response = await cell.http.request(method, f"/v1/cache{path}", json=body, headers={"x-admin-key": KEY})
    assert response.status_code == httpx.codes.OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_operators_see_keep_warm_and_empty_the_cache(checkpoints: Checkpoints, nats_server: NatsServer) -> None:
    """A pin survives what a flush drops elsewhere, a prewarmed prompt is hit, and callers' keys open none of it."""
    chance = random.Random(6)
    document, question, warmed = ([chance.randrange(8, VOCAB_SIZE) for _ in range(n)] for n in (128, 8, 64))
    model, _ = checkpoints["llama"]
    async with running_cell(
        nats_server.url,
        model,
        worker_settings={"page_size": PAGE_SIZE, "device_pages": PAGES},
        scheduler_settings={"policy": "lru", "host_writes": "through"},
        gateway_settings={"admin_key": KEY, "api_keys": (API_KEY,)},
        host_kv_bytes=PAGES * (PAGE_BYTES + 64),
    ) as cell:
        cell.http.headers["authorization"] = f"Bearer {API_KEY}"
        await cell.complete(document, 2)
        await cell.settle()
        refused = await cell.http.get("/v1/cache")
        pin = await call(cell, "POST", "/pins", {"tokens": document, "ttl_s": 600, "name": "document"})
        prewarmed = await call(cell, "POST", "/prewarm", {"prompts": [{"tokens": [*warmed, 9]}, {"tokens": document}]})
        await cell.settle()
        hit = await cell.complete([*warmed, 10], 2)
        await cell.settle()
        nodes = await call(cell, "GET", "")
        flushed = await call(cell, "POST", "/flush")
        await cell.settle()
        kept = await cell.complete([*document, *question], 2)
        await cell.settle()
        stats = await call(cell, "GET", "/stats")
        pins = await call(cell, "GET", "/pins")
        unpinned = await call(cell, "DELETE", "/pins/document")
        await call(cell, "POST", "/flush", {"tiers": ["device", "host"]})
        await cell.settle()
        gone = await cell.complete([*document, *question], 2)
        scrubbed = await call(cell, "POST", "/verify")

    assert refused.status_code == 401
    assert (pin["name"], pin["held_tokens"]) == ("document", 128)
    assert (prewarmed["failed"], prewarmed["data"][0]["prompt_tokens"]) == (0, 65)
    assert prewarmed["data"][1]["prompt_tokens_details"]["device_tokens"] == 112
    assert hit["usage"]["prompt_tokens_details"]["device_tokens"] == 64
    heads = {tuple(node["head"]): node["pins"] for node in nodes["data"]}
    assert heads[tuple(document[:16])] == ["document"]
    assert heads[tuple(warmed[:16])] == []
    assert flushed["device_pages"] > 0
    assert kept["usage"]["prompt_tokens_details"]["host_tokens"] == 128
    assert stats["hit_tokens"]["host"] >= 128
    assert (stats["pins"], len(pins["data"])) == (1, 1)
    assert unpinned["deleted"] is True
    assert gone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert (scrubbed["checked"], scrubbed["bad"], scrubbed["next_cursor"]) == (0, [], None)
