"""TTFT of one shared prefix by where it is found: device, host, disk, object store, or nowhere.

A whole cell on this machine. For every repetition a new document is computed once, and then asked about while it is on
each tier in turn: tiers above are emptied by an order before each question, so what is measured is one load and
the computation of the question. The object store is a directory unless ``--remote`` names another.

``python -m bench.ttft_ladder [--repeats 7] [--tokens 4096] [--dtype float32] [--directory DIR] [--remote URL]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from bench.asking import ask_one
from bench.emptying import empty, rest
from bench.make_model import make_model
from shared.bus.nats_bus import connect
from thermocline.client import served_model
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

VOCABULARY = 16_000
QUESTION_TOKENS = 32
TIERS = ("recomputed", "device", "host", "disk", "remote")
# Write through to every tier; a whole wait, so that a slow tier shows as slow and not as recomputed.
SETTINGS = {"THERMOCLINE_HOST_WRITES": "through", "THERMOCLINE_PREFETCH_WAIT": "full"}
# What is emptied before the question that finds the document on a tier.
EMPTIED: dict[str, tuple[str, ...]] = {
    "device": (),
    "host": ("device",),
    "disk": ("device", "host"),
    "remote": ("device", "host", "disk"),
}


async def measure(base_url: str, nats: str, *, tokens: int, repeats: int, seed: int) -> dict[str, Any]:
    """Median TTFT in ms by tier, quartiles, and how many times faster than recomputing."""
    rng = random.Random(seed)

    def fresh(length: int) -> list[int]:
        return [rng.randrange(8, VOCABULARY) for _ in range(length)]

    times: dict[str, list[float]] = {name: [] for name in TIERS}
    bus = await connect((nats,), "bench")
    async with httpx.AsyncClient(base_url=base_url, timeout=300, trust_env=False) as client:
        model = (await served_model(client))["id"]
        await rest(bus)  # The cell serves before its host pool is made.
        await ask_one(client, model, fresh(512))
        for _ in range(repeats):
            document = fresh(tokens)
            for name in TIERS:
                if name in EMPTIED:
                    await empty(bus, EMPTIED[name])
                answer = await ask_one(client, model, document + fresh(QUESTION_TOKENS))
                if answer.source != name:
                    raise SystemExit(f"wanted {name}, got {answer}")
                times[name].append(answer.ttft_s * 1e3)
                await rest(bus)
    await bus.close()
    ladder = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        ladder[name] = {
            "ttft_ms": middle,
            "quartiles_ms": [low, high],
            "speedup": statistics.median(times["recomputed"]) / middle,
        }
        print(f"{name:<12} {middle:>9.1f} ms   {ladder[name]['speedup']:>6.1f}x", flush=True)
    return {"tokens": tokens, "question_tokens": QUESTION_TOKENS, "repeats": repeats, "by_tier": ladder}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--directory", default="", help="where disk tier and object store lie; default: temporary")
    parser.add_argument("--remote", default="", help="an object store; default: a directory")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory or None) as folder:
        model = make_model(Path(folder) / "llama-88m", seed=options.seed)
        remote = options.remote or f"file://{folder}/remote"
        (Path(folder) / "remote").mkdir()
        (Path(folder) / "disk").mkdir()
        token_bytes = 24_576 if options.dtype == "float32" else 12_288
        config = SupervisorConfig(
            model=str(model),
            dtype=options.dtype,
            port=0,
            device_kv_bytes=2 * (options.tokens + 512) * token_bytes,
            host_kv_bytes=3 * 2**30,
            disk_dir=(f"{folder}/disk",),
            disk_kv_bytes=8 * 2**30,
            remote=remote,
        )
        with running(config, environ=SETTINGS) as cell:
            results = asyncio.run(
                measure(
                    cell.base_url,
                    cell.nats_url,
                    tokens=options.tokens,
                    repeats=options.repeats,
                    seed=options.seed,
                )
            )
    print(json.dumps(results["by_tier"]))
    print(results_file.write("ttft_ladder", results | {"dtype": options.dtype}, seed=options.seed))


if __name__ == "__main__":
    main()
