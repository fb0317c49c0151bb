"""Conversations over HTTP: the cell is asked with the ids that it answered in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from shared.messages.requests import SubmitRequest
from tests.memory_bus import MemoryBroker
from tests.unit.gateway.running_gateway import Harness, running_gateway, tokenizer
from tests.unit.gateway.scripted_cell import Step
from tests.waiting import until

ANSWER = "the keeper of the light"
QUESTIONS = [{"role": "user", "content": "who?"}, {"role": "user", "content": "and then?"}]


def spelt(text: str) -> list[int]:
    """One token for each letter, as no tokenizer gives them."""
    return [token for letter in text for token in tokenizer().encode_now(letter, add_special_tokens=False)]


def spells(request: SubmitRequest) -> Sequence[Step]:
    return [(token, tokenizer().decode([token])) for token in spelt(ANSWER)]


async def ask(harness: Harness, messages: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    body = {"model": "test-model", "messages": messages, "return_token_ids": True, "max_tokens": 30} | extra
    response = await harness.client.post("/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    told: dict[str, Any] = response.json()
    return told


async def two_turns(harness: Harness, **extra: Any) -> tuple[list[int], list[int]]:
    """The first prompt with its answer, and the second prompt."""
    first = await ask(harness, QUESTIONS[:1], **extra)
    message = first["choices"][0]["message"]
    second = await ask(harness, [QUESTIONS[0], message, QUESTIONS[1]], **extra)
    return first["prompt_token_ids"] + spelt(ANSWER), second["prompt_token_ids"]


def usual(messages: list[dict[str, Any]]) -> list[int]:
    return tokenizer().encode_chat(messages)


CONVERSATION = [QUESTIONS[0], {"role": "assistant", "content": ANSWER}, QUESTIONS[1]]


@pytest.mark.parametrize("memory", [2**20, 0])
async def test_the_second_turn_goes_on_from_the_first(memory: int) -> None:
    """Unless nothing is to be remembered: then its text is tokenised anew."""
    async with running_gateway(spells, answer_memory_bytes=memory) as harness:
        before, prompt = await two_turns(harness)

    assert (prompt[: len(before)] == before) == bool(memory)
    assert (prompt == usual(CONVERSATION)) == (not memory)


async def test_a_stream_is_remembered_too() -> None:
    """The ids of a streamed answer are known when its client asks on."""
    async with running_gateway(spells) as harness:
        first = await ask(harness, QUESTIONS[:1])
        body = {"model": "test-model", "messages": QUESTIONS[1:], "max_tokens": 30, "stream": True}
        streamed = await harness.client.post("/v1/chat/completions", json=body)
        assert streamed.status_code == httpx.codes.OK
        told = await ask(harness, [QUESTIONS[1], CONVERSATION[1], QUESTIONS[0]])

    expected = usual(QUESTIONS[1:]) + spelt(ANSWER)
    assert told["prompt_token_ids"][: len(expected)] == expected
    assert first["choices"]


async def test_a_gateway_that_begins_anew_asks_the_bucket() -> None:
    """What the last one said is known to the next, sealed meanwhile."""
    broker = MemoryBroker()
    async with running_gateway(spells, broker=broker) as harness:
        first = await ask(harness, QUESTIONS[:1])
        await until(lambda: bool(broker.answers))
    (entry,) = broker.answers.values()
    async with running_gateway(spells, broker=broker) as harness:
        told = await ask(harness, CONVERSATION)
        salted = await ask(harness, CONVERSATION, cache_salt="other")

    expected = first["prompt_token_ids"] + spelt(ANSWER)
    assert told["prompt_token_ids"][: len(expected)] == expected
    assert salted["prompt_token_ids"] == usual(CONVERSATION)
    assert ANSWER.encode() not in entry


async def test_an_answer_with_a_token_that_no_client_sees_is_found_again_by_its_text() -> None:
    """A role's marker in the middle: the next gateway makes the same prompt as the one that heard it."""
    marker = tokenizer().specials_by_text["<|user|>"]

    def says_a_role(request: SubmitRequest) -> Sequence[Step]:
        steps = list(spells(request))
        return [*steps[:9], (marker, ""), *steps[9:]]

    broker = MemoryBroker()
    async with running_gateway(says_a_role, broker=broker) as harness:
        await ask(harness, QUESTIONS[:1])
        heard = await ask(harness, CONVERSATION)
        async with asyncio.timeout(10):
            await harness.gateway.turns.drain(10)
    async with running_gateway(says_a_role, broker=broker) as harness:
        told = await ask(harness, CONVERSATION)

    assert told["prompt_token_ids"] == heard["prompt_token_ids"] != usual(CONVERSATION)


async def test_usual_answers_are_not_stored() -> None:
    """The tokenizer gives their ids back by itself."""
    ids = tokenizer().encode_now(ANSWER, add_special_tokens=False)
    broker = MemoryBroker()
    async with running_gateway(lambda _: [(token, tokenizer().decode([token])) for token in ids], broker=broker) as one:
        await ask(one, QUESTIONS[:1])
        async with asyncio.timeout(10):
            await one.gateway.turns.drain(10)

    assert broker.answers == {}


async def test_a_store_that_is_away_is_told_and_costs_no_answer() -> None:
    """Conversations go on, and the gateway says what it lacks."""
    broker = MemoryBroker()
    async with running_gateway(spells, broker=broker) as harness:

        async def lost(*_: Any, **__: Any) -> dict[str, bytes | None]:
            raise TimeoutError

        harness.bus.read_answers = lost  # type: ignore[method-assign]
        told = await ask(harness, CONVERSATION)
        degraded = [each.what for each in harness.gateway.own_degraded()]

    assert told["prompt_token_ids"] == usual(CONVERSATION)
    assert degraded == ["answers"]


async def test_other_ways_to_name_a_conversation_give_the_same_ids() -> None:
    """``/tokenize`` says what a chat would be asked with."""
    async with running_gateway(spells) as harness:
        await two_turns(harness)
        told = await ask(harness, CONVERSATION)
        tokenized = await harness.client.post("/tokenize", json={"model": "test-model", "messages": CONVERSATION})

    assert tokenized.json()["tokens"] == told["prompt_token_ids"] != usual(CONVERSATION)
