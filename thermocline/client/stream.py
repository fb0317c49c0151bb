"""Send one streaming request to an OpenAI-compatible server and time the answer."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


class RequestError(Exception):
    """An error from the server, or a broken stream."""

    def __init__(self, code: str, message: str) -> None:
        """Put ``code`` in front of the message.

        It is the API's code, ``http_`` and the status where the body has none, or the client's own, such as
        ``transport``.
        """
        super().__init__(f"{code}: {message}")
        self.code = code


SOURCES = ("device", "neighbour", "host", "lent", "hidden", "sparse", "disk", "remote")
"""Sources of a reused prefix, the fastest first; ``hidden`` is restored from hidden states below host memory.

Only a part of a ``sparse`` prefix was loaded from disk, and the answer is lossy.
"""


@dataclass
class Answer:
    """The answer to one request and its figures. Times are seconds; the server counts the tokens."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)  # With ``return_token_ids``.
    margins: list[float] = field(default_factory=list)  # Logprob of the likeliest token less the next, by token.
    finish_reason: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0
    neighbour_tokens: int = 0
    hidden_tokens: int = 0
    sparse_tokens: int = 0
    lent_tokens: int = 0
    importance: dict[str, Any] | None = None  # The API's ``usage.importance``; None for an exact answer.
    timing_ms: dict[str, float | None] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Source of most of the reused prefix, one of SOURCES, or ``recomputed`` if nothing was reused."""
        if not self.cached_tokens:
            return "recomputed"
        return max(SOURCES, key=lambda source: getattr(self, f"{source}_tokens"))


def _apply(answer: Answer, event: dict[str, Any]) -> bool:
    """Fold one SSE event into ``answer``; return whether it had tokens or the end. Raises RequestError for an error."""
    if "error" in event:
        raise RequestError(str(event["error"].get("code")), str(event["error"].get("message")))
    has_tokens = False
    answer.prompt_token_ids = event.get("prompt_token_ids") or answer.prompt_token_ids
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        answer.text += choice.get("text") or delta.get("content") or ""
        answer.token_ids += choice.get("token_ids") or []
        answer.margins += _margins(choice.get("logprobs") or {})
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        has_tokens |= bool(choice.get("token_ids") or choice.get("text") or delta.get("content"))
        has_tokens |= bool(choice.get("finish_reason"))
    if usage := event.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = details.get("cached_tokens", 0)
        for source in SOURCES:
            setattr(answer, f"{source}_tokens", details.get(f"{source}_tokens", 0))
        answer.importance = usage.get("importance")
    if timing := event.get("timing"):
        answer.timing_ms = timing
    return has_tokens


def _margins(logprobs: dict[str, Any]) -> list[float]:
    """Return the margins of a chat chunk, which has them with ``top_logprobs`` of two or more."""
    tops = [[top["logprob"] for top in token["top_logprobs"]] for token in logprobs.get("content") or ()]
    return [top[0] - top[1] for top in tops if len(top) > 1]


async def stream_answer(client: httpx.AsyncClient, path: str, payload: dict[str, Any]) -> Answer:
    """POST ``payload`` as a streaming request with usage; return the complete answer. Raises RequestError."""
    answer = Answer()
    body = {**payload, "stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                try:
                    error = response.json()["error"]
                    code, message = str(error.get("code") or error.get("type")), str(error.get("message"))
                except (ValueError, KeyError, AttributeError):
                    code, message = f"http_{response.status_code}", response.text[:200]
                raise RequestError(code, message)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    break
                if _apply(answer, json.loads(data)) and not answer.ttft_s:
                    answer.ttft_s = time.perf_counter() - started
    except httpx.HTTPError as error:
        raise RequestError("transport", f"{type(error).__name__}: {error}") from error
    answer.total_s = time.perf_counter() - started
    if not answer.finish_reason:
        raise RequestError("transport", "the stream ended before the answer did")
    return answer


async def served_model(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the first entry of GET /v1/models: ``id``, ``max_model_len``, ``vocab_size``. Raises httpx.HTTPError."""
    entry: dict[str, Any] = (await client.get("/v1/models")).raise_for_status().json()["data"][0]
    return entry
