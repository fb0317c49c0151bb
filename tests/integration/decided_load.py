"""A load that lasts as long as it is needed, of requests whose answers can be compared wherever they are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from tests.reference import Reference
from thermocline.client import Answer, stream_answer

TEMPERATURE = 0.8


def decided_body(
    reference: Reference, model: str, draw: Callable[[], list[int]], max_tokens: int, *, is_sampled: bool
) -> dict[str, Any]:
    """A completion request of ``max_tokens`` decided tokens, with a prompt from ``draw``."""
    body = {"model": model, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    if is_sampled:
        prompt = draw()
        seed = reference.decided_seed(prompt, max_tokens, temperature=TEMPERATURE)
        return body | {"prompt": prompt, "temperature": TEMPERATURE, "seed": seed}
    return body | {"prompt": reference.decided(draw, max_tokens, ignore_eos=True), "temperature": 0}


async def asked_until(
    client: httpx.AsyncClient, bodies: list[dict[str, Any]], is_over: asyncio.Event
) -> list[list[Answer]]:
    """Ask all beside one another, and each again and again until ``is_over``; every answer, by request."""

    async def repeat(body: dict[str, Any]) -> list[Answer]:
        answers = [await stream_answer(client, "/v1/completions", body)]
        while not is_over.is_set():
            answers.append(await stream_answer(client, "/v1/completions", body))
        return answers

    return await asyncio.gather(*map(repeat, bodies))


def differing(calm: list[Answer], fired: list[list[Answer]]) -> list[tuple[int, str, str]]:
    """Request, expected text and text of each answer under fire that is not the calm one, token for token."""
    return [
        (number, known.text, answer.text)
        for number, (known, answers) in enumerate(zip(calm, fired, strict=True))
        for answer in answers
        if (answer.token_ids, answer.text) != (known.token_ids, known.text)
    ]
