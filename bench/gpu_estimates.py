"""What each target of GPU speed should come to, by arithmetic over datasheets, until a GPU has measured it.

Bytes, products and kernels are counted for Llama-3.1-8B in bfloat16; devices are those of the simulator's profiles
(``thermocline/simulate/profiles/hardware``), whose efficiencies are assumptions, and the constants below, which are
assumptions too. Where ``bench/results/gpu.json`` has a figure of a GPU, it stands beside the estimate, marked as
measured, for the device that it names.

Usage: ``python -m bench.gpu_estimates`` (writes bench/results/gpu_estimates.json)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import results_file
from bench.defaults_on_gpus import MODELS
from services.worker.engine.key_splits import splits_for
from services.worker.kernels import page_gather
from services.worker.kernels.block_sizes import block_sizes
from services.worker.kv.movers.gpu_assisted import LOAD_PROGRAMS
from thermocline.simulate.profiles import HardwareProfile, load_hardware

LLAMA_8B = next(model for model in MODELS if model.name == "Llama-3.1-8B")

KERNEL_US = 2.0
"""Assumed between the ends of two small kernels of a CUDA graph that do not overlap."""

LINK_LATENCY_US = 1.5
"""Assumed from a load instruction of the GPU to the arrival of what it reads in host memory over PCIe."""

MEMORY_LATENCY_US = 0.8
"""Assumed from a load instruction to the arrival of what it reads in device memory, under load."""

DEVICES = {"h200-pcie5": ("H200", 132), "a100-pcie4": ("A100", 108), "4090": ("RTX 4090", 128)}
"""Name and multiprocessors of each profile that is estimated."""

DECODE_TARGET, LOAD_TARGET, SLOWDOWN_TARGET = 185.0, 0.9, 0.05
TILE_BYTES = 4 * page_gather.TILE_WORDS
TILES_AHEAD = int(getattr(page_gather, "MOST_AHEAD", 1))
"""Tiles that each program of the I/O kernel has in flight."""

CONTEXT, CHUNK, PREFIX = 1024, 2048, 8192
PAGES = (1, 16, 32)
"""Tokens of a page."""

ATTENTION = ((1, 1024), (1, 16_384), (64, 4096))
"""(requests, context) of decode steps whose attention is estimated."""

HOST_US = 200.0
"""Assumed of the processor between two steps of one request."""


@dataclass(frozen=True, slots=True)
class Device:
    """A profile with what it lacks."""

    name: str
    multiprocessors: int
    profile: HardwareProfile

    @property
    def read_bytes_per_s(self) -> float:
        """Of device memory, by large kernels."""
        return self.profile.memory.bandwidth_gb_s * 1e9 * self.profile.memory.weight_read_efficiency

    @property
    def link_bytes_per_s(self) -> float:
        """Of one copy in one piece, which is the peak that loads are held against."""
        return self.profile.link.bandwidth_gb_s * 1e9 * self.profile.link.peak_efficiency


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``aim`` is the target, "" where it is part of another's; ``measured`` is None until a GPU has."""

    key: str
    device: str
    what: str
    estimate: float
    unit: str
    aim: str
    measured: float | None = None


def token_bytes() -> int:
    """KV of a token."""
    return LLAMA_8B.geometry(16).token_bytes


def weight_bytes() -> int:
    """Read by a step at the least: all weights but the embedding, of which it is one row a request."""
    return 2 * (LLAMA_8B.parameters - LLAMA_8B.vocab * LLAMA_8B.hidden)


def attention_bytes_per_s(device: Device, requests: int, context: int) -> float:
    """Of K and V by the decode kernel. Each program has about one block of keys in flight, which takes the latency of
    memory; so few programs leave bandwidth unused, however fast each is.
    """
    programs = requests * LLAMA_8B.kv_heads * splits_for(context)
    sizes = block_sizes(LLAMA_8B.head_dim, LLAMA_8B.heads // LLAMA_8B.kv_heads, 2)
    in_flight = programs * sizes.block_n * 2 * LLAMA_8B.head_dim
    return min(device.read_bytes_per_s, in_flight / (MEMORY_LATENCY_US / 1e6))


def kernels_of_a_step(results: Path) -> dict[str, int]:
    """Kernels of a decode step by the forward that launches them, the fewest first: counted, where the count is among
    the results, else 10 and 30 a layer, which is about what fused kernels and separate operators come to.
    """
    file = results / "gpu_step.json"
    if not file.exists():
        return {f"{each} kernels a layer": each * LLAMA_8B.layers for each in (10, 30)}
    cases = json.loads(file.read_text(encoding="utf-8"))["results"]["cases"]
    counted = {
        f"{case['kernels']:,} kernels ({case['forward']})": case["kernels"] for case in cases if case["rows"] == 1
    }
    return dict(sorted(counted.items(), key=lambda each: each[1]))


def decode_s(device: Device, kernels: int, context: int = CONTEXT) -> float:
    """Of one request, where reading weights, attention, gaps between kernels and the processor's part add up."""
    attention_s = context * token_bytes() / attention_bytes_per_s(device, 1, context)
    return weight_bytes() / device.read_bytes_per_s + attention_s + (kernels * KERNEL_US + HOST_US) / 1e6


def kernel_budget(device: Device, tokens_per_s: float, context: int = CONTEXT) -> int:
    """The most kernels of a step that comes to so many tokens a second; below 0 where reading alone forbids it."""
    return int((1.0 / tokens_per_s - decode_s(device, 0, context)) / (KERNEL_US / 1e6))


def prefill_flop(rows: int, context: int = 0) -> float:
    """Two products a weight and row, without embedding and head; two of each visible key and query head."""
    weights = LLAMA_8B.parameters - 2 * LLAMA_8B.vocab * LLAMA_8B.hidden
    visible = rows * (context + (rows + 1) / 2)
    return 2.0 * weights * rows + 4.0 * LLAMA_8B.layers * LLAMA_8B.heads * LLAMA_8B.head_dim * visible


def prefill_tokens_per_s(device: Device, rows: int) -> float:
    """Of a chunk at the start of a prompt, at the profile's efficiency of products of so many rows."""
    compute = device.profile.compute
    efficiency = max(share for least, share in compute.efficiency if least <= rows)
    return rows / (prefill_flop(rows) / (compute.peak_tflops["bfloat16"] * 1e12 * efficiency))


def gathered_bytes_per_s(device: Device, programs: int) -> float:
    """By the kernel that reads host memory: each program has ``TILES_AHEAD`` tiles in flight and waits for the first.

    Pages do not matter as long as a row fills the link's packets: a row of one token is 2 KiB.
    """
    cycle_s = LINK_LATENCY_US / 1e6 + TILE_BYTES / device.link_bytes_per_s
    return min(device.link_bytes_per_s, programs * TILES_AHEAD * TILE_BYTES / cycle_s)


def copied_bytes_per_s(device: Device, page_tokens: int) -> float:
    """By one copy for each row of a page, each with its overhead."""
    row = page_tokens * LLAMA_8B.geometry(1).half_bytes
    return row / (device.profile.link.transfer_overhead_us / 1e6 + row / device.link_bytes_per_s)


def slowdown(device: Device, programs: int) -> float:
    """Share of multiprocessors that the I/O kernel holds, and of memory bandwidth that it writes with."""
    moved = gathered_bytes_per_s(device, programs)
    return programs / device.multiprocessors + moved / (device.profile.memory.bandwidth_gb_s * 1e9)


def hiding_tokens(device: Device) -> float:
    """New tokens whose computation takes as long as loading a prefix of ``PREFIX`` tokens."""
    load_s = PREFIX * token_bytes() / gathered_bytes_per_s(device, LOAD_PROGRAMS)
    return load_s * prefill_tokens_per_s(device, CHUNK)


def estimates(device: Device, kernels: Mapping[str, int]) -> Iterator[Row]:
    """All figures of one device; ``kernels`` are of a decode step, the fewest first."""

    def row(key: str, what: str, estimate: float, unit: str, aim: str = "") -> Row:
        return Row(key, device.name, what, estimate, unit, aim)

    floor = device.read_bytes_per_s / (weight_bytes() + CONTEXT * token_bytes())
    target = f"{DECODE_TARGET:g} tokens/s" if device.name == "H200" else ""
    yield row(
        "decode_floor", f"decode, one request, {CONTEXT} tokens of context: if memory were all", floor, "tokens/s"
    )
    for number, (name, count) in enumerate(kernels.items()):
        speed = 1.0 / decode_s(device, count)
        yield row("decode" if number == 0 else f"decode_{number}", f"the same with {name}", speed, "tokens/s",
                  target if number == 0 else "")  # fmt: skip
    if (budget := kernel_budget(device, DECODE_TARGET)) > 0:
        yield row("decode_budget", f"most kernels of a step at {DECODE_TARGET:g} tokens/s", budget, "kernels")
    for requests, context in ATTENTION:
        reached = attention_bytes_per_s(device, requests, context) / device.read_bytes_per_s
        yield row(f"attention_{requests}_{context}", f"attention of decode, {requests} x {context:,} tokens", reached,
                  "of what reading weights reaches", "near the roofline")  # fmt: skip
    yield row("prefill", f"a chunk of {CHUNK} tokens", prefill_tokens_per_s(device, CHUNK), "tokens/s")
    yield row("loads", f"loads by the GPU-assisted mover, {LOAD_PROGRAMS} programs, pages of 1 to 32 tokens",
              gathered_bytes_per_s(device, LOAD_PROGRAMS) / device.link_bytes_per_s, "of a copy in one piece",
              f"at least {LOAD_TARGET:g}, verified")  # fmt: skip
    yield row("loads_4", "the same with 4 programs", gathered_bytes_per_s(device, 4) / device.link_bytes_per_s,
              "of a copy in one piece")  # fmt: skip
    for page in PAGES:
        share = copied_bytes_per_s(device, page) / device.link_bytes_per_s
        yield row(f"copies_{page}", f"the same by a copy a row, pages of {page}", share, "of a copy in one piece")
    yield row("slowdown", f"slowdown beside loads by {LOAD_PROGRAMS} programs", slowdown(device, LOAD_PROGRAMS),
              "of the time", f"at most {SLOWDOWN_TARGET:g}")  # fmt: skip
    backup = gathered_bytes_per_s(device, max(1, LOAD_PROGRAMS // 2)) / device.link_bytes_per_s
    yield row("backups", "backups by half as many programs", backup, "of a copy in one piece", "beside loads")
    yield row("overlap", f"new tokens that hide a load of {PREFIX} tokens", hiding_tokens(device), "tokens",
              "loads hidden by computation")  # fmt: skip


def measured(found: Mapping[str, Any]) -> dict[str, float]:
    """What a file of ``bench.gpu`` says, by the keys of rows; only parts that a GPU has run."""
    if not found.get("gpu"):
        return {}
    parts = {name: part.get("results", {}) for name, part in found["parts"].items()}
    readers: dict[str, Callable[[], float]] = {
        "decode": lambda: 1e3 / _point(parts["decode"], requests=1, context=CONTEXT)["graph_ms"],
        "decode_floor": lambda: 1e3 / _point(parts["decode"], requests=1, context=CONTEXT)["floor_ms"],
        "prefill": lambda: float(_point(parts["prefill"], rows=CHUNK, context=0)["tokens_per_s"]),
        "loads": lambda: min(_verified(each) for each in parts["movers"]["page_sizes"].values()),
        "slowdown": lambda: max(
            parts["interference"]["programs"][f"load_{LOAD_PROGRAMS}"][work]["slowdown"] - 1
            for work in ("prefill", "decode")
        ),
        **{
            f"attention_{requests}_{context}": partial(_attention, parts, requests, context)
            for requests, context in ATTENTION
        },
        "backups": lambda: _backups(parts["backup"]["page_sizes"]["16"]["movers_gb_s"]),
    }
    known = {}
    for key, read in readers.items():
        try:
            known[key] = read()
        except (KeyError, StopIteration, ValueError):
            continue  # That part was left out, or failed.
    return known


def _point(part: Mapping[str, Any], **where: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(
        point for point in part["points"] if all(point[name] == value for name, value in where.items())
    )
    return found


def _verified(page_size: Mapping[str, Any]) -> float:
    """The best mover's verified speed, as a share of the peak."""
    best = max(float(mover["verified_gb_s"]) for mover in page_size["movers"].values())
    return best / float(page_size["peak_gb_s"])


def _attention(parts: Mapping[str, Any], requests: int, context: int) -> float:
    point = _point(parts["attention"], requests=requests, context=context, rows=1)
    return float(point["of_ceiling"])


def _backups(speeds: Mapping[str, float]) -> float:
    return max(speed for name, speed in speeds.items() if name != "one_piece") / speeds["one_piece"]


def table(found: Mapping[str, Any] | None, kernels: Mapping[str, int]) -> list[Row]:
    """Every row; those of the device that ``found`` was measured on have its figures."""
    known = {} if found is None else measured(found)
    gpu = "" if found is None else str(found.get("gpu") or "")
    rows = []
    for profile, (name, multiprocessors) in DEVICES.items():
        for row in estimates(Device(name, multiprocessors, load_hardware(profile)), kernels):
            value = known.get(row.key) if name in gpu else None
            rows.append(Row(**{**asdict(row), "measured": value}))
    return rows


def evidence(file: Path) -> Mapping[str, Any] | None:
    """The results of ``bench.gpu``; None where no GPU has been measured yet."""
    if not file.exists():
        return None
    results: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["results"]
    return results


def main() -> None:
    rows = table(evidence(results_file.RESULTS / "gpu.json"), kernels_of_a_step(results_file.RESULTS))
    for row in rows:
        print(f"{row.device}: {row.what}: {row.estimate:.4g} {row.unit} {row.aim}")
    assumed = {
        "kernel_us": KERNEL_US,
        "host_us": HOST_US,
        "link_latency_us": LINK_LATENCY_US,
        "memory_latency_us": MEMORY_LATENCY_US,
        "tile_bytes": TILE_BYTES,
        "tiles_ahead": TILES_AHEAD,
    }
    results_file.write("gpu_estimates", {"assumed": assumed, "rows": [asdict(row) for row in rows]}, seed=0)


if __name__ == "__main__":
    main()
