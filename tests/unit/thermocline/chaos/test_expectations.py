"""The right answers come from a cell that nothing happens to; what is undecided is left out."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from shared.errors import InternalError
from thermocline.chaos.expectations import Expectations, known_answers
from thermocline.chaos.workload import Script, Turn

GREEDY, DRAWN = Turn("greedy", 1), Turn("drawn", 1, temperature=0.9, seed=1, top_k=6)


def completion(name: str, turn: Turn) -> Script:
    """A script of one completion."""
    return Script(name, "/v1/completions", "document", (turn,))


async def found(scripts: list[Script], answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Expectations:
    """What is known after asking a server that answers so."""

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": [answer(json.loads(request.content))]})

    async with httpx.AsyncClient(base_url="http://cell", transport=httpx.MockTransport(handle)) as client:
        return await known_answers(client, "m", scripts)


def choice(token: int, gap: float = 1.0) -> dict[str, Any]:
    """An answer of one token, ``gap`` more likely than the next."""
    logprobs = {"top_logprobs": [{"a": -1.0, "b": -1.0 - gap}]}
    return {"token_ids": [token], "text": str(token), "finish_reason": "length", "logprobs": logprobs}


async def test_what_is_answered_alike_without_and_with_caches_is_known() -> None:
    """Each request with its body as it will be sent again."""
    [conversation] = (await found([completion("s", GREEDY)], lambda body: choice(7))).conversations

    [known] = conversation.asks
    assert (known.token_ids, known.text, known.finish_reason) == ((7,), "7", "length")
    assert "cache" not in known.body
    assert "logprobs" not in known.body


async def test_undecided_requests_are_left_out() -> None:
    """A greedy one by its gap, a drawn one by its second answer."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"].endswith("drawn"):
            return choice(1 if "cache" in body else 2)
        return choice(7, gap=1e-4 if "close" in body["prompt"] else 1.0)

    decided = [completion(f"s{n}", GREEDY) for n in range(20)]
    scripts = [*decided, completion("drawn", DRAWN), completion("close", Turn("close", 1))]

    known = await found(scripts, answer)

    assert [conversation.name for conversation in known.conversations] == [script.name for script in decided]
    assert (known.asked, known.known, known.close, known.differing) == (22, 20, 1, 1)


async def test_too_many_drawn_answers_that_differ_are_an_error() -> None:
    """Then it is not chance that decides."""
    with pytest.raises(InternalError, match="2 of 2"):
        await found([completion("a", DRAWN), completion("b", DRAWN)], lambda body: choice(1 if "cache" in body else 2))


async def test_a_cache_that_changes_a_decided_answer_is_an_error() -> None:
    """That would be wrong without any fault."""
    with pytest.raises(InternalError, match="differs with caches"):
        await found([completion("a", GREEDY)], lambda body: choice(1 if "cache" in body else 2))
