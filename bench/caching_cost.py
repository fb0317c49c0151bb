"""What the caching machinery costs where it is of no use: cells that keep KV on every tier, beside one that keeps none,
asked for prompts of which no two share anything.

    python -m bench.caching_cost [--rounds 20] [--model DIR] [--ways off,memory] [--share 0.5] [--save]

Cells are started side by side, one for each way, and idle but for the one whose turn it is. In every round each of them
answers the same requests, the order of the cells drawn anew, and the next begins when the last has written what it had
to. No prompt comes twice, in any round, so nothing is ever found; should any token be, the run ends with an error. A
way's ratio is its figure over that of ``off`` in the same round; the median of the rounds counts, and its 95 % interval
is drawn from the rounds by resampling. Two figures are taken:

- ``throughput``: tokens a second at the client. What is written behind an answer takes cores from the next one;
- ``cpu``: CPU time that the cell's processes took for a token, what is written after the last answer included. It does
  not depend on who else had the cores, and says what all of the machinery takes, also where cores are idle.

``off`` has ``prefix_caching`` off and no host tier: nothing is looked up, kept or copied. ``opted_out`` has everything
on, and requests that say that they neither read nor write it. ``memory`` is what ``thermocline up`` starts by itself:
device and host memory. ``everything`` has a disk too, to which all KV is written at once, and what goes with it: hidden
states of the form that the cell chooses, and its restoration. ``selective`` is the same, but that host memory and disk
take only what was used twice (``admission`` and ``disk_writes``), which here is nothing. Pools are so small that every
round evicts.

Three loads: ``serving`` counts output tokens of requests with prompts of 128 to 256 tokens, ``prefill`` the prompt
tokens of prompts of 1,024 that are answered with one token, and ``decode`` output tokens behind prompts of 16.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from bench.resampling import median_interval
from shared.config import parse_bytes
from shared.model_files import load_config
from thermocline.client import served_model
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig, bundled_model

ADMIN_KEY = "key-of-a-bench-that-ends-soon"
SETTLED_WITHIN_S = 120.0
FIRST_TOKEN_ID = 8
"""Ids below are the tokenizer's own."""

MOVED = ("evicted_pages_device", "evicted_pages_host", "backups_done", "saved_chunks", "saved_hidden_chunks")
"""Counters of the core by which one sees that the machinery was at work."""


@dataclass(frozen=True)
class Way:
    """A cell, and what requests say of its cache."""

    name: str
    cell: RunningCell
    hints: dict[str, bool] | None = None


@dataclass(frozen=True)
class Load:
    """Requests of one rate: how many, at once, their prompts' and answers' tokens, and which of them count."""

    name: str
    requests: int
    at_once: int
    prompt_tokens: tuple[int, int]
    answer_tokens: int
    counts_prompts: bool = False

    def prompts(self, rng: random.Random, vocabulary: int, share: float = 1.0) -> list[list[int]]:
        """Prompts of random tokens, for a share of the requests: even their first pages differ from all others."""
        lengths = [rng.randint(*self.prompt_tokens) for _ in range(max(self.at_once, round(self.requests * share)))]
        return [[rng.randrange(FIRST_TOKEN_ID, vocabulary) for _ in range(length)] for length in lengths]


WAYS = ("off", "opted_out", "memory", "selective", "everything")

LOADS = (
    Load("serving", requests=48, at_once=8, prompt_tokens=(128, 256), answer_tokens=24),
    Load("prefill", requests=16, at_once=4, prompt_tokens=(1024, 1024), answer_tokens=1, counts_prompts=True),
    Load("decode", requests=16, at_once=8, prompt_tokens=(16, 16), answer_tokens=64),
)


def start_ways(
    stack: ExitStack, folder: Path, model: Path, device_kv_bytes: int, named: Sequence[str] = WAYS
) -> list[Way]:
    """The cells of the ways that are named, ready."""
    settings = folder / "settings.toml"
    settings.write_text(f'[gateway]\nadmin_key = "{ADMIN_KEY}"\n', encoding="utf-8")
    without = folder / "off.toml"
    without.write_text(settings.read_text("utf-8") + "[scheduler]\nhost_tier = false\n", encoding="utf-8")
    choosy = folder / "selective.toml"
    choosy.write_text(
        settings.read_text("utf-8") + '[scheduler]\nadmission = "selective"\ndisk_writes = "selective"\n',
        encoding="utf-8",
    )
    small: dict[str, Any] = {
        "model": str(model),
        "port": 0,
        "threads": 1,
        "device_kv_bytes": device_kv_bytes,
        "host_kv_bytes": 2 * device_kv_bytes,
    }
    disk: dict[str, Any] = {"disk_kv_bytes": 8 * device_kv_bytes, "hidden_bytes": 32 * 2**20}
    cells = {
        "off": (SupervisorConfig(**small, prefix_caching=False), without),
        "opted_out": (SupervisorConfig(**small, disk_dir=(str(folder / "unused"),), **disk), settings),
        "memory": (SupervisorConfig(**small), settings),
        "selective": (SupervisorConfig(**small, disk_dir=(str(folder / "choosy"),), **disk), choosy),
        "everything": (SupervisorConfig(**small, disk_dir=(str(folder / "disk"),), **disk), settings),
    }
    ways = []
    for name in named:
        config, file = cells[name]
        cell = stack.enter_context(running(config, config_file=file))
        ways.append(Way(name, cell, {"read": False, "write": False} if name == "opted_out" else None))
    return ways


@dataclass(frozen=True)
class Turn:
    """What a way did in one round: tokens a second, and CPU seconds a token of each process."""

    rate: float
    cpu: dict[str, float]

    @property
    def cpu_s(self) -> float:
        return sum(self.cpu.values())


def cpu_by_process(cell: RunningCell) -> dict[str, float]:
    """CPU seconds of all threads of each of the cell's processes so far."""
    return {
        name: sum(
            int((thread / "schedstat").read_text(encoding="ascii").split()[0])
            for thread in Path(f"/proc/{pid}/task").iterdir()
        )
        / 1e9
        for name, pid in cell.pids().items()
    }


async def one_turn(way: Way, load: Load, prompts: list[list[int]]) -> Turn:
    """Answer these prompts. Raises RuntimeError where anything was found in a cache."""
    async with httpx.AsyncClient(base_url=way.cell.base_url, timeout=300, trust_env=False) as client:
        model = (await served_model(client))["id"]
        gate = asyncio.Semaphore(load.at_once)

        async def ask(prompt: list[int]) -> int:
            body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": load.answer_tokens}
            body |= {"temperature": 0, "ignore_eos": True} | ({"cache": way.hints} if way.hints else {})
            async with gate:
                usage = (await client.post("/v1/completions", json=body)).raise_for_status().json()["usage"]
            if (usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
                raise RuntimeError(f"{way.name} found tokens in its cache, and there should be none to find")
            return int(usage["prompt_tokens" if load.counts_prompts else "completion_tokens"])

        begun, begun_cpu = time.perf_counter(), cpu_by_process(way.cell)
        count = sum(await asyncio.gather(*(ask(prompt) for prompt in prompts)))
        took_s = time.perf_counter() - begun
        await settled(client)
        cpu = {name: (used - begun_cpu[name]) / count for name, used in cpu_by_process(way.cell).items()}
        return Turn(count / took_s, cpu)


async def cell_status(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.get("/v1/cell", headers={"x-admin-key": ADMIN_KEY})
    status: dict[str, Any] = answer.raise_for_status().json()
    return status


async def settled(client: httpx.AsyncClient) -> None:
    """Wait until nothing is being written any more, so that it takes no time from the next."""
    async with asyncio.timeout(SETTLED_WITHIN_S):
        while True:
            status = await cell_status(client)
            counters = status["counters"]
            backups = counters.get("backups_started", 0) - sum(
                counters.get(f"backups_{end}", 0) for end in ("done", "failed")
            )
            if not (status["running"] or status["saves"] or status["fetches"] or backups > 0):
                return
            await asyncio.sleep(0.05)


async def moved(way: Way) -> dict[str, int]:
    """What the cell did for its cache in all."""
    async with httpx.AsyncClient(base_url=way.cell.base_url, timeout=60, trust_env=False) as client:
        counters = (await cell_status(client))["counters"]
    return {name: counters.get(name, 0) for name in MOVED}


async def measure(ways: list[Way], *, vocabulary: int, rounds: int, seed: int, share: float = 1.0) -> dict[str, Any]:
    """Figures by load and way, and their ratios to ``off`` in the same round."""
    rng = random.Random(seed)
    found: dict[str, dict[str, list[Turn]]] = {load.name: {way.name: [] for way in ways} for load in LOADS}
    for number in range(rounds + 1):
        for load in LOADS:
            prompts = load.prompts(rng, vocabulary, share)
            for way in rng.sample(ways, len(ways)):
                turn = await one_turn(way, load, prompts)
                if number:  # The first round warms up, and fills the pools.
                    found[load.name][way.name].append(turn)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return {
        "rounds": rounds,
        "share": share,
        "loads": {load.name: {"requests": load.requests, "at_once": load.at_once} for load in LOADS},
        "figures": {name: figures(turns) for name, turns in found.items()},
        "moved": {way.name: await moved(way) for way in ways},
    }


def figures(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Of one load, by way; turns are in the order of the rounds."""
    return {
        name: {
            "tokens_per_s": statistics.median(turn.rate for turn in own),
            "cpu_ms_a_token": 1e3 * statistics.median(turn.cpu_s for turn in own),
            "cpu_ms_a_token_by_process": {
                process: 1e3 * statistics.median(turn.cpu[process] for turn in own) for process in own[0].cpu
            },
            "throughput_ratio": ratio([one.rate / off.rate for one, off in zip(own, turns["off"], strict=True)]),
            "cpu_ratio": ratio([one.cpu_s / off.cpu_s for one, off in zip(own, turns["off"], strict=True)]),
        }
        for name, own in turns.items()
    }


def ratio(values: list[float]) -> dict[str, float]:
    """The median, and where 95 % of the medians of resampled rounds lie."""
    low, high = median_interval(values, seed=0)
    return {"median": statistics.median(values), "from": low, "to": high}


def named_ways(text: str) -> tuple[str, ...]:
    """Ways from the command line. Raises ArgumentTypeError for one that is not there, and without ``off``."""
    named = tuple(dict.fromkeys(text.split(",")))
    if not set(named) <= set(WAYS) or "off" not in named:
        raise argparse.ArgumentTypeError(f"off and others of {', '.join(WAYS)}, not {text}")
    return named


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = results_file.arguments(__doc__, "--seed", "--save")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", type=Path, default=bundled_model(), help="folder of a model")
    parser.add_argument(
        "--device-kv-bytes", type=parse_bytes, default=32 * 2**20, help="device pool; host memory has twice as much"
    )
    parser.add_argument("--ways", type=named_ways, default=WAYS, help="which cells, off among them")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each load, for a larger model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways = start_ways(stack, Path(folder), options.model, options.device_kv_bytes, options.ways)
        vocabulary = load_config(options.model)["vocab_size"]
        results = asyncio.run(
            measure(ways, vocabulary=vocabulary, rounds=options.rounds, seed=options.seed, share=options.share)
        )
    results |= {"model": options.model.name, "device_kv_bytes": options.device_kv_bytes}
    for load, ways_of in results["figures"].items():
        for name, way in ways_of.items():
            print(
                f"{load:8} {name:10} {way['tokens_per_s']:8.1f} tok/s {way['cpu_ms_a_token']:7.3f} ms CPU a token ",
                *(
                    f" {figure} {one['median']:.3f} ({one['from']:.3f} to {one['to']:.3f})"
                    for figure, one in (("throughput", way["throughput_ratio"]), ("cpu", way["cpu_ratio"]))
                ),
            )
            print(" " * 20, {process: round(ms, 3) for process, ms in way["cpu_ms_a_token_by_process"].items()})
    print("moved", results["moved"])
    if options.save:
        own = "" if options.model == bundled_model() else f"_{options.model.name}"
        print("->", results_file.write(f"caching_cost{own}", results, seed=options.seed))


if __name__ == "__main__":
    main()
