"""Prompt lookup in a whole cell: over HTTP, answers are those of a cell that proposes nothing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.nats_server import NatsServer
from tests.reference import Reference

pytestmark = pytest.mark.integration

ANSWER = 150
LETTERS = {str(token): 12.0 for token in (40, 41, 42, 43)}
"""Biases under which a random model says little else, and so repeats itself."""


def bodies() -> list[dict[str, Any]]:
    """Requests over one document: greedy and sampled, with logprobs, penalties, stops, a grammar, and two choices."""
    rng = random.Random(5)
    document = [rng.randrange(8, VOCAB_SIZE) for _ in range(96)]
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 3, "logprobs": 2},
        {"temperature": 1.0, "seed": 4, "n": 2},
        {"frequency_penalty": 0.05, "presence_penalty": 0.1},
        {"temperature": 1.0, "seed": 6, "guided_regex": "[a-f]{120}", "logit_bias": {}, "ignore_eos": False},
        {"temperature": 0.7, "seed": 7, "logit_bias": LETTERS | {"2": 9.0}, "ignore_eos": False},
    ]
    common = {"logit_bias": LETTERS, "ignore_eos": True}
    return [common | {"prompt": [*document, 8 + number]} | each for number, each in enumerate(fields)]


async def ask(cell: Cell, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await cell.complete(body["prompt"], ANSWER, **{name: body[name] for name in body if name != "prompt"})
    choices: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
    return choices


async def served(broker: NatsServer, model: Path, lookup_tokens: int) -> tuple[list[Any], dict[str, int]]:
    """Every answer alone, together under preemption, and alone again on what is cached; and the cell's counters."""
    worker = {"page_size": 16, "device_pages": 28, "prompt_lookup_tokens": lookup_tokens}
    scheduler = {"max_batch_tokens": 48, "lease_tokens": 16, "max_running": 8}
    asked = bodies()
    async with running_cell(broker.url, model, worker_settings=worker, scheduler_settings=scheduler) as cell:
        alone = [await ask(cell, body) for body in asked]
        together = await asyncio.gather(*(ask(cell, body) for body in asked))
        again = [await ask(cell, body) for body in asked]
        status = await cell.settle()
        counters = status.counters | (await cell.inventory()).counters
    assert alone == together == again
    return alone, counters


async def test_a_cell_answers_as_without_proposals(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer, second_broker: NatsServer
) -> None:
    """Tokens, text, logprobs and ends are the same, with prefix hits and preemption, and no page is lost."""
    model, _ = checkpoints["llama"]
    expected, without = await served(nats_server, model, 0)
    found, counters = await served(second_broker, model, 8)

    assert found == expected
    assert without["tokens_proposed"] == 0
    assert counters["tokens_accepted"] > 300
    assert counters["tokens_proposed"] > counters["tokens_accepted"]
    assert counters["preemptions"] > 0
    assert counters["hit_tokens_device"] > 0
