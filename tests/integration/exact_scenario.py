"""What a cell's greedy answers are asked to survive: prefix hits, mixed batches, the host tier and preemption."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.cell import Cell
from tests.checkpoints import VOCAB_SIZE
from tests.cold_runs import ColdRuns
from tests.reference import Reference

DEVICE_TOKENS = 320
DOCUMENT_TOKENS = 140
OUTGROWING_TOKENS = 140
"""Answers of which any two are too long for the device."""
SCHEDULER = {"max_batch_tokens": 48, "lease_tokens": 16, "max_running": 8, "policy": "lru"}
"""By recency the document leaves the device whatever came before; the default policy may keep it there for its use."""


class Scenario:
    """One cell, its reference, and prompts that share documents."""

    def __init__(self, cell: Cell, reference: Reference | ColdRuns, page_size: int) -> None:
        self.cell, self.reference, self.page_size = cell, reference, page_size
        # The same prompts at every page size: Hugging Face generates them once a family, and only the size differs.
        self._rng = random.Random(16)

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(8, VOCAB_SIZE) for _ in range(count)]

    async def prompt(self, start: list[int], count: int, max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """``start`` and ``count`` more tokens, to which rounding decides no token of the answer.

        It is looked for in a thread: the cell lives on this one.
        """
        return await asyncio.to_thread(
            self.reference.decided, lambda: start + self.tokens(count), max_tokens, ignore_eos=ignore_eos
        )

    async def ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Ask and compare; returns the usage details."""
        answer = await self.cell.complete(prompt, max_tokens)
        assert answer["choices"][0]["token_ids"] == self.reference.greedy(prompt, max_tokens)
        details: dict[str, Any] = answer["usage"]["prompt_tokens_details"]
        return details

    async def ask_together(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Ask in one request for answers to all, each of ``max_tokens``, and compare."""
        answer = await self.cell.complete(prompts, max_tokens, ignore_eos=True)
        found = [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
        assert found == [self.reference.greedy(prompt, max_tokens, ignore_eos=True) for prompt in prompts]
        assert all(len(tokens) == max_tokens for tokens in found)

    async def ask_counting(self, prompt: list[int], max_tokens: int) -> tuple[dict[str, Any], int]:
        """Ask alone; also returns the prefill tokens that the worker computed for it."""
        before = (await self.cell.inventory()).counters.get("prefill_tokens_computed", 0)
        details = await self.ask(prompt, max_tokens)
        after = (await self.cell.inventory()).counters["prefill_tokens_computed"]
        return details, after - before

    def whole_pages(self, tokens: int) -> int:
        """Tokens of the full pages among the first ``tokens``."""
        return tokens // self.page_size * self.page_size


async def survive_all(run: Scenario) -> None:
    """Alone, on device and host hits, in mixed batches with cancelled neighbours, and through preemption."""
    document = run.tokens(DOCUMENT_TOKENS)
    await _hits(run, document)
    await _mixed(run)
    await _host(run, document)
    await _preempted(run)


async def _hits(run: Scenario, document: list[int]) -> None:
    """A prompt longer than a batch is computed in chunks; the next over the same document computes its tail."""
    first = await run.prompt(document, 9, 12)
    details, computed = await run.ask_counting(first, 12)
    assert (details["cached_tokens"], computed) == (0, len(first))

    second = await run.prompt(document, 13, 12)
    details, computed = await run.ask_counting(second, 12)
    cached = run.whole_pages(DOCUMENT_TOKENS)
    assert (details["device_tokens"], details["host_tokens"], computed) == (cached, 0, len(second) - cached)

    # The same prompt again: all of it is cached, but its last token must be computed to know what follows.
    details, computed = await run.ask_counting(second, 12)
    cached = run.whole_pages(len(second) - 1)
    assert (details["device_tokens"], computed) == (cached, len(second) - cached)


async def _mixed(run: Scenario) -> None:
    """Prompts of all lengths at once over two documents, while neighbours are cancelled in their midst."""
    documents = [run.tokens(70), run.tokens(33)]
    prompts = [await run.prompt(documents[n % 2], n * 5 + 1, 6 + 3 * n) for n in range(7)]
    doomed = [asyncio.create_task(run.cell.complete(documents[0] + run.tokens(21), 120)) for _ in range(3)]
    asked = [asyncio.create_task(run.ask(prompt, 6 + 3 * n)) for n, prompt in enumerate(prompts)]
    for task in doomed:
        await asked[0]
        task.cancel()
    await asyncio.gather(*asked)
    await asyncio.gather(*doomed, return_exceptions=True)
    await run.cell.settle()


async def _host(run: Scenario, document: list[int]) -> None:
    """What was pushed out of the device comes back from host memory and is not computed again."""
    for _ in range(2 * DEVICE_TOKENS // 100):
        await run.ask(await run.prompt([], 100, 2), 2)
    await run.cell.settle()
    prompt = await run.prompt(document, 5, 12)
    details, computed = await run.ask_counting(prompt, 12)
    cached = run.whole_pages(DOCUMENT_TOKENS)
    assert details["host_tokens"] > 0
    assert (details["cached_tokens"], computed) == (cached, len(prompt) - cached)


async def _preempted(run: Scenario) -> None:
    """Answers that outgrow the pool together: some are preempted, recomputed, and still exact.

    Any two outgrow it, and all come in one request: of several, one could have its answer before the next has come.
    """
    prompts = [await run.prompt([], 50, OUTGROWING_TOKENS, ignore_eos=True) for _ in range(4)]
    assert DEVICE_TOKENS < 2 * (50 + OUTGROWING_TOKENS)
    await run.ask_together(prompts, OUTGROWING_TOKENS)
    status = await run.cell.settle()
    assert status.counters.get("preemptions", 0) > 0
