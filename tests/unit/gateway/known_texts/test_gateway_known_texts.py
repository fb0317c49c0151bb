"""Over HTTP: prompts have the same tokens with an index of known texts, and tenants keep their own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.gateway.known_texts import measures
from services.gateway.tokenizer import Tokenizer
from shared.messages.base import unpack_int32
from tests.fuzz.text_cases import changed, phrase
from tests.fuzz.text_chats import FORMS, chat_tokenizer
from tests.unit.gateway.running_gateway import FACTS, Harness, running_gateway, says

FACTS_LONG = replace(FACTS, max_context=100_000)
TEXT = "the keeper of the light " * 200
SIZES = {"known": 2**20, "plain": 0}


@pytest.fixture(params=FORMS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def known(kind: str, tmp_path: Path) -> Iterator[Tokenizer]:
    made = chat_tokenizer(tmp_path / "known", kind, known_bytes=2**20)
    yield made
    made.close()


@pytest.fixture
async def harness(known: Tokenizer) -> AsyncIterator[Harness]:
    # Answers in their own ids are another matter, which the fuzzer has.
    settings: dict[str, Any] = {"facts": FACTS_LONG, "model_tokenizer": known, "answer_memory_bytes": 0}
    async with running_gateway(says("hi"), **settings) as running:
        yield running


async def prompt_of(harness: Harness, path: str, **body: Any) -> list[int]:
    """Tokens of the request that the cell got."""
    answered = await harness.client.post(path, json={"max_tokens": 1, **body})
    assert answered.status_code == 200, answered.text
    return unpack_int32(harness.cell.submitted[-1].prompt)


def hits() -> float:
    return float(measures.HITS._value.get())


async def test_conversations_that_change_have_the_tokens_of_a_full_encode(
    harness: Harness, kind: str, tmp_path: Path
) -> None:
    """Through ``/v1/chat/completions``, with each form of template."""
    plain = chat_tokenizer(tmp_path / "plain", kind, known_bytes=0)
    rng = random.Random(f"http-{kind}")
    tokens = FORMS[kind][1]
    messages = [{"role": "user", "content": phrase(rng, tokens, 40)}]
    begun = hits()

    for turn in range(40):
        if turn % 3 == 2:
            place = rng.randrange(len(messages))
            messages[place] = {**messages[place], "content": changed(messages[place]["content"], rng, tokens, 900)}
        elif turn:
            messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": phrase(rng, tokens, 40)})
        prompt = await prompt_of(harness, "/v1/chat/completions", messages=messages)
        assert prompt == plain.encode_rendered(plain.render(messages))

    plain.close()
    assert hits() > begun + 100


async def test_texts_and_their_special_tokens_are_those_of_a_full_encode(harness: Harness, known: Tokenizer) -> None:
    """Through ``/v1/completions`` and ``/tokenize``, a second time from the index."""
    for add_special_tokens in (True, False):
        whole = known.encode_now(TEXT, add_special_tokens=add_special_tokens)
        for _ in range(2):
            begun = hits()
            body = {"prompt": TEXT, "add_special_tokens": add_special_tokens}
            assert await prompt_of(harness, "/v1/completions", **body) == whole
            assert (await harness.client.post("/tokenize", json=body)).json()["tokens"] == whole
        assert hits() > begun


@pytest.mark.parametrize("kind", ["qwen2"], indirect=True)
async def test_other_salts_and_requests_that_keep_nothing_find_nothing(harness: Harness) -> None:
    """What is kept for one namespace is no other's, and ``cache.write`` false leaves nothing."""

    async def found(**body: Any) -> float:
        begun = hits()
        await prompt_of(harness, "/v1/completions", prompt=TEXT, **body)
        return hits() - begun

    repeated = await found(cache={"write": False})

    assert await found(cache={"write": False}) == repeated == 0
    assert await found(cache_salt="a") < await found(cache_salt="a")
    assert await found() < await found()


async def test_a_light_conversation_of_known_text_is_tokenised_at_once(tmp_path: Path) -> None:
    """Its thread would take longer than the work; too much new text is still tokenised in one."""
    kind = next(iter(FORMS))
    tokenizer, plain = (chat_tokenizer(tmp_path / name, kind, known_bytes=size) for name, size in SIZES.items())
    settings: dict[str, Any] = {"facts": FACTS_LONG, "model_tokenizer": tokenizer}
    system = {"role": "system", "content": TEXT}
    async with running_gateway(says("hi"), **settings) as harness:
        await prompt_of(harness, "/v1/chat/completions", messages=[system, {"role": "user", "content": "one"}])
        await prompt_of(harness, "/v1/completions", prompt=TEXT + "one")
        tokenizer.close()  # No thread takes work any more.
        messages = [system, {"role": "user", "content": "another"}]

        assert await prompt_of(harness, "/v1/chat/completions", messages=messages) == plain.encode_rendered(
            plain.render(messages)
        )
        assert await prompt_of(harness, "/v1/completions", prompt=TEXT + "another") == plain.encode_now(
            TEXT + "another", add_special_tokens=True
        )
        for messages in (
            [{"role": "user", "content": "never said before " * 300}],
            [system, *[{"role": "user", "content": "a"}] * 16],
        ):
            refused = await harness.client.post("/v1/chat/completions", json={"messages": messages})
            assert refused.status_code == 500
    plain.close()
