"""Whether the parts of an explanation add up to the time to first token, and what a client sees beyond them.

    python -m bench.explain_sums [--rounds 25] [--tokens 768] [--seed 1] [--save]

Two real cells, one after the other. In each round of the first, four questions about a new document come at once (one
computes it, three are deferred), then one each while the document is on the device, in host memory and on the disk.
The second restores documents from hidden states. Every answer streams with ``explain``. The residual is the measured
time to first token less the sum of the parts, as a share of the former: once with the time that the gateway measured,
which the parts must make up within 5 %, and once with the client's, from the first byte that it writes to the first
piece of the body, which has the way there and back in it too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop

from bench import results_file
from bench.emptying import empty, rest
from bench.make_model import make_model
from bench.restoration import hidden_pool, profile_of
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from thermocline.client import served_model
from thermocline.load.clock import MonotonicClock
from thermocline.load.http_client import OK, HttpClient
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

VOCABULARY = 16_000
LAYERS = HEADS = 8
AT_ONCE = 4
QUESTION_TOKENS = 24
LIMIT = 0.05
CLOCK = MonotonicClock()
COMMON = {"THERMOCLINE_PREFETCH_WAIT": "full", "THERMOCLINE_FETCH_DEADLINE_MS": "600000"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One explained answer. Times in milliseconds."""

    kind: str
    parts: dict[str, float]
    gateway_ms: float
    client_ms: float

    @property
    def sum_ms(self) -> float:
        return sum(self.parts.values())


@dataclass(slots=True)
class Asker:
    """Asks one cell."""

    client: HttpClient
    bus: Bus
    model: str
    rng: random.Random

    def fresh(self, tokens: int) -> list[int]:
        return [self.rng.randrange(8, VOCABULARY) for _ in range(tokens)]

    async def ask(self, document: list[int], kind: str = "") -> Sample:
        """One token behind a document and a new question; ``kind`` names it, or else what most of its prompt was."""
        body = {
            "model": self.model, "prompt": document + self.fresh(QUESTION_TOKENS), "max_tokens": 1, "temperature": 0,
            "ignore_eos": True, "stream": True, "explain": True, "return_token_ids": True,
        }  # fmt: skip
        data = msgspec.json.encode(body)
        pieces: list[bytes] = []
        came_s: list[float] = []

        def take(piece: bytes, now_s: float) -> None:
            pieces.append(piece)
            came_s.append(now_s)

        begun_s = CLOCK.now_s()
        response = await self.client.send("POST", "/v1/completions", data, take)
        if response.status != OK or not came_s:
            raise SystemExit(f"status {response.status}: {response.body.decode(errors='replace')}")
        first_ms = (came_s[0] - begun_s) * 1e3
        explanation: dict[str, Any] | None = None
        for line in b"".join(pieces).splitlines():
            if line.startswith(b"data: {"):
                explanation = msgspec.json.decode(line[6:]).get("explanation") or explanation
        if explanation is None:
            raise SystemExit("an answer came without its explanation")
        parts: dict[str, float] = {}
        for part in explanation["parts"]:
            parts[part["name"]] = parts.get(part["name"], 0.0) + part["ms"]
        found: dict[str, int] = {}
        for span in explanation["prompt"]:
            found[span["source"]] = found.get(span["source"], 0) + span["end"] - span["start"]
        named = "deferred" if "deferral" in parts else max(found, key=lambda source: found[source])
        return Sample(kind or named, parts, explanation["ttft_ms"], first_ms)


async def tiers(asker: Asker, rounds: int, tokens: int) -> list[Sample]:
    """Rounds of the first cell."""
    samples = []
    for _ in range(rounds):
        document = asker.fresh(tokens)
        samples += await asyncio.gather(*(asker.ask(document) for _ in range(AT_ONCE)))
        await rest(asker.bus)
        samples.append(await asker.ask(document))
        for emptied in (("device",), ("device", "host")):
            await rest(asker.bus)
            await empty(asker.bus, emptied)
            samples.append(await asker.ask(document))
        await rest(asker.bus)
    return samples


async def restorations(asker: Asker, rounds: int, tokens: int) -> list[Sample]:
    """Rounds of the second cell: each document is computed and kept, and then restored twice."""
    await hidden_pool(asker.bus)
    samples = []
    for _ in range(rounds):
        document = asker.fresh(tokens)
        samples.append(await asker.ask(document))
        for _ in range(2):
            await rest(asker.bus)
            await empty(asker.bus, ("device", "host"))
            samples.append(await asker.ask(document))
        await rest(asker.bus)
    return samples


async def drive(cell: RunningCell, work: Callable[[Asker], Awaitable[list[Sample]]], seed: int) -> list[Sample]:
    async with AsyncExitStack() as stack:
        bus = await connect((cell.nats_url,), "bench")
        stack.push_async_callback(bus.close)
        async with httpx.AsyncClient(base_url=cell.base_url, timeout=300, trust_env=False) as general:
            model = (await served_model(general))["id"]
        client = HttpClient(cell.base_url, {}, CLOCK, connect_timeout_s=10)
        stack.callback(client.close)
        asker = Asker(client, bus, model, random.Random(seed))
        await rest(bus)
        await asker.ask(asker.fresh(512))
        return await work(asker)


def measure(folder: Path, *, rounds: int, tokens: int, seed: int) -> list[Sample]:
    """All samples of both cells."""
    model = make_model(folder / "mha", seed=seed, kv_heads=HEADS, layers=LAYERS, heads=HEADS)
    room = 4 * (tokens + 512) * LAYERS * 2 * HEADS * 64 * 4
    samples: list[Sample] = []
    for name in ("tiers", "restored"):
        (folder / name).mkdir()
        config = SupervisorConfig(
            model=str(model), dtype="float32", port=0, device_kv_bytes=room, host_kv_bytes=2 * room,
            disk_dir=(str(folder / name),), disk_kv_bytes=8 * 2**30,
        )  # fmt: skip
        if name == "tiers":
            with running(config, environ=COMMON | {"THERMOCLINE_HOST_WRITES": "through"}) as cell:
                samples += uvloop.run(drive(cell, lambda asker: tiers(asker, rounds, tokens), seed))
            continue
        environ = COMMON | {
            "THERMOCLINE_HIDDEN_FORM": f"0/{LAYERS}/0",
            "THERMOCLINE_RESTORING": "hidden",
            "THERMOCLINE_HIDDEN_BYTES": str(5 * (tokens + 1024) * LAYERS * HEADS * 64 * 4),
            "THERMOCLINE_PROFILE": str(profile_of(model)),
            "THERMOCLINE_PREFETCH_FRACTION": "1.0",
        }
        with running(config, environ=environ) as cell:
            samples += uvloop.run(drive(cell, lambda asker: restorations(asker, max(1, rounds // 2), tokens), seed))
    return samples


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Counts, medians of the parts, and the distribution of both residuals."""
    gateway = [abs(sample.gateway_ms - sample.sum_ms) / sample.gateway_ms for sample in samples]
    client = [(sample.client_ms - sample.sum_ms) / sample.client_ms for sample in samples]
    beyond = [sample.client_ms - sample.sum_ms for sample in samples]
    names = dict.fromkeys(name for sample in samples for name in sample.parts)
    return {
        "requests": len(samples),
        "ttft_ms": round(statistics.median(sample.gateway_ms for sample in samples), 2),
        "parts_ms": {
            name: round(statistics.median(sample.parts.get(name, 0.0) for sample in samples), 3) for name in names
        },
        "gateway_residual": {"median": statistics.median(gateway), "largest": max(gateway)},
        "client_residual": quantiles(client),
        "client_beyond_ms": quantiles(beyond),
        "client_within_5_percent": round(sum(abs(each) <= LIMIT for each in client) / len(client), 4),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)

    return {"p5": at(0.05), "p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "largest": at(1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write bench/results/explain_sums.json too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        samples = measure(Path(scratch), rounds=options.rounds, tokens=options.tokens, seed=options.seed)
    kinds = dict.fromkeys(sample.kind for sample in samples)
    results = {
        "tokens": options.tokens,
        "all": summary(samples),
        "by_kind": {kind: summary([sample for sample in samples if sample.kind == kind]) for kind in kinds},
    }
    print(json.dumps(results, indent=1))
    if options.save:
        print(results_file.write("explain_sums", results, seed=options.seed))
    worst = results["all"]["gateway_residual"]["largest"]
    if worst > LIMIT:
        raise SystemExit(f"the parts of a request miss its time to first token by {worst:.1%}")


if __name__ == "__main__":
    main()
