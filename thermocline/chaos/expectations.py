"""The right answers: each request is sent to the cell before any fault, first without caches and then with.

All answers under faults are compared with these. Logits differ in their last bits between shapes of batches, so a
token can be undecided: a greedy one between two that are equally likely, a drawn one at the boundary of two. Such
requests are left out: greedy ones by the gap between their two likeliest tokens, others when the two passes, whose
batches differ, do not agree.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx

from shared.errors import InternalError
from thermocline.chaos.workload import Conversation, Known, Script, body_of

LEAST_GAP = 1e-3
"""Least gap between the logprobs of the two likeliest tokens; batch shapes change a hundredth of it in float32."""

MOST_DIFFERING = 0.05
"""Largest share of answers that may differ between the two passes; more would not be chance."""

_AT_ONCE = 6


@dataclass(slots=True)
class Expectations:
    """Conversations with known answers. ``close`` greedy and ``differing`` drawn requests were left out."""

    conversations: list[Conversation] = field(default_factory=list)
    asked: int = 0
    close: int = 0
    differing: int = 0

    @property
    def known(self) -> int:
        """Number of requests with known answers."""
        return sum(len(conversation.asks) for conversation in self.conversations)


async def known_answers(client: httpx.AsyncClient, model: str, scripts: list[Script]) -> Expectations:
    """Send every script twice and keep the turns whose answers are decided.

    Raises InternalError if the cache changes a decided answer or no answer is decided, and httpx.HTTPError.
    """
    gate = asyncio.Semaphore(_AT_ONCE)
    found = Expectations()

    async def one(script: Script) -> Conversation:
        async with gate:
            return await _conversation(client, model, script, found)

    conversations = await asyncio.gather(*(one(script) for script in scripts))
    if found.differing > max(1, MOST_DIFFERING * found.asked):
        raise InternalError(f"{found.differing} of {found.asked} requests give another answer with caches than without")
    found.conversations = [conversation for conversation in conversations if conversation.asks]
    if not found.conversations:
        raise InternalError(f"none of {found.asked} requests has an answer that is decided")
    return found


async def _conversation(client: httpx.AsyncClient, model: str, script: Script, found: Expectations) -> Conversation:
    """Return the script's turns up to the first that is undecided."""
    conversation = Conversation(script.name)
    answers: list[str] = []
    for number in range(len(script.turns)):
        body = body_of(script, number, answers, model)
        plain = await _answer(client, script, {**body, **_logprobs(script), "cache": {"read": False, "write": False}})
        cached = await _answer(client, script, body)
        token_ids, text, reason = _parts(plain)
        found.asked += 1
        if not _is_decided(plain, body["temperature"]):
            found.close += 1
            break
        if (token_ids, text, reason) != _parts(cached):
            if not body["temperature"]:
                raise InternalError(f"{script.name}.{number}: a greedy answer that is decided differs with caches")
            found.differing += 1
            break
        known = Known(f"{script.name}.{number}", script.endpoint, body, token_ids, text, reason)
        conversation.asks.append(known)
        answers.append(text)
    return conversation


def _logprobs(script: Script) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": 2} if script.endpoint == "/v1/chat/completions" else {"logprobs": 2}


async def _answer(client: httpx.AsyncClient, script: Script, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(script.endpoint, json=body)
    choice: dict[str, Any] = response.raise_for_status().json()["choices"][0]
    return choice


def _parts(choice: dict[str, Any]) -> tuple[tuple[int, ...], str, str]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return tuple(choice["token_ids"]), text, choice["finish_reason"]


def _is_decided(choice: dict[str, Any], temperature: float) -> bool:
    """Return whether every greedy token was clearly the likeliest; always True for drawn ones."""
    if temperature > 0:
        return True
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in logprobs["content"]]
    else:
        tops = [list(top.values()) for top in logprobs["top_logprobs"] if top]
    for top in tops:
        best = sorted(top, reverse=True)[:2]
        # Two tokens with the same text share one entry of a completion: then nothing can be said against it.
        if len(best) == 2 and best[0] - best[1] < LEAST_GAP:
            return False
    return True
