"""A hot prefix that was pushed out to host memory returns to the device before anybody asks for it (HotPrefix 3.4)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer
from tests.reference import Reference

PAGE_SIZE = 16
DEVICE_PAGES = 64
DOCUMENT_TOKENS = 320


class Promoting:
    """A cell, its reference, and prompts."""

    def __init__(self, cell: Cell, reference: Reference) -> None:
        self.cell, self.reference = cell, reference
        self._rng = random.Random(11)

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(8, VOCAB_SIZE) for _ in range(count)]

    async def ask(self, start: list[int], count: int, max_tokens: int = 6) -> dict[str, Any]:
        """Ask ``start`` and ``count`` more tokens, and compare; returns the usage details."""
        prompt = self.reference.decided(lambda: start + self.tokens(count), max_tokens)
        answer = await self.cell.complete(prompt, max_tokens)
        assert answer["choices"][0]["token_ids"] == self.reference.greedy(prompt, max_tokens)
        details: dict[str, Any] = answer["usage"]["prompt_tokens_details"]
        return details

    async def push_out(self) -> None:
        """Ask for other things until the device holds nothing else; what was there before is in host memory."""
        for _ in range(3):
            await self.ask([], 600, 2)
            await self.cell.settle()

    async def promoted_pages(self) -> int:
        return (await self.cell.inventory()).counters.get("pages_promoted", 0)


@pytest.mark.integration
async def test_a_hot_prefix_comes_back_unasked(checkpoints: Checkpoints, nats_server: NatsServer) -> None:
    """A document was asked about four times, and then about other things until the device forgot it. After a batch of
    others it is promoted; the next request on it finds it on the device and answers exactly.
    """
    model, reference = checkpoints["llama"]
    worker = {"page_size": PAGE_SIZE, "device_pages": DEVICE_PAGES}
    scheduler = {"promotion": "hotness", "policy": "lru"}
    async with running_cell(nats_server.url, model, worker_settings=worker, scheduler_settings=scheduler) as cell:
        run = Promoting(cell, reference)
        document = run.tokens(DOCUMENT_TOKENS)
        for _ in range(4):
            await run.ask(document, 9)
        await run.push_out()
        async with asyncio.timeout(60):
            while not await run.promoted_pages():
                await run.ask([], 40)  # Each prefill batch is an occasion to promote.
        await run.cell.settle()
        loaded = (await run.cell.inventory()).counters["pages_loaded"]
        usage = await run.ask(document, 9)
        counters = (await run.cell.inventory()).counters

    assert usage["device_tokens"] == DOCUMENT_TOKENS
    assert usage["host_tokens"] == 0
    assert counters["pages_loaded"] == loaded
    assert counters["pages_promoted"] >= DOCUMENT_TOKENS // PAGE_SIZE
    assert counters["promotions_failed"] == 0
