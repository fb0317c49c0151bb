"""One greedy token of a prompt, timed: what a TTFT bench asks."""

from __future__ import annotations

from typing import Any

import httpx

from thermocline.client import Answer, stream_answer


async def ask_one(client: httpx.AsyncClient, model: str, prompt: list[int], **extra: Any) -> Answer:
    """The answer to a prompt of token ids, one token long; ``extra`` are further fields. Raises RequestError."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    return await stream_answer(client, "/v1/completions", body | {"return_token_ids": True} | extra)
