"""What is found out about a server before it is measured, and how requests are made of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from shared.errors import InvalidRequest, Unavailable
from tests.unit.thermocline.load.made_runs import DIALECT
from tests.unit.thermocline.load.scripted_server import TOKEN, Answer, Script, ScriptedHttp, refusal, stream, usage
from tests.unit.thermocline.load.virtual_time import VirtualTime
from thermocline.client import RequestError
from thermocline.load.dialect import Api, Dialect, find_dialect
from thermocline.load.prompts import PromptMaker
from thermocline.load.reply import Reply
from thermocline.load.talker import Talker
from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads import Asked


async def found(
    script: Script, *, model: str | None = None, api: Api | None = None, has_turns: bool = False
) -> Dialect:
    clock = VirtualTime()
    http = ScriptedHttp(script, clock)
    return await find_dialect(http, clock, model=model, api=api, has_turns=has_turns, timeout_s=60.0)


def ours(path: str, body: dict[str, Any]) -> Answer:
    return Answer()


def plain(path: str, body: dict[str, Any]) -> Answer:
    """Texts alone, nothing but OpenAI's fields, two words a token and a template of three."""
    if isinstance(body.get("prompt"), list) or "ignore_eos" in body:
        return refusal(400)
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return stream(
        {"choices": [{"text": "b", "finish_reason": "length"}]}, usage(3 + len(text.split()) // 2, 1), "[DONE]"
    )


def chat_only(path: str, body: dict[str, Any]) -> Answer:
    return plain(path, body) if path == "/v1/chat/completions" else refusal(404)


async def test_token_ids_are_preferred() -> None:
    """Of the ordinary part of the vocabulary that the server tells."""
    dialect = await found(ours)

    assert (dialect.api, dialect.is_extended, dialect.returns_tokens) == ("tokens", True, True)
    assert (dialect.vocabulary_first, dialect.vocabulary_end, dialect.max_context) == (8, 300, 100)


async def test_what_a_server_refuses_is_left_out() -> None:
    """Token ids, and fields that OpenAI does not have; words are counted then."""
    dialect = await found(plain)

    assert (dialect.api, dialect.is_extended, dialect.words_per_token) == ("text", False, 2.0)


async def test_a_server_of_chats_alone_is_understood() -> None:
    """By its other endpoint."""
    assert (await found(chat_only)).path == "/v1/chat/completions"


async def test_a_conversation_in_token_ids_needs_those_of_the_answers() -> None:
    """Or its next prompt would not repeat what was said."""

    def keeps_them(path: str, body: dict[str, Any]) -> Answer:
        return stream({"choices": [{"text": "b", "finish_reason": "length"}]}, "[DONE]")

    assert (await found(keeps_them, has_turns=True)).api == "text"
    assert (await found(keeps_them)).api == "tokens"
    assert (await found(ours, has_turns=True)).api == "tokens"


async def test_a_model_may_be_named() -> None:
    """Also one that is not listed; then nothing is known of it."""
    assert (await found(ours, model="other")).max_context is None
    assert (await found(ours, model="hidden")).model == "hidden"


async def test_what_was_asked_for_is_not_replaced() -> None:
    """An API that the server refuses is the caller's fault."""
    with pytest.raises(InvalidRequest, match="--api tokens"):
        await found(plain, api="tokens")


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [(401, InvalidRequest, "API key"), (503, Unavailable, "cannot serve now"), (429, Unavailable, "cannot serve now")],
)
async def test_a_server_that_cannot_be_measured_is_told_from_one_that_will_not(
    status: int, error: type[Exception], says: str
) -> None:
    """A wrong key is the caller's fault, a busy server is not."""
    with pytest.raises(error, match=says):
        await found(lambda path, body: refusal(status))


@pytest.mark.parametrize(
    ("models", "error", "says"),
    [
        (Answer((b"<html>",)), Unavailable, "not OpenAI's list"),
        (Answer((b'{"data":[]}',)), Unavailable, "serves no model"),
        (Answer((b"",), 403), InvalidRequest, "API key"),
        (Answer((b"",), 500), Unavailable, "status 500"),
        (RequestError("connection_refused", "nobody there"), Unavailable, "does not answer"),
    ],
)
async def test_what_is_no_server_is_named(models: Answer | RequestError, error: type[Exception], says: str) -> None:
    """With what is wrong."""
    clock = VirtualTime()
    http = ScriptedHttp(ours, clock, models)

    with pytest.raises(error, match=says):
        await find_dialect(http, clock, model=None, api=None, has_turns=False, timeout_s=60.0)


class Talk:
    """A talker to a server that gives these responses one after another, and what it sent."""

    def __init__(self, *answers: Answer | RequestError, retries: int = 0, **dialect: Any) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.clock = VirtualTime()
        self._answers = iter(answers)
        prompts = PromptMaker(1, vocabulary=range(8, 300), words_per_token=1.0, length_scale=1.0)
        self.talker = Talker(
            ScriptedHttp(self._answer, self.clock),
            msgspec.structs.replace(DIALECT, **dialect),
            prompts,
            self.clock,
            timeout_s=60.0,
            retries=retries,
            seed=1,
        )

    def _answer(self, path: str, body: dict[str, Any]) -> Answer | RequestError:
        self.bodies.append(body)
        return next(self._answers)

    async def ask(self, prompt_tokens: int = 20, answer_tokens: int = 5) -> Reply:
        prepared = self.talker.prepare(Asked((Span(0, prompt_tokens),), Span(2, answer_tokens)), {})
        return await self.clock.run(self.talker.send(prepared, 4, self.clock.now_s() - 1))


WELL = Answer()


async def test_answers_are_as_long_as_asked() -> None:
    """Greedy, streamed, with usage."""
    talk = Talk(WELL)

    reply = await talk.ask()

    (body,) = talk.bodies
    assert len(body.pop("prompt")) == 20
    assert body == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }
    assert (reply.number, reply.error, reply.output_tokens) == (4, "", 2)


async def test_a_prompt_that_does_not_fit_loses_its_end_and_says_so() -> None:
    """An answer never takes more than half of the context."""
    talk = Talk(WELL, WELL, max_context=64)

    fits, cut = await talk.ask(59, 5), await talk.ask(60, 90)

    assert (fits.is_cut, cut.is_cut) == (False, True)
    assert [(len(body["prompt"]), body["max_tokens"]) for body in talk.bodies] == [(59, 5), (32, 32)]
    assert talk.bodies[1]["prompt"] == talk.bodies[0]["prompt"][:32]


async def test_nothing_is_retried_unless_asked() -> None:
    """Each error is one of the figures."""
    talk = Talk(refusal(503, "unavailable"))

    assert (await talk.ask()).error == "unavailable"
    assert len(talk.bodies) == 1


async def test_a_retry_waits_as_long_as_the_server_asks_and_counts_from_the_first_intent() -> None:
    """So that a server is not faster for having refused."""
    talk = Talk(refusal(503, "unavailable", retry_after="3"), RequestError("connection_refused", "x"), WELL, retries=2)

    reply = await talk.ask()

    assert (reply.error, reply.retries, len(talk.bodies)) == ("", 2, 3)
    assert reply.ttft_s > 1 + 3


@pytest.mark.parametrize("answer", [refusal(400), stream(TOKEN, "no json"), RequestError("timeout", "x")])
async def test_what_would_fail_again_or_had_begun_is_not_retried(answer: Answer | RequestError) -> None:
    """Whatever --retries says."""
    talk = Talk(answer, WELL, retries=5)

    assert (await talk.ask()).error
    assert len(talk.bodies) == 1


async def test_prompts_of_each_api_have_its_form() -> None:
    """Token ids, a text, messages."""
    kinds = []
    for api in ("tokens", "text", "chat"):
        talk = Talk(WELL, api=api)
        await talk.ask()
        kinds.append(json.dumps(talk.bodies[0].get("prompt") or talk.bodies[0]["messages"])[:9])

    assert kinds[0][1].isdigit()
    assert kinds[1][1].isalpha()
    assert kinds[2] == '[{"role":'.ljust(9)
