"""One streaming chat of one server: when its first token came, and what ``explain`` says of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from thermocline.load.clock import MonotonicClock
from thermocline.load.exchange import EventSplitter
from thermocline.load.http_client import OK, HttpClient

CONNECT_S = 30.0
MODEL_PARTS = ("load", "restore", "compute")
"""Parts of a time to first token that a model on a device takes; the others are ours."""

Messages = Sequence[dict[str, str]]


@dataclass(slots=True)
class Sample:
    """One answer. ``parts`` are milliseconds by ``explain``, which only our cells have; ``gateway_ms`` is their sum.

    ``first_ns`` is the wall clock's time at which the client had the first token.
    """

    ttft_ms: float = 0.0
    first_ns: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    gateway_ms: float = 0.0
    answer_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""

    @property
    def outside_ms(self) -> float:
        """All but what the model took."""
        return sum(ms for name, ms in self.parts.items() if name not in MODEL_PARTS)

    @property
    def before_first_step_ms(self) -> float:
        """From the complete HTTP request to the worker's first step."""
        return sum(ms for name, ms in self.parts.items() if name not in (*MODEL_PARTS, "deliver"))


class AskFailed(Exception):
    """A server did not answer as it should."""


class Asker:
    """Asks one server. ``explains``: it is one of ours, which says what a time to first token is made of."""

    def __init__(self, base_url: str, model: str, *, explains: bool) -> None:
        self._model, self._explains = model, explains
        self._http = HttpClient(base_url, {}, MonotonicClock(), connect_timeout_s=CONNECT_S)

    def close(self) -> None:
        self._http.close()

    async def ask(self, messages: Messages, *, max_tokens: int = 2) -> Sample:
        """A greedy answer of exactly so many tokens. Raises AskFailed."""
        body: dict[str, Any] = {
            "model": self._model, "messages": messages, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self._explains:
            body["explain"] = True
        data, sample, splitter = msgspec.json.encode(body), Sample(), EventSplitter()
        pieces: list[str] = []

        def take(piece: bytes, now_s: float) -> None:
            for event in splitter.feed(piece):
                if event != b"[DONE]":
                    self._read(msgspec.json.decode(event), sample, pieces, now_s)

        begun_s = time.perf_counter()
        response = await self._http.send("POST", "/v1/chat/completions", data, take)
        if response.status != OK or not sample.first_ns:
            raise AskFailed(f"status {response.status}: {response.body[:500].decode(errors='replace')}")
        if self._explains and not sample.parts:
            raise AskFailed("an answer came without its explanation")
        # A cell begins the stream of an answer that is long in coming before it has a token.
        sample.ttft_ms = max((sample.ttft_ms - begun_s) * 1e3, sample.gateway_ms)
        sample.text = "".join(pieces)
        return sample

    def _read(self, event: dict[str, Any], sample: Sample, pieces: list[str], now_s: float) -> None:
        if event.get("error"):
            raise AskFailed(str(event["error"]))
        for choice in event.get("choices", ()):
            if not sample.first_ns:  # All these servers begin with the role, once there is a token.
                sample.ttft_ms, sample.first_ns = now_s, time.time_ns()
            pieces.append((choice.get("delta") or {}).get("content") or "")
        if (usage := event.get("usage")) is not None:
            sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if (explanation := event.get("explanation")) is not None:
            sample.answer_id = explanation["request_id"]
            sample.gateway_ms = explanation["ttft_ms"]
            for part in explanation["parts"]:
                sample.parts[part["name"]] = sample.parts.get(part["name"], 0.0) + part["ms"]
