"""TTFT of a history that lies on a disk of limited bandwidth, by the way in which it comes back.

    python -m bench.restoration [--models mha,gqa] [--lengths 1024,4096,16128] [--mb-per-s 25,50,100,200,400]
    [--repeats 5] [--directory DIR] [--save]

After HCache's sections 6.2 and 6.3.1, end to end: for each model, disk and method a whole cell, whose storage reads its
disk through a token bucket; cells of one model and disk run at once and are asked in turn. A history is computed once
and kept as the method has it, then every tier above the disk is emptied and a question about the history is asked.
``recompute`` fetches nothing; ``kv`` keeps KV; ``hidden`` keeps hidden states of all layers; ``half`` is the naive
hybrid, the first half of the layers recomputed and the rest kept as KV; ``planned`` is left to the planner, with what
``thermocline doctor --profile`` measured here before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from bench.asking import ask_one
from bench.emptying import empty, rest
from bench.make_model import make_model
from services.gateway.cache_calls import CacheCalls
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.messages.pools import HIDDEN
from shared.messages.status import CellStatus
from thermocline.client import served_model
from thermocline.client.stream import SOURCES
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

LAYERS, HEADS = 8, 8
KV_HEADS = {"mha": 8, "gqa": 2}
VOCABULARY = 16_000
LONG = 8192
"""A longer history is recomputed once: it takes as long as many short ones, and varies less."""

POOL_S = 15.0
QUESTION_TOKENS = 32
METHODS = {
    "recompute": ("off", "recompute"),
    "kv": ("off", "kv"),
    "hidden": (f"0/{LAYERS}/0", "hidden"),
    "half": (f"{LAYERS // 2}/0/{LAYERS - LAYERS // 2}", "hidden"),
    "planned": ("auto", "planned"),
}
"""By method: what is kept, and how it comes back (``hidden_form`` and ``restoring``)."""


def histories(lengths: list[int], seed: int) -> dict[int, list[int]]:
    """Token ids of one history for each length."""
    rng = random.Random(seed)
    return {length: [rng.randrange(8, VOCABULARY) for _ in range(length)] for length in lengths}


@dataclass(frozen=True, slots=True)
class Served:
    """A running cell and who asks it."""

    client: httpx.AsyncClient
    bus: Bus
    model: str


async def measure(
    cells: Mapping[str, RunningCell], lengths: list[int], *, repeats: int, seed: int
) -> list[dict[str, Any]]:
    """TTFT by method and length, and where the history was found. Methods are asked in turn, question by question."""
    rng = random.Random(seed + 1)
    figures: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        served = {method: await serve(stack, method, cell) for method, cell in cells.items()}
        for length, history in histories(lengths, seed).items():
            found: dict[str, dict[str, Any]] = {}
            for method, one in served.items():
                if method != "recompute":  # Computed and kept, or read and kept where an earlier cell left it.
                    await ask_one(one.client, one.model, [*history, 9])
                    await rest(one.bus)  # What is still being saved cannot be emptied.
                found[method] = {"method": method, "tokens": length, "times_ms": [], "restored": []}
            for repeat in range(repeats):
                for method, one in served.items():
                    if not repeat or method != "recompute" or length <= LONG:
                        question = [rng.randrange(8, VOCABULARY) for _ in range(QUESTION_TOKENS)]
                        await ask_in(one, history + question, found[method])
            figures += found.values()
    return figures


async def serve(stack: AsyncExitStack, method: str, cell: RunningCell) -> Served:
    """Wait until a cell is as it will be."""
    bus = await connect((cell.nats_url,), "bench")
    stack.push_async_callback(bus.close)
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=cell.base_url, timeout=1200, trust_env=False))
    await rest(bus)  # The cell serves before its pools are made.
    if METHODS[method][0] != "off":
        await hidden_pool(bus)
    return Served(client, bus, (await served_model(client))["id"])


async def ask_in(one: Served, prompt: list[int], figure: dict[str, Any]) -> None:
    """Ask a cell whose history is on the disk alone, and take down what came of it."""
    await empty(one.bus, ("device", "host"))
    before = await CacheCalls(one.bus).status()
    answer = await ask_one(one.client, one.model, prompt)
    figure["times_ms"].append(round(answer.ttft_s * 1e3, 1))
    figure["restored"].append(predictions(before, await CacheCalls(one.bus).status()))
    found = {source: getattr(answer, f"{source}_tokens") for source in SOURCES}
    figure["found"] = {name: count for name, count in found.items() if count}
    figure["form"] = next((pool.form for pool in before.pools if pool.form), "")
    await rest(one.bus)


def predictions(before: CellStatus, after: CellStatus) -> dict[str, dict[str, float]]:
    """Predicted and observed milliseconds of what was restored between two reports, by kind."""
    earlier = {one.kind: one for one in before.restorations}
    found = {}
    for one in after.restorations:
        known = earlier.get(one.kind)
        if known is None or known.count < one.count:
            predicted_s = one.predicted_seconds - (known.predicted_seconds if known else 0.0)
            observed_s = one.observed_seconds - (known.observed_seconds if known else 0.0)
            found[one.kind] = {"predicted_ms": round(predicted_s * 1e3, 1), "observed_ms": round(observed_s * 1e3, 1)}
    return found


async def hidden_pool(bus: Bus) -> None:
    """Wait for a hidden pool: what is asked before there is one is kept as KV. The planner may want none."""
    deadline = time.monotonic() + POOL_S
    while time.monotonic() < deadline:
        if any(pool.tier == HIDDEN for pool in (await CacheCalls(bus).status()).pools):
            return
        await asyncio.sleep(0.05)


def profile_of(model: Path) -> Path:
    """What ways back cost here for this model."""
    out = model.parent / f"{model.name}.profile.json"
    command = [sys.executable, "-m", "thermocline", "doctor", "--profile", "--model", str(model), "--out", str(out)]
    subprocess.run([*command, "--dtype", "float32"], check=True, stdout=subprocess.DEVNULL)
    return out


def cell_of(
    model: Path, profile: Path, folder: Path, method: str, mb_per_s: float, lengths: list[int]
) -> AbstractContextManager[RunningCell]:
    """A cell that keeps histories and brings them back by one method."""
    form, restoring = METHODS[method]
    directory = folder / f"{model.name}-{method}"
    directory.mkdir(exist_ok=True)
    kv_heads = KV_HEADS[model.name]
    room = (max(lengths) + 1024) * LAYERS * 2 * kv_heads * 64 * 4
    config = SupervisorConfig(
        model=str(model),
        dtype="float32",
        port=0,
        device_kv_bytes=2 * room,
        host_kv_bytes=2 * room,
        disk_dir=(str(directory),),
        disk_kv_bytes=16 * 2**30,
    )
    environ = {
        "THERMOCLINE_HIDDEN_FORM": form,
        "THERMOCLINE_RESTORING": restoring,
        # One request may have a quarter of the pool to save its hidden states in.
        "THERMOCLINE_HIDDEN_BYTES": str(5 * (max(lengths) + 1024) * LAYERS * HEADS * 64 * 4),
        "THERMOCLINE_DISK_READ_BYTES_PER_S": str(int(mb_per_s * 1e6)),
        "THERMOCLINE_PROFILE": str(profile),
        # A whole wait, so that a slow way shows as slow and not as recomputed.
        "THERMOCLINE_PREFETCH_WAIT": "full",
        "THERMOCLINE_FETCH_DEADLINE_MS": "600000",
        "THERMOCLINE_PREFETCH_FRACTION": "1.0",
    }
    return running(config, environ=environ)


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--save")
    parser.add_argument("--models", default="mha,gqa")
    parser.add_argument("--lengths", default="1024,4096,16128")
    parser.add_argument("--mb-per-s", default="25,50,100,200,400")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default="", help="where the disk tier lies; default: temporary")
    parser.add_argument("--add", type=Path, help="results of an earlier run, whose other figures are kept")
    options = parser.parse_args()
    figures: list[dict[str, Any]] = earlier(options) if options.add else []
    results = {
        "layers": LAYERS,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "repeats": options.repeats,
        "figures": figures,
    }
    with tempfile.TemporaryDirectory(dir=options.directory or None) as scratch:
        folder = Path(scratch)
        models = {
            kind: make_model(folder / kind, seed=options.seed, kv_heads=KV_HEADS[kind], layers=LAYERS, heads=HEADS)
            for kind in options.models.split(",")
        }
        profiles = {kind: profile_of(model) for kind, model in models.items()}
        for mb_per_s in [float(each) for each in options.mb_per_s.split(",")]:
            for kind, model in models.items():
                figures += figures_of(kind, model, profiles[kind], folder, mb_per_s, figures, options)
            if options.save:  # What is measured so far stands, should the rest be interrupted.
                print(results_file.write("restoration", results, seed=options.seed), flush=True)
    if not options.save:
        print(json.dumps(results))


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of an earlier run that this one does not measure anew."""
    anew = {
        (model, float(mb_per_s), method, int(length))
        for model in options.models.split(",")
        for mb_per_s in options.mb_per_s.split(",")
        for method in options.methods.split(",")
        for length in options.lengths.split(",")
    }
    kept = json.loads(options.add.read_text(encoding="utf-8"))["results"]["figures"]
    return [each for each in kept if (each["model"], each["mb_per_s"], each["method"], each["tokens"]) not in anew]


def figures_of(
    kind: str,
    model: Path,
    profile: Path,
    folder: Path,
    mb_per_s: float,
    known: list[dict[str, Any]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Those of all methods for one model at one bandwidth. Recomputing, which needs no disk, is measured once.

    A cell of each method runs at once and they are asked in turn: the machine is not equally fast for as long as one
    after the other takes.
    """
    same = [each for each in known if each["model"] == kind and each["method"] == "recompute"]
    is_new = all(each["mb_per_s"] != mb_per_s for each in same)
    found = [{**each, "mb_per_s": mb_per_s} for each in same if is_new and each["mb_per_s"] == same[0]["mb_per_s"]]
    methods = [method for method in options.methods.split(",") if method != "recompute" or not same]
    lengths = [int(each) for each in options.lengths.split(",")]
    began = time.monotonic()
    with ExitStack() as stack:
        cells = {
            method: stack.enter_context(cell_of(model, profile, folder, method, mb_per_s, lengths))
            for method in methods
        }
        figures = asyncio.run(measure(cells, lengths, repeats=options.repeats, seed=options.seed))
    for figure in figures:
        middle = statistics.median(figure["times_ms"])
        rate = round(figure["tokens"] / middle * 1e3, 1)
        found.append({"model": kind, "mb_per_s": mb_per_s, **figure, "ttft_ms": middle, "tokens_per_s": rate})
        print(f"{kind} {mb_per_s:g} MB/s {figure['tokens']:>6} {figure['method']:<10} {middle:.0f} ms {figure['form']}")
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
    return found


if __name__ == "__main__":
    main()
