"""A decode step of one request: bound by weights, by attention of few programs, and by gaps between kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.gpu_estimates.llama import LLAMA_8B, token_bytes, weight_bytes
from bench.gpu_estimates.rows import Device, Row
from services.worker.engine.key_splits import splits_for
from services.worker.kernels.block_sizes import block_sizes

KERNEL_US = 2.0
"""Assumed between the ends of two small kernels of a CUDA graph that do not overlap."""

MEMORY_LATENCY_US = 0.8
"""Assumed from a load instruction to the arrival of what it reads in device memory, under load."""

HOST_US = 200.0
"""Assumed of the processor between two steps of one request."""

KIND, UNKIND = (0.85, 1.0, 150.0), (0.70, 2.0, 300.0)
"""Ends of what is assumed: share of the memory's peak that reading weights reaches, and the two above."""

DECODE_TARGET = 185.0
CONTEXT = 1024

ATTENTION = ((1, 1024), (1, 16_384), (64, 4096))
"""(requests, context) of decode steps whose attention is estimated."""


def attention_bytes_per_s(device: Device, requests: int, context: int) -> float:
    """Of K and V by the decode kernel. Each program has about one block of keys in flight, which takes the latency of
    memory; so few programs leave bandwidth unused, however fast each is.
    """
    programs = requests * LLAMA_8B.kv_heads * splits_for(context)
    sizes = block_sizes(LLAMA_8B.head_dim, LLAMA_8B.heads // LLAMA_8B.kv_heads, 2)
    in_flight = programs * sizes.block_n * 2 * LLAMA_8B.head_dim
    return min(device.read_bytes_per_s, in_flight / (MEMORY_LATENCY_US / 1e6))


def kernels_of_a_step(results: Path) -> dict[str, int]:
    """Kernels of a decode step of one request by the forward that launches them, the fewest first: counted, where the
    count is among the results, else 10 and 30 a layer, about what fused kernels and separate operators come to.
    """
    file = results / "gpu_step.json"
    if not file.exists():
        return {f"{each} kernels a layer": each * LLAMA_8B.layers for each in (10, 30)}
    cases = json.loads(file.read_text(encoding="utf-8"))["results"]["cases"]
    counted = {
        f"{case['kernels']:,} kernels ({case['forward']})": case["kernels"] for case in cases if case["rows"] == 1
    }
    return dict(sorted(counted.items(), key=lambda each: each[1]))


def decode_s(
    device: Device,
    kernels: int,
    context: int = CONTEXT,
    *,
    share: float | None = None,
    kernel_us: float = KERNEL_US,
    host_us: float = HOST_US,
) -> float:
    """Of one request, where reading weights, attention, gaps between kernels and the processor's part add up. ``share``
    is of the memory's peak, by default the profile's.
    """
    read = device.read_bytes_per_s if share is None else device.peak_bytes_per_s * share
    attention_s = context * token_bytes() / min(read, attention_bytes_per_s(device, 1, context))
    return weight_bytes() / read + attention_s + (kernels * kernel_us + host_us) / 1e6


def kernel_budget(device: Device, tokens_per_s: float, context: int = CONTEXT) -> int:
    """The most kernels of a step that comes to so many tokens a second; below 0 where reading alone forbids it."""
    return int((1.0 / tokens_per_s - decode_s(device, 0, context)) / (KERNEL_US / 1e6))


def estimates(device: Device, kernels: Mapping[str, int]) -> Iterator[Row]:
    """``kernels`` are of a decode step, the fewest first."""
    floor = device.read_bytes_per_s / (weight_bytes() + CONTEXT * token_bytes())
    what = f"decode, one request, {CONTEXT} tokens of context: if memory were all"
    yield Row("decode_floor", device.name, what, floor, "tokens/s")
    for number, (name, count) in enumerate(kernels.items()):
        aim = f"{DECODE_TARGET:g} tokens/s" if device.name == "H200" and number == 0 else ""
        key = "decode" if number == 0 else f"decode_{number}"
        slow, fast = (
            1.0 / decode_s(device, count, share=share, kernel_us=kernel_us, host_us=host_us)
            for share, kernel_us, host_us in (UNKIND, KIND)
        )
        speed = 1.0 / decode_s(device, count)
        yield Row(key, device.name, f"decode, one request, {name}", speed, "tokens/s", aim, slow, fast)
    if (budget := kernel_budget(device, DECODE_TARGET)) > 0:
        what = f"most kernels of a step at {DECODE_TARGET:g} tokens/s"
        yield Row("decode_budget", device.name, what, budget, "kernels")
    fewest = min(kernels.values())
    yield Row("layer_kernels", device.name, "kernels a layer, one request", fewest / LLAMA_8B.layers, "kernels",
              "about ten")  # fmt: skip
    for requests, context in ATTENTION:
        reached = attention_bytes_per_s(device, requests, context) / device.read_bytes_per_s
        yield Row(f"attention_{requests}_{context}", device.name,
                  f"attention of decode, {requests} x {context:,} tokens", reached, "of what reading weights reaches",
                  "near the roofline")  # fmt: skip
