"""How long the model's threads should spin for their next work, for a server whose other processes want the cores too.

GNU OpenMP spins for ``GOMP_SPINCOUNT`` rounds before it sleeps; ``OMP_WAIT_POLICY`` passive is few, active endless. In
each round a cell of its own is asked for every setting, in an order that changes: decode of one and of eight requests,
and TTFT of a question about a document that is on the device.

``python -m bench.thread_waits [--dtype bfloat16] [--rounds 5]``
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from bench.asking import ask_one
from bench.make_model import make_model
from bench.serving_vs_generate import DECODE_TOKENS, VOCABULARY, Ours
from thermocline.client import served_model
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin_1000": {"GOMP_SPINCOUNT": "1000"},
    "spin_10000": {"GOMP_SPINCOUNT": "10000"},
    "spin_100000": {"GOMP_SPINCOUNT": "100000"},
    "active": {"OMP_WAIT_POLICY": "active"},
}
DOCUMENT_TOKENS, QUESTION_TOKENS, QUESTIONS = 512, 32, 9


def measure(config: SupervisorConfig, environ: dict[str, str], rng: random.Random) -> dict[str, float]:
    """Milliseconds: a decode step of one and of eight requests, and a cached TTFT."""

    def fresh(length: int) -> list[int]:
        return [rng.randrange(8, VOCABULARY) for _ in range(length)]

    async def cached_ttft_s(base_url: str) -> float:
        document, times = fresh(DOCUMENT_TOKENS), []
        async with httpx.AsyncClient(base_url=base_url, timeout=300, trust_env=False) as client:
            model = (await served_model(client))["id"]
            await ask_one(client, model, document)
            for _ in range(QUESTIONS):
                answer = await ask_one(client, model, document + fresh(QUESTION_TOKENS))
                if answer.source != "device":
                    raise SystemExit(f"wanted the document on the device, got {answer}")
                times.append(answer.ttft_s)
        return statistics.median(times)

    with running(config, environ=environ) as cell:
        ours = Ours(cell.base_url)
        ours.decode_s([fresh(64)])  # Warms up.
        return {
            "decode_1": ours.decode_s([fresh(64)]) / (DECODE_TOKENS - 1) * 1e3,
            "decode_8": ours.decode_s([fresh(64) for _ in range(8)]) / (DECODE_TOKENS - 1) * 1e3,
            "cached_ttft": asyncio.run(cached_ttft_s(cell.base_url)) * 1e3,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "llama-88m", seed=options.seed)
        config = SupervisorConfig(
            model=str(model),
            dtype=options.dtype,
            port=0,
            threads=os.cpu_count() or 1,
            device_kv_bytes=2**28,
            host_kv_bytes=2**28,
        )
        for _ in range(options.rounds):
            for name in rng.sample(list(SETTINGS), len(SETTINGS)):
                runs[name].append(measure(config, SETTINGS[name], rng))
                print(name, runs[name][-1], flush=True)
    table: dict[str, Any] = {}
    for name, rounds in runs.items():
        table[name] = {
            what: {
                "ms": statistics.median(run[what] for run in rounds),
                "by_default": statistics.median(
                    run[what] / first[what] for run, first in zip(rounds, runs["default"], strict=True)
                ),
            }
            for what in ("decode_1", "decode_8", "cached_ttft")
        }
        print(name, table[name])
    results = {"dtype": options.dtype, "rounds": options.rounds, "settings": table}
    print(results_file.write("thread_waits", results, seed=options.seed))


if __name__ == "__main__":
    main()
