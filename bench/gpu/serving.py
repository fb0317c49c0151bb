"""Serving a Llama-3.1-8B from end to end on one GPU: whole cells by host tier, mover and profile.

Random weights of the real geometry in bfloat16, written to a local disk once and loaded as any checkpoint is. A whole
cell (broker, scheduler, storage, one worker, gateway) is asked by ``thermocline load`` with prompts of the lengths of
Strata's Table 1: LooGLE-like, ReviewMT-like and ShareGPT-like. The device pool holds half of the documents, the host
pool all of them. One cell has batched copies, with the host tier and without; one the GPU-assisted mover; one what the
profile of this machine chooses. Between cases a cell takes other settings and is emptied; the model stays. In the last
one a document that is only on the disk comes back by each means.

How much is asked follows from how long a document takes the first time, so that the cases fit into ``--seconds``; what
did not fit is named in ``left_out``.

``python -m bench.gpu.serving [--quick | --cpu] [--seconds 540]``
"""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch

from bench.asking import ask_one
from bench.emptying import empty, rest
from bench.gpu import from_disk, reading
from bench.gpu.checkpoint import write_checkpoint
from bench.gpu.models import LLAMA_8B, SHALLOW_LAYERS, TINY
from bench.gpu.served_cases import DOCUMENT_TOKENS, PLAIN, Case, Scale, Setup, calibrated, setups
from shared.bus.nats_bus import connect
from thermocline.client import served_model
from thermocline.load.__main__ import main as ask
from thermocline.load.report import load
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

CONTEXT = 131_072
READY_S = 240.0
CASE_S = 20.0
"""What one case is to take, more or less."""

CASES_SHARE, LIKELY_CASES = 0.5, 10
"""Of the time, for asking; the rest is for starting cells, for the profile and for what comes from the disk."""

DEVICE_DOCUMENTS, HOST_DOCUMENTS = 4.5, 12
SHM_SHARE, HIDDEN_SHARE = 0.6, 0.2
"""Of free shared memory that the host pool and the pool of hidden states may have at the most."""

PROFILE_LENGTHS = "1024,8192"
PROFILE_S = 60.0
"""What measuring the machine takes, and starting the worker about as long; with less than five times that to spare it
is left out, and with it the cell that has it.
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """``length_scale`` divides all lengths in tokens; ``disk_tokens`` is the length of the document on the disk."""

    shape: dict[str, int]
    token_bytes: int
    length_scale: float
    disk_tokens: int

    @property
    def document_bytes(self) -> float:
        return DOCUMENT_TOKENS / self.length_scale * self.token_bytes


def sizes_of(run: reading.Reading) -> Sizes:
    shape = run.choose(LLAMA_8B, LLAMA_8B | {"num_hidden_layers": SHALLOW_LAYERS}, TINY)
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    itemsize = 4 if run.is_tiny else 2
    token_bytes = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * itemsize
    return Sizes(shape, token_bytes, run.choose(1.0, 4.0, 64.0), run.choose(8192, 2048, 256))


def settings(run: reading.Reading, sizes: Sizes, model: Path, disk: Path, profile: Path | None) -> SupervisorConfig:
    """Of the cell. Pools that shared memory is too small for are smaller."""
    free = shutil.disk_usage("/dev/shm").free
    hidden_bytes = sizes.shape["num_hidden_layers"] * sizes.shape["hidden_size"] * (4 if run.is_tiny else 2)
    # One request may have a quarter of that pool to save its hidden states in.
    hidden = 5 * (sizes.disk_tokens + 1024) * hidden_bytes
    device = run.device.type
    return SupervisorConfig(
        model=str(model),
        device=device,
        dtype="float32" if run.is_tiny else "bfloat16",
        port=0,
        threads=1 if run.is_tiny else None,
        device_kv_bytes=int(DEVICE_DOCUMENTS * sizes.document_bytes) + (sizes.disk_tokens + 1024) * sizes.token_bytes,
        host_kv_bytes=int(min(HOST_DOCUMENTS * sizes.document_bytes + 64 * 2**20, SHM_SHARE * free)),
        hidden_bytes=int(min(hidden, HIDDEN_SHARE * free)),
        hidden_form="off",  # Until a case wants them: a storage has one pool for them, of one form, as long as it runs.
        disk_dir=(str(disk),),
        disk_kv_bytes=30 * 2**30,
        sparse=True,
        importance="on",
        profile="" if profile is None else str(profile),
    )


def measured_profile(run: reading.Reading, model: Path, out: Path) -> Path | None:
    """What moving pages and restoring prefixes costs here, measured as the documentation advises before serving.

    None where there is no time for it, or it fails: the cell serves without, and restores from hidden states nothing.
    """
    if run.is_quick or run.is_tiny:
        return None
    command = [sys.executable, "-m", "thermocline", "doctor", "--profile", "--model", str(model), "--out", str(out)]
    flags = ["--device", run.device.type, "--dtype", "bfloat16", "--rounds", "3"]
    flags += ["--page-sizes", "16", "--prefix-lengths", PROFILE_LENGTHS]
    try:
        subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL, timeout=2 * PROFILE_S)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"the machine was not measured: {error}", file=sys.stderr)
        return None
    return out


async def warm(cell: RunningCell, tokens: int) -> tuple[float, float]:
    """Seconds to the first token of a document that nobody knows, and of the same again, after kernels are compiled."""
    bus = await connect((cell.nats_url,), "bench")
    rng = random.Random(7)
    try:
        await from_disk.configure(bus, PLAIN)
        async with httpx.AsyncClient(base_url=cell.base_url, timeout=600, trust_env=False) as client:
            model = (await served_model(client))["id"]
            for _ in range(2):
                document = [rng.randrange(8, 500) for _ in range(tokens)]
                cold = await ask_one(client, model, document)
                again = await ask_one(client, model, [*document, 9, 8])
        return cold.ttft_s, again.ttft_s
    finally:
        await bus.close()


async def prepare(cell: RunningCell, case: Case) -> None:
    """The case's settings, and nothing in any cache."""
    bus = await connect((cell.nats_url,), "bench")
    try:
        await from_disk.configure(bus, case.config)
        await empty(bus, ("device", "host"))
    finally:
        await bus.close()


def run_case(cell: RunningCell, setup: Setup, case: Case, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Ask, and return the figures. Raises SystemExit when requests failed: such figures mean nothing."""
    asyncio.run(prepare(cell, case))
    out = folder / "asked.json"
    arguments = ["--url", cell.base_url, *case.load.arguments, "--out", str(out), "--seed", "1"]
    code = ask([*arguments, "--length-scale", str(sizes.length_scale), "--warmup", "2"])
    if code:
        raise SystemExit(f"{case.name}: requests failed, see above")
    figures = load(out).figures
    assert figures.ttft_ms is not None
    return {
        "case": f"{setup.name}: {case.name}",
        "requests": figures.answered,
        "seconds": figures.seconds,
        "ttft_ms": msgspec.to_builtins(figures.ttft_ms),
        "token_ms": msgspec.to_builtins(figures.token_ms),
        "input_tokens_per_s": figures.input_tokens_per_s,
        "output_tokens_per_s": figures.output_tokens_per_s,
        "cached_share": (figures.cached_tokens or 0) / max(1, figures.input_tokens),
    }


async def disk(cell: RunningCell, run: reading.Reading, sizes: Sizes, *, is_profiled: bool) -> list[dict[str, Any]]:
    """Figures of :mod:`bench.gpu.from_disk`. Without a profile nothing is restored from hidden states."""

    def each(ways: list[from_disk.Way]) -> Iterator[from_disk.Way]:
        return run.each(ways if is_profiled else ways[:-1], lambda way: way.name)

    bus = await connect((cell.nats_url,), "bench")
    try:
        await rest(bus)
        return await from_disk.measure(
            bus, cell.base_url, layers=sizes.shape["num_hidden_layers"], tokens=sizes.disk_tokens,
            rounds=run.choose(3, 1, 1), each=each,
        )  # fmt: skip
    finally:
        await bus.close()


def scale_of(run: reading.Reading, cold_s: float, warm_s: float) -> Scale:
    """How much is asked. A run that only proves that it works asks little."""
    if run.is_tiny or run.is_quick:
        return Scale(contexts=3, queries=6, turns=8)
    seconds = min(CASE_S, max(5.0, run.budget.left_s * CASES_SHARE / LIKELY_CASES))
    return calibrated(cold_s, warm_s, seconds)


def has_time(run: reading.Reading, setup: Setup, start_s: float) -> bool:
    """Whether another cell would start and answer something before the end; the first is always begun."""
    needed_s = 1.5 * start_s + (2 * PROFILE_S if setup.has_profile and not (run.is_quick or run.is_tiny) else 0)
    return run.budget.left_s >= needed_s


def headline(results: dict[str, Any]) -> reading.Headline:
    """Mean TTFT and throughput of each case, and the median TTFT of each way from the disk."""
    lines: list[tuple[str, float | None, str]] = []
    for each in results["cases"]:
        beside = f"{each['output_tokens_per_s']:.4g} tokens/s out, {100 * each['cached_share']:.0f}% cached"
        lines.append((each["case"], each["ttft_ms"]["mean"], f"ms TTFT, {beside}"))
    for each in results["from_disk"]:
        middle = sorted(each["ttft_ms"])[len(each["ttft_ms"]) // 2]
        lines.append((f"from disk: {each['way']}", middle, "ms TTFT"))
    return lines


def serve(run: reading.Reading, setup: Setup, sizes: Sizes, scratch: Path, results: dict[str, Any]) -> None:
    """Start a cell and ask it this setup's cases; figures go into ``results``."""
    model, kept = scratch / "llama", scratch / "disk"
    profile = measured_profile(run, model, scratch / "profile.json") if setup.has_profile else None
    # No profile of this machine's user is taken for none.
    environ = {"THERMOCLINE_MOVER": setup.mover, "XDG_CACHE_HOME": str(scratch / "cache")}
    began = time.monotonic()
    started = settings(run, sizes, model, kept, profile)
    with running(started, environ=environ, ready_timeout_s=READY_S) as cell:
        start_s = time.monotonic() - began
        cold_s, warm_s = asyncio.run(warm(cell, int(DOCUMENT_TOKENS / sizes.length_scale)))
        scale = scale_of(run, cold_s, warm_s)
        results["starts"].append({
            "setup": setup.name, "start_s": start_s, "cold_s": cold_s, "warm_s": warm_s, "contexts": scale.contexts,
            "is_profiled": profile is not None,
        })  # fmt: skip
        # The scale of this machine is known now, and with it how much each case asks.
        asked = next(each for each in setups(scale, has_gpu=run.device.type == "cuda") if each.name == setup.name)
        everything = run.choose(asked.cases, asked.cases[:3], asked.cases[: 2 if setup.mover == "batched" else 1])
        # What comes from the disk stands behind the three workloads.
        first, rest_of_them = everything[:3], everything[3:]
        ask_all(run, cell, asked, first, sizes, scratch, results)
        if setup.mover == "auto":
            results["from_disk"] = asyncio.run(disk(cell, run, sizes, is_profiled=profile is not None))
            run.keep(results)
        ask_all(run, cell, asked, rest_of_them, sizes, scratch, results)


def ask_all(
    run: reading.Reading,
    cell: RunningCell,
    setup: Setup,
    cases: Sequence[Case],
    sizes: Sizes,
    scratch: Path,
    results: dict[str, Any],
) -> None:
    """Figures of the cases that there is time for."""
    for case in run.each(cases, lambda case: f"{setup.name}: {case.name}"):
        results["cases"].append(run_case(cell, setup, case, sizes, scratch))
        run.keep(results)


def main() -> None:
    run = reading.begin("serving", __doc__)
    sizes = sizes_of(run)
    results: dict[str, Any] = {"length_scale": sizes.length_scale, "starts": [], "cases": [], "from_disk": []}
    with tempfile.TemporaryDirectory(prefix="thermocline-bench-") as name:
        scratch = Path(name)
        (scratch / "disk").mkdir()
        began = time.monotonic()
        dtype = torch.float32 if run.is_tiny else torch.bfloat16
        results["weight_bytes"] = write_checkpoint(
            scratch / "llama", sizes.shape, most_tokens=CONTEXT, device=run.device, dtype=dtype
        )  # fmt: skip
        results["write_model_s"] = time.monotonic() - began
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        start_s = 0.0
        for setup in setups(Scale(3, 6, 8), has_gpu=run.device.type == "cuda"):
            if results["starts"] and not has_time(run, setup, start_s):
                run.budget.left_out.append(setup.name)
                continue
            serve(run, setup, sizes, scratch, results)
            start_s = max(start_s, results["starts"][-1]["start_s"])
    run.finish(results, headline(results))


if __name__ == "__main__":
    main()
