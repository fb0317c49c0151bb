"""Exact answers stay exact beside lossy ones: both kinds interleaved, at random, on prefixes that they share.

A request may have only the important part of its prefix loaded. What is computed behind that is wrong for everybody who
did not ask for it. So conversations are continued here, in either fidelity, from answers of either: the prompt of an
exact turn may end with the very tokens whose KV a lossy turn has just computed. Every exact answer is compared with
Hugging Face's own.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.nats_server import NatsServer
from tests.reference import Reference

pytestmark = pytest.mark.integration

SHARED_TOKENS, OWN_TOKENS = 128, 128
DOCUMENTS = 3
ANSWER_TOKENS = 8
OPERATIONS = 24
CASES = [("llama_mha", 16), ("llama", 16), ("opt", 1), ("qwen3", 64)]
RATIOS = (0.02, 0.1, 0.5)


@dataclass
class Turn:
    """What was asked, and what came of it."""

    prompt: list[int]
    answer: list[int]
    is_lossy: bool  # Something was really loaded lossily for it.


class Walk:
    """Random questions about a few documents whose beginnings are the same."""

    def __init__(self, cell: Cell, reference: Reference, seed: str) -> None:
        self._rng = random.Random(seed)
        self._cell, self._reference = cell, reference
        shared = self._tokens(SHARED_TOKENS)
        self._documents = [shared + self._tokens(OWN_TOKENS) for _ in range(DOCUMENTS)]
        self.turns: list[Turn] = []

    async def learn(self) -> None:
        """Have every document computed and kept."""
        for document in self._documents:
            await self.ask(self._decided(document, 5), None)
        await self._cell.flush("device", "host")

    async def step(self) -> None:
        """One operation."""
        match self._rng.randrange(6):
            case 0:
                await self._cell.flush("device")
            case 1:
                await self._cell.flush("device", "host")
            case 2:
                await asyncio.gather(*(self.ask(self._prompt(), self._ratio()) for _ in range(4)))
            case _:
                await self.ask(self._prompt(), self._ratio())

    async def ask(self, prompt: list[int], ratio: float | None) -> None:
        """Ask, and hold an exact answer against the truth."""
        cache = {} if ratio is None else {"cache": {"fidelity": "importance", "ratio": ratio}}
        answer = await self._cell.complete(prompt, ANSWER_TOKENS, ignore_eos=True, **cache)
        found: list[int] = answer["choices"][0]["token_ids"]
        importance: dict[str, Any] | None = answer["usage"].get("importance")
        if ratio is None:
            assert importance is None
            assert found == self.truth(prompt)
        self.turns.append(Turn(prompt, found, importance is not None))

    def truth(self, prompt: list[int]) -> list[int]:
        return self._reference.greedy(prompt, ANSWER_TOKENS, ignore_eos=True)

    def _prompt(self) -> list[int]:
        """A question about a document, or the next turn of a conversation."""
        if self.turns and self._rng.random() < 0.5:
            last = self._rng.choice(self.turns)
            return self._decided(last.prompt + last.answer, self._rng.randrange(1, 20))
        return self._decided(self._rng.choice(self._documents), self._rng.randrange(1, 40))

    def _decided(self, start: list[int], count: int) -> list[int]:
        """``start`` and ``count`` more tokens, to which rounding decides no token of an exact answer."""
        return self._reference.decided(lambda: start + self._tokens(count), ANSWER_TOKENS, ignore_eos=True)

    def _ratio(self) -> float | None:
        return self._rng.choice((None, *RATIOS))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(8, VOCAB_SIZE) for _ in range(count)]


@pytest.mark.parametrize(("family", "page_size"), CASES)
async def test_exact_answers_stay_exact_beside_lossy_ones(
    family: str, page_size: int, nats_server: NatsServer, tmp_path: Path
) -> None:
    """Whatever was asked before, and whatever runs beside it. Some lossy answers differ, or this would show nothing."""
    model = make_checkpoint(family, tmp_path / "model")
    (tmp_path / "disk").mkdir()
    async with running_cell(
        nats_server.url,
        model,
        worker_settings={"page_size": page_size, "device_pages": 1024 // page_size},
        scheduler_settings={"prefetch_wait": "full", "restoring": "important"},
        storage_settings={"disk_dir": (str(tmp_path / "disk"),), "disk_kv_bytes": 64 * 2**20, "sparse": True},
        gateway_settings={"importance": "on"},
    ) as cell:
        walk = Walk(cell, Reference(model), f"{family} {page_size}")
        await walk.learn()
        for _ in range(OPERATIONS):
            await walk.step()
        await cell.settle()
        lossy = [turn for turn in walk.turns if turn.is_lossy]
        assert len(lossy) >= OPERATIONS // 6
        assert any(turn.answer != walk.truth(turn.prompt) for turn in lossy)
