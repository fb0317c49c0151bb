"""The fixed part of a request: a prompt of 900 tokens, all but the end cached, idle and beside running streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from bench.long_prompts.asking import Asker, Sample
from bench.long_prompts.cached import QUESTION_TOKENS, asking
from bench.long_prompts.figures import of_samples, spread
from bench.long_prompts.model import Texts
from bench.long_prompts.servers import model_name
from shared.codec import decode
from shared.messages.tokens import TokenBatch
from thermocline.supervisor.api import RunningCell

PROMPT_TOKENS = 900
STREAMS = 8
STREAM_TOKENS = 2_000
WARM_UP = 5
PAUSE_S = (0.02, 0.06)
"""Between two probes, drawn anew each time, so that they do not fall into step with anything."""

TARGETS = {"first_step_p50_ms": 2.5, "first_step_p99_ms": 5.0, "delivered_p50_ms": 0.5}


class TokenTap(asyncio.Protocol):
    """Hears what workers tell gateways, and keeps it to be read afterwards: reading it now would take time."""

    def __init__(self, user: str, password: str) -> None:
        self._hello = json.dumps({"verbose": False, "user": user, "pass": password})
        self._heard = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(f"CONNECT {self._hello}\r\nSUB tc.tokens.> 1\r\n".encode())

    def data_received(self, data: bytes) -> None:
        self._heard += data
        if data.startswith(b"PING") and self._transport is not None:
            self._transport.write(b"PONG\r\n")

    def sampled_ns(self) -> dict[str, int]:
        """When each request's first token was sampled, by its id; wall-clock ns of the worker."""
        found: dict[str, int] = {}
        heard, at = bytes(self._heard), 0
        while (end := heard.find(b"\r\n", at)) >= 0:
            line, at = heard[at:end], end + 2
            if line.startswith(b"MSG "):
                size = int(line.rsplit(b" ", 1)[1])
                for item in decode(heard[at : at + size], TokenBatch).items:
                    if item.timing is not None:
                        found[item.request_id] = item.timing.first_token_ns
                at += size + 2
        return found


@contextlib.asynccontextmanager
async def _tapped(cell: RunningCell) -> AsyncIterator[TokenTap]:
    url = urlsplit(cell.nats_url.split(",")[0])
    tap = TokenTap(url.username or "", url.password or "")
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: tap, url.hostname or "", url.port or 4222)
    try:
        yield tap
    finally:
        transport.abort()


@contextlib.asynccontextmanager
async def _streams(cell: RunningCell, texts: Texts, count: int) -> AsyncIterator[None]:
    """Keep so many answers growing."""

    async def go_on() -> None:
        asker = Asker(cell.base_url, model_name(cell.base_url), explains=False)
        try:
            while True:
                prompt = [{"role": "user", "content": texts.text(QUESTION_TOKENS)}]
                await asker.ask(prompt, max_tokens=STREAM_TOKENS)
        finally:
            asker.close()

    tasks = [asyncio.create_task(go_on()) for _ in range(count)]
    try:
        await asyncio.sleep(1.0 if count else 0.0)
        yield
    finally:
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def fixed(cells: Mapping[str, RunningCell], texts: Texts, probes: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures by cell, ``idle`` and ``busy``; cells are asked in turn, and once more the other way round."""
    document = texts.text(PROMPT_TOKENS)
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in cells}
    for load, streams in (("idle", 0), ("busy", STREAMS)):
        halves: dict[str, list[Probed]] = {name: [] for name in cells}
        for order in (list(cells), list(cells)[::-1]):
            for name in order:
                halves[name].append(await _probe(cells[name], texts, document, streams, -(-probes // 2)))
        for name, probed in halves.items():
            samples = [sample for half in probed for sample in half.samples]
            found[name][load] = _figures(samples, {key: ns for half in probed for key, ns in half.sampled_ns.items()})
            print(load, name, found[name][load], flush=True)
    return found


@dataclass(frozen=True, slots=True)
class Probed:
    """Answers, and when each one's first token was sampled."""

    samples: list[Sample]
    sampled_ns: dict[str, int]


async def _probe(cell: RunningCell, texts: Texts, document: str, streams: int, probes: int) -> Probed:
    """Ask one cell beside so many streams; the first answers warm up."""
    asker = Asker(cell.base_url, model_name(cell.base_url), explains=True)
    rng, samples = random.Random(PROMPT_TOKENS), []
    async with _tapped(cell) as tap, _streams(cell, texts, streams):
        for _ in range(WARM_UP + probes):
            samples.append(await asker.ask(asking(document, texts.text(QUESTION_TOKENS))))
            await asyncio.sleep(rng.uniform(*PAUSE_S))
    asker.close()
    return Probed(samples[WARM_UP:], tap.sampled_ns())


def _figures(samples: list[Sample], sampled_ns: dict[str, int]) -> dict[str, Any]:
    delivered = [(each.first_ns - sampled_ns[each.answer_id]) / 1e6 for each in samples if each.answer_id in sampled_ns]
    return of_samples(samples) | {
        "first_step_ms": spread(sample.before_first_step_ms for sample in samples),
        "delivered_ms": spread(delivered),
        "delivered_known": len(delivered),
    }


def with_targets(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures beside what they are to be."""
    return {
        load: row | {f"target_{load}_{name}": wanted for name, wanted in TARGETS.items()} for load, row in found.items()
    }
