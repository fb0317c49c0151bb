"""Clients that stream answers while processes of their cell are killed: for benchmarks that ask what they notice."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from bench import results_file
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import Unavailable
from shared.messages.status import CellStatus, GetStatus
from thermocline.client import served_model
from thermocline.client.figures import quantile
from thermocline.supervisor.api import RunningCell

WAIT_S = 120.0

Found = TypeVar("Found")


@dataclass
class Stream:
    """One request: when it was sent and when each message with tokens came (s, monotonic)."""

    sent_s: float
    answer_id: str = ""  # Known once something came.
    came_s: list[float] = field(default_factory=list)
    ended_s: float = float("inf")

    def longest_pause_s(self, begin_s: float, end_s: float) -> float:
        """The longest silence between two points of this stream that touches the time in between."""
        points = [self.sent_s, *self.came_s]
        if self.ended_s == float("inf"):
            points.append(end_s)
        gaps = [late - early for early, late in itertools.pairwise(points) if late > begin_s and early < end_s]
        return max(gaps, default=0.0)


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, client: httpx.AsyncClient, model: dict[str, Any], options: argparse.Namespace) -> None:
        self.streams: list[Stream] = []
        self.refused = 0  # How often a client was answered 503, and tried again.
        self._client = client
        self._model = model
        self._tokens = options.tokens
        rng = random.Random(options.seed)
        self._prompts = [[rng.randrange(8, model["vocab_size"]) for _ in range(128)] for _ in range(options.clients)]
        self._expected: list[list[int]] = []

    async def learn(self) -> None:
        """What each prompt is answered with when nothing happens."""
        self._expected = await asyncio.gather(*(self._ask(prompt) for prompt in self._prompts))
        self.streams.clear()

    async def run(self, number: int) -> None:
        """One client, for ever."""
        while True:
            tokens = await self._ask(self._prompts[number])
            if tokens != self._expected[number]:
                raise SystemExit(f"client {number} was answered with other tokens than without kills")

    async def probe(self) -> float:
        """Send a request of one token now; returns when it had its answer (s, monotonic)."""
        stream = Stream(time.monotonic())
        await self._tried(stream, self._prompts[0], 1)
        return stream.came_s[0]

    async def _ask(self, prompt: list[int]) -> list[int]:
        stream = Stream(time.monotonic())
        self.streams.append(stream)
        return await self._tried(stream, prompt, self._tokens)

    async def _tried(self, stream: Stream, prompt: list[int], max_tokens: int) -> list[int]:
        """The answer of whichever try is not refused for a state that passes."""
        while True:
            tokens = await self._stream(stream, prompt, max_tokens)
            if tokens is not None:
                return tokens
            self.refused += 1

    async def _stream(self, stream: Stream, prompt: list[int], max_tokens: int) -> list[int] | None:
        body = {"model": self._model["id"], "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
        tokens: list[int] = []
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE and "retry-after" in response.headers:
                await asyncio.sleep(float(response.headers["retry-after"]))
                return None
            response.raise_for_status()
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not data.startswith("{"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise SystemExit(f"a stream broke: {event['error']}")
                stream.answer_id = event["id"]
                ids = [one for choice in event["choices"] for one in choice.get("token_ids") or ()]
                if ids:
                    stream.came_s.append(time.monotonic())
                    tokens += ids
        stream.ended_s = time.monotonic()
        return tokens

    def longest_pause_s(self, begin_s: float, end_s: float) -> float:
        """Over all streams that were open in between."""
        open_then = (one for one in self.streams if one.sent_s < end_s and one.ended_s > begin_s)
        return max((one.longest_pause_s(begin_s, end_s) for one in open_then), default=0.0)

    def forget(self, before_s: float) -> None:
        """Drop streams that ended before."""
        self.streams = [one for one in self.streams if one.ended_s >= before_s]


async def active(bus: Bus) -> CellStatus:
    """The active scheduler's status."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return decode(await bus.call(subjects.rpc("scheduler", "status"), encode(GetStatus())), CellStatus)
            except Unavailable:
                await asyncio.sleep(0.02)


async def under_load(
    cell: RunningCell, options: argparse.Namespace, kill: Callable[[Bus, Load, int], Awaitable[Found]]
) -> tuple[list[Found], dict[str, int]]:
    """Call ``kill`` with the number of each kill while clients stream; returns what it found, and the cell's counters.

    ``options`` has kills, clients, tokens and seed. Ends the program when a client ends.
    """
    bus = await connect(tuple(cell.nats_url.split(",")), "bench")
    limits = httpx.Limits(max_connections=None)
    found: list[Found] = []
    async with httpx.AsyncClient(base_url=cell.base_url, timeout=WAIT_S, limits=limits, trust_env=False) as client:
        load = Load(client, await served_model(client), options)
        await load.learn()
        clients = [asyncio.create_task(load.run(number)) for number in range(options.clients)]
        for number in range(options.kills):
            killing = asyncio.ensure_future(kill(bus, load, number))
            done, _ = await asyncio.wait({killing, *clients}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {killing}:
                task.result()  # A client only ends by an error.
            found.append(killing.result())
        for client_task in clients:
            client_task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    counters = (await active(bus)).counters
    await bus.close()
    return found, counters


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and extremes."""
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "min": min(values), "max": max(values)}


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What all these benchmarks can be told."""
    parser = results_file.arguments(doc, "--seed", "--save")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    return parser


def report(name: str, found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print what was found, and save it where that was asked for."""
    width = max(map(len, found)) + 1
    for key, value in found.items():
        shown = {part: round(number, 1) for part, number in value.items()} if isinstance(value, dict) else value
        print(f"{key:{width}} {shown}")
    settings = {key: value for key, value in vars(options).items() if key not in ("save", "seed")}
    if options.save:
        print(results_file.write(name, {"settings": settings, **found}, seed=options.seed))
