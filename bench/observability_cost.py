"""What metrics, traces and explanations cost: cells that have them, beside one whose metrics count nothing.

    python -m bench.observability_cost [--rounds 30] [--requests 48] [--at-once 8] [--save]

Cells are started side by side, one for each way, and idle but for the one whose turn it is. In every round each of them
answers the same requests, the order of the cells drawn anew, so that what else the machine does meets all alike. A
way's ratio is its figure over that of ``none`` in the same round; the median of the rounds counts, and its 95 %
interval is drawn from the rounds by resampling. Two figures are taken:

- ``throughput``: output tokens a second at the client, which on shared cores swings by much more than is asked for;
- ``cpu``: CPU time that the cell's processes took for a token, by the kernel's account. Where the cores are what is
  short it is the inverse of throughput, and it does not depend on who else had them.

In ``none`` counters, gauges and histograms of every process do nothing when they are called. ``off`` is a cell as it
is by default: everything is counted, nobody asks for it, nothing is traced. ``scraped`` is asked for all its metrics
once a second, far more often than Prometheus would; ``traced_none`` has a tracer but traces no request; ``traced``
traces every one to a file; ``explained`` asks for an explanation with every answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
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
from thermocline.supervisor.ports import free_port

SCRAPE_EVERY_S = 1.0
PROCESSES = ("scheduler", "storage", "worker")
RESAMPLES = 2_000
COUNT_NOTHING = """
import prometheus_client

def nothing(*args, **more):
    pass

prometheus_client.Counter.inc = prometheus_client.Histogram.observe = nothing
prometheus_client.Gauge.inc = prometheus_client.Gauge.dec = prometheus_client.Gauge.set = nothing
"""
"""Python runs a module of the name sitecustomize in every process that finds one on its path."""


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
    path = folder / "path"
    path.mkdir()
    (path / "sitecustomize.py").write_text(COUNT_NOTHING, "utf-8")
    without = {"PYTHONPATH": os.pathsep.join((str(path), str(Path(__file__).parents[1])))}
    for name in ("none", "off", "scraped", "traced_none", "traced", "explained"):
        ports = {process: free_port() for process in PROCESSES} if name == "scraped" else {}
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
        cell = stack.enter_context(running(config, config_file=settings, environ=without if name == "none" else None))
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


async def one_turn(way: Way, prompts: list[list[int]], *, at_once: int, tokens: int) -> tuple[float, float]:
    """Output tokens a second of these prompts, and seconds of CPU time for each."""
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
            begun, begun_cpu = time.perf_counter(), cpu_s(way.cell)
            count = sum(await asyncio.gather(*(ask(prompt) for prompt in prompts)))
            return count / (time.perf_counter() - begun), (cpu_s(way.cell) - begun_cpu) / count


def cpu_s(cell: RunningCell) -> float:
    """CPU time of all threads of the cell's processes so far."""
    threads = (thread for pid in cell.pids().values() for thread in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def measure(
    ways: list[Way], *, rounds: int, requests: int, at_once: int, tokens: int, seed: int
) -> dict[str, Any]:
    """Figures by way, and their ratios to ``none`` in the same round."""
    rng = random.Random(seed)
    found: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    for number in range(rounds + 1):
        shared = [rng.randrange(8, 2000) for _ in range(64)]
        prompts = [shared + [rng.randrange(8, 2000) for _ in range(rng.randrange(16, 65))] for _ in range(requests)]
        for way in rng.sample(ways, len(ways)):
            turn = await one_turn(way, prompts, at_once=at_once, tokens=tokens)
            if number:  # The first round warms up.
                found[way.name].append(turn)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return {
        "rounds": rounds,
        "requests_a_round": requests,
        "at_once": at_once,
        "tokens_a_request": tokens,
        "ways": {
            name: {
                "tokens_per_s": statistics.median(rate for rate, _ in turns),
                "cpu_ms_a_token": 1e3 * statistics.median(cpu for _, cpu in turns),
                "throughput_ratio": ratio([turn[0] / none[0] for turn, none in zip(turns, found["none"], strict=True)]),
                "cpu_ratio": ratio([turn[1] / none[1] for turn, none in zip(turns, found["none"], strict=True)]),
            }
            for name, turns in found.items()
        },
    }


def ratio(values: list[float]) -> dict[str, float]:
    """The median, and where 95 % of the medians of resampled rounds lie."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return {
        "median": statistics.median(values),
        "from": medians[RESAMPLES // 40],
        "to": medians[-RESAMPLES // 40 - 1],
    }


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
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
        ratios = (
            f"{figure} {one['median']:.3f} ({one['from']:.3f} to {one['to']:.3f})"
            for figure, one in (("throughput", way["throughput_ratio"]), ("cpu", way["cpu_ratio"]))
        )
        print(f"{name:12} {way['tokens_per_s']:7.1f} tok/s {way['cpu_ms_a_token']:6.3f} ms CPU a token ", *ratios)
    if options.save:
        print("->", results_file.write("observability_cost", results, seed=options.seed))


if __name__ == "__main__":
    main()
