"""What metrics that are scraped, traces and explanations cost: throughput of cells that have them, beside one that
has none.

    python -m bench.observability_cost [--rounds 6] [--requests 48] [--at-once 8] [--save]

Cells are started side by side, one for each way, and idle but for the one whose turn it is. In every round each of them
answers the same requests, the order of the cells turning from round to round, so that what else the machine does meets
all alike. A way's ratio is its throughput over that of ``off`` in the same round; the median counts.

``off`` traces nothing and is not scraped; ``scraped`` is asked for all its metrics once a second, far more often than
Prometheus would; ``traced_none`` has a tracer but traces no request; ``traced`` traces every one to a file;
``explained`` asks for an explanation with every answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from thermocline.client import served_model
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.ports import any_free

SCRAPE_EVERY_S = 1.0
PROCESSES = ("scheduler", "storage", "worker")


@dataclass(frozen=True)
class Way:
    """A cell, and how it is watched."""

    name: str
    cell: RunningCell
    scraped: tuple[str, ...] = ()
    explains: bool = False


def start_ways(stack: ExitStack, folder: Path) -> list[Way]:
    """All cells, ready."""
    ways = []
    for name in ("off", "scraped", "traced_none", "traced", "explained"):
        ports = {process: any_free() for process in PROCESSES} if name == "scraped" else {}
        settings = folder / f"{name}.toml"
        settings.write_text("".join(f"[{one}]\nmetrics_port = {port}\n" for one, port in ports.items()), "utf-8")
        config = SupervisorConfig(
            port=0,
            threads=1,
            dtype="float32",
            device_kv_bytes=64 * 2**20,
            host_kv_bytes=64 * 2**20,
            traces=str(folder / f"{name}.jsonl") if name.startswith("traced") else "",
            trace_share=0.0 if name == "traced_none" else 1.0,
        )
        cell = stack.enter_context(running(config, config_file=settings))
        scraped = (cell.base_url, *(f"http://127.0.0.1:{port}" for port in ports.values())) if ports else ()
        ways.append(Way(name, cell, scraped, explains=name == "explained"))
    return ways


@asynccontextmanager
async def scraping(client: httpx.AsyncClient, urls: tuple[str, ...]) -> AsyncIterator[None]:
    """Ask for the metrics of all processes, again and again."""

    async def scrape() -> None:
        while True:
            for url in urls:
                (await client.get(f"{url}/metrics")).raise_for_status()
            await asyncio.sleep(SCRAPE_EVERY_S)

    task = asyncio.create_task(scrape())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def throughput(way: Way, prompts: list[list[int]], *, at_once: int, tokens: int) -> float:
    """Output tokens a second of these prompts."""
    async with httpx.AsyncClient(base_url=way.cell.base_url, timeout=120, trust_env=False) as client:
        model = (await served_model(client))["id"]
        gate = asyncio.Semaphore(at_once)

        async def ask(prompt: list[int]) -> int:
            body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
            body |= {"ignore_eos": True} | ({"explain": True} if way.explains else {})
            async with gate:
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            count: int = answer["usage"]["completion_tokens"]
            return count

        async with scraping(client, way.scraped):
            begun = time.perf_counter()
            counts = await asyncio.gather(*(ask(prompt) for prompt in prompts))
            return sum(counts) / (time.perf_counter() - begun)


async def measure(
    ways: list[Way], *, rounds: int, requests: int, at_once: int, tokens: int, seed: int
) -> dict[str, Any]:
    """Throughputs by way, and their ratios to ``off`` in the same round."""
    rng = random.Random(seed)
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds + 1):
        shared = [rng.randrange(8, 2000) for _ in range(64)]
        prompts = [shared + [rng.randrange(8, 2000) for _ in range(rng.randrange(16, 65))] for _ in range(requests)]
        for place in range(len(ways)):
            way = ways[(place + number) % len(ways)]
            rate = await throughput(way, prompts, at_once=at_once, tokens=tokens)
            if number:  # The first round warms up.
                found[way.name].append(rate)
    ratios = {
        name: [rate / off for rate, off in zip(rates, found["off"], strict=True)] for name, rates in found.items()
    }
    return {
        "rounds": rounds,
        "requests_a_round": requests,
        "at_once": at_once,
        "tokens_a_request": tokens,
        "ways": {
            name: {
                "tokens_per_s": statistics.median(found[name]),
                "ratio": statistics.median(each),
                "ratio_min_max": [min(each), max(each)],
            }
            for name, each in ratios.items()
        },
    }


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways = start_ways(stack, Path(folder))
        results = asyncio.run(
            measure(
                ways,
                rounds=options.rounds,
                requests=options.requests,
                at_once=options.at_once,
                tokens=options.tokens,
                seed=options.seed,
            )
        )
    for name, way in results["ways"].items():
        least, most = way["ratio_min_max"]
        print(f"{name:12} {way['tokens_per_s']:8.1f} tok/s  ratio {way['ratio']:.3f} ({least:.3f} to {most:.3f})")
    if options.save:
        print("->", results_file.write("observability_cost", results, seed=options.seed))


if __name__ == "__main__":
    main()
