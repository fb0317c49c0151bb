"""How long a cell is without a scheduler when the active one is killed and another stands by.

A whole cell on this machine, every process and NATS real, with two schedulers. Clients stream answers all the time; the
active scheduler is killed (SIGKILL) again and again, and started again by the supervisor as the standby. For each kill:

- ``take_over``: from the kill to the successor's ``SchedulerStarted`` in the stream, by the broker's timestamp;
- ``longest_pause``: the longest time between two messages with tokens that a stream open at the time of the kill saw
  until one second after the take-over, the first message of a request that was waiting included;
- ``calm_pause``: the same in the seconds before the kill, which is what the load alone does.

A stream that breaks, or an answer that differs from the one to the same request without kills, ends the benchmark.

``python -m bench.take_over [--kills 20] [--save]``
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench import results_file
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus, StreamMessage
from shared.codec import decode, decode_input, encode
from shared.errors import CodecError, Unavailable
from shared.messages.cell_events import SchedulerStarted
from shared.messages.status import CellStatus, GetStatus
from thermocline.client import served_model
from thermocline.client.figures import quantile
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

TARGET_S = 1.0
CALM_S = 2.0
AFTER_S = 1.0
WAIT_S = 60.0


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

    async def _ask(self, prompt: list[int]) -> list[int]:
        body = {"model": self._model["id"], "prompt": prompt, "max_tokens": self._tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
        stream = Stream(time.monotonic())
        self.streams.append(stream)
        tokens: list[int] = []
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
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


async def next_start(bus: Bus, behind_seq: int, epoch: int) -> StreamMessage:
    """The next scheduler's start in the stream."""
    async with asyncio.timeout(WAIT_S):
        async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=behind_seq + 1):
            try:
                started = decode_input(message.data)
            except CodecError:
                continue
            if isinstance(started, SchedulerStarted) and started.epoch > epoch:
                return message
    raise SystemExit("nobody took over")


async def standing_by(cell: RunningCell, names: list[str], count: int) -> None:
    """Wait until the logs of the schedulers show so many entries into standby."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if sum(cell.logs(name, 100_000).count("standing_by") for name in names) >= count:
                return
            await asyncio.sleep(0.05)


async def kill_once(cell: RunningCell, bus: Bus, load: Load) -> dict[str, float]:
    """Seconds of one take-over."""
    await asyncio.sleep(CALM_S)
    status = await active(bus)
    calm_pause_s = load.longest_pause_s(time.monotonic() - CALM_S, time.monotonic())
    seq = (await bus.stream_info(subjects.INPUTS_STREAM)).last_seq
    killed_s, killed_ns = time.monotonic(), time.time_ns()
    cell.kill(status.scheduler_id, signal.SIGKILL)
    started = await next_start(bus, seq, status.epoch)
    await asyncio.sleep(AFTER_S)
    pause_s = load.longest_pause_s(killed_s, time.monotonic())
    load.forget(killed_s)
    return {
        "take_over": (started.time_ns - killed_ns) / 1e9,
        "longest_pause": pause_s,
        "calm_pause": calm_pause_s,
    }


async def measure(cell: RunningCell, options: argparse.Namespace) -> dict[str, Any]:
    """All kills, one after another."""
    names = [name for name in cell.children() if name.startswith("scheduler")]
    bus = await connect(tuple(cell.nats_url.split(",")), "bench")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cell.base_url, timeout=WAIT_S, limits=limits, trust_env=False) as client:
        load = Load(client, await served_model(client), options)
        await load.learn()
        clients = [asyncio.create_task(load.run(number)) for number in range(options.clients)]
        rows: list[dict[str, float]] = []
        for number in range(options.kills):
            await standing_by(cell, names, len(names) - 1 + number)
            killing = asyncio.create_task(kill_once(cell, bus, load))
            done, _ = await asyncio.wait({killing, *clients}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {killing}:
                task.result()  # A client only ends by an error.
            rows.append(row := killing.result())
            print(f"{number + 1:4}: " + ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in row.items()))
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    answers = (await active(bus)).counters
    await bus.close()
    return {
        "kills": options.kills,
        "target_take_over_p99_ms": TARGET_S * 1e3,
        **{f"{name}_ms": spread([row[name] * 1e3 for row in rows]) for name in rows[0]},
        "requests_accepted": answers["requests_accepted"],
        "workers_joined": answers["workers_joined"],
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and extremes."""
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--schedulers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write bench/results/take_over.json too")
    options = parser.parse_args()
    if options.kills < 1 or options.schedulers < 2:
        parser.error("there must be a kill, and somebody to take over")
    with running(SupervisorConfig(schedulers=options.schedulers, port=0)) as cell:
        found = asyncio.run(measure(cell, options))
    for name, value in found.items():
        shown = {key: round(number, 1) for key, number in value.items()} if isinstance(value, dict) else value
        print(f"{name:26} {shown}")
    settings = {name: value for name, value in vars(options).items() if name not in ("save", "seed")}
    if options.save:
        print(results_file.write("take_over", {"settings": settings, **found}, seed=options.seed))


if __name__ == "__main__":
    main()
