"""Answers under grammars in a live cell: prefix hits, preemption and a killed worker change no token."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.idle import settled, status_at
from tests.integration.decided_load import asked_until, differing
from thermocline.client import Answer, stream_answer
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = pytest.mark.integration

WORKERS = 2
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 25, "maxItems": 25}
LETTERS = "[a-f]{150}"
GBNF = 'root ::= pair pair*\npair ::= "<" [a-c]+ "|" [0-9]{2} ">"'


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """Two workers, each with room for about 420 tokens on its device, which no two of the requests fit into."""
    model = make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")
    small: dict[str, Any] = {"device_kv_bytes": 650_000, "host_kv_bytes": 16 * 2**20, "threads": 1}
    small |= {"page_size": 16, "dtype": "float32", "port": 0, "max_batch_tokens": 64, "workers": WORKERS}
    with running(SupervisorConfig(model=str(model), **small)) as found:
        yield found


def bodies(model: str) -> list[dict[str, Any]]:
    """Sampled requests over two documents, with grammars of each kind and, last, one that has none."""
    rng = random.Random(11)
    documents = [[rng.randrange(8, VOCAB_SIZE) for _ in range(96)] for _ in range(2)]
    fields: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}},
        {"guided_regex": LETTERS},
        {"structured_outputs": {"regex": LETTERS}, "min_tokens": 20},
        {"structured_outputs": {"json": NUMBERS}},
        {"guided_choice": ["crimson and silver", "crimson and gold"]},
        {"guided_grammar": GBNF, "max_tokens": 60},
        {"guided_regex": LETTERS, "repetition_penalty": 1.1},
        {"max_tokens": 120, "ignore_eos": True},
    ]
    common = {"model": model, "max_tokens": 300, "temperature": 1.0, "return_token_ids": True}
    return [
        common | {"prompt": [*documents[number % 2], 8 + number, 9], "seed": number} | each
        for number, each in enumerate(fields)
    ]


def keeps_to(body: dict[str, Any], answer: Answer) -> bool:
    """Whether an answer is what its request asked for, as far as that ends."""
    text = answer.text
    if "guided_choice" in body:
        return bool(text in body["guided_choice"])
    if "guided_grammar" in body:
        return re.fullmatch(r"(<[a-c]+\|\d\d>)*(<([a-c]*|[a-c]+\|\d?\d?))?", text) is not None
    pattern = body.get("guided_regex") or body.get("structured_outputs", {}).get("regex")
    if pattern:
        return re.fullmatch(pattern, text) is not None
    if "ignore_eos" in body:
        return bool(len(answer.token_ids) == body["max_tokens"])
    numbers: list[int] = json.loads(text)
    return len(numbers) == 25 and set(numbers) <= set(range(100))


async def in_trouble(cell: RunningCell, asked: list[dict[str, Any]]) -> tuple[list[Answer], list[list[Answer]]]:
    """The answers one at a time, and of each request all further ones: beside the others while a worker is killed, and
    after that.
    """
    async with httpx.AsyncClient(base_url=cell.base_url, timeout=120, trust_env=False) as client:
        alone = [await stream_answer(client, "/v1/completions", body) for body in asked]
        is_over = asyncio.Event()
        load = asyncio.create_task(asked_until(client, asked, is_over))
        async with asyncio.timeout(60):
            while not all(each.running for each in (await status_at(cell.nats_url)).workers):
                await asyncio.sleep(0.005)
        pid = cell.kill("worker-0")
        await asyncio.to_thread(cell.wait_restarted, "worker-0", pid)
        is_over.set()
        rounds = await load
        again = [await stream_answer(client, "/v1/completions", body) for body in asked]
    return alone, [[*answers, last] for answers, last in zip(rounds, again, strict=True)]


def test_hits_preemption_and_a_killed_worker_change_no_token(cell: RunningCell) -> None:
    """Seeded answers are the same alone, together under preemption, when a worker dies under them, and on cached
    prefixes; and each keeps to its grammar.
    """
    asked = bodies("llama")
    alone, rounds = asyncio.run(in_trouble(cell, asked))
    status = asyncio.run(settled(lambda: status_at(cell.nats_url), workers=WORKERS, timeout_s=240.0))

    assert all(keeps_to(body, answer) for body, answer in zip(asked, alone, strict=True))
    assert differing(alone, rounds) == []
    assert status.counters["hit_tokens_device"] > 0
    assert status.counters.get("preemptions", 0) > 0
    assert status.counters.get("requests_resumed", 0) > 0


def test_openais_client_parses_what_it_asked_for(cell: RunningCell) -> None:
    """The official client's ``response_format`` gives JSON that is valid, whole and streamed, for every choice."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}, "on": {"type": "boolean"}},
        "required": ["n", "on"],
    }
    asked: dict[str, Any] = {
        "model": "llama",
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": schema | {"additionalProperties": False}},
        },
        "n": 2,
        "seed": 3,
        "temperature": 1.0,
        "max_completion_tokens": 400,
    }
    with openai.OpenAI(base_url=f"{cell.base_url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**asked)
        streamed = ["", ""]
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""

    assert [each.message.content for each in whole.choices] == streamed
    assert all(set(json.loads(text)) == {"n", "on"} for text in streamed)
    assert {each.finish_reason for each in whole.choices} == {"stop"}
