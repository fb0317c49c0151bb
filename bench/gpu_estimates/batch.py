"""A decode step of 64 requests, ours and vLLM's, under the same assumptions about the same machine.

A step takes its products (by what they read or by what they compute, whichever is longer), attention, logits, and a gap
for each kernel. Both systems have the same weights, KV and products from cuBLAS. Different are the number of kernels,
both counted; who attends; and the processor's part, which runs ahead of the device in both
(:mod:`bench.gpu_estimates.vllm_step`), but follows it in ours where the host has a part in choosing tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.gpu_estimates import vllm_step
from bench.gpu_estimates.llama import logits_bytes, product_flop, token_bytes, weight_bytes
from bench.gpu_estimates.rows import Device, Row

REQUESTS = 64
CONTEXTS = (1024, 4096)


@dataclass(frozen=True, slots=True)
class Machine:
    """What both systems meet. ``memory`` and ``tensor`` are the shares of a device's peaks that products with 64 rows
    reach in what they read and in what they compute, ``attention`` that of memory in K and V; ``gap_us`` is from the
    end of one kernel of a graph to the start of the next.
    """

    memory: float
    tensor: float
    attention: float
    gap_us: float


LIKELY = Machine(memory=0.78, tensor=0.35, attention=0.75, gap_us=1.5)
RANGES = {"memory": (0.70, 0.85), "tensor": (0.25, 0.50), "attention": (0.65, 0.85), "gap_us": (1.0, 2.0)}
"""Least and largest of each. With 64 rows products read weights for as long as they compute, or longer; attention of
large batches is published at 65% to 85% of the memory's rate, by whichever kernel.
"""

BEHIND = 0.80
"""What attention of ours reaches of what vLLM's does, where it is assumed to be behind: Triton's decode kernel without
the asynchronous copies of FlashAttention-3. FlashInfer, where it is installed, attends in both systems' place.
"""


@dataclass(frozen=True, slots=True)
class System:
    """``host_us`` of the processor for each step, while the device waits; where it ``is_ahead``, while the device
    computes the step before.
    """

    kernels: float
    host_us: float
    is_ahead: bool = False


def step_s(device: Device, system: System, machine: Machine, context: int, requests: int = REQUESTS) -> float:
    """Seconds of one decode step of requests with so many tokens behind each."""
    read_s = weight_bytes() / (device.peak_bytes_per_s * machine.memory)
    computed_s = product_flop(requests, requests) / (device.peak_flop_per_s * machine.tensor)
    logits_s = logits_bytes(requests) / (device.peak_bytes_per_s * machine.memory)
    attention_s = requests * context * token_bytes() / (device.peak_bytes_per_s * machine.attention)
    device_s = max(read_s, computed_s) + logits_s + attention_s + system.kernels * machine.gap_us / 1e6
    host_s = system.host_us / 1e6
    return max(device_s, host_s) if system.is_ahead else device_s + host_s


@dataclass(frozen=True, slots=True)
class Ours:
    """``kernels`` in the graph and around it; microseconds of the processor, likely, least and largest: ``waiting_us``
    between two steps where the tokens are read first, ``ahead_us`` for a whole step where they are not.
    """

    kernels: int
    waiting_us: tuple[float, float, float]
    ahead_us: tuple[float, float, float]

    def systems(self, *, reads_first: bool = False) -> list[System]:
        if reads_first:
            return [System(self.kernels, host_us) for host_us in self.waiting_us]
        return [System(self.kernels, host_us, is_ahead=True) for host_us in self.ahead_us]


def theirs() -> list[System]:
    """Likely, with the fewest kernels and with the most. The processor is ahead, so the device does not wait."""
    fewest, most = vllm_step.kernels()
    return [System((fewest + most) / 2, 0.0), System(fewest, 0.0), System(most, 0.0)]


def corners() -> list[Machine]:
    """Every combination of the ends of :data:`RANGES`."""
    return [Machine(**dict(zip(RANGES, ends, strict=True))) for ends in itertools.product(*RANGES.values())]


def ours_of(results: Path) -> Ours:
    """Kernels as counted for 64 requests (``gpu_step.json``). The processor's part is what was measured without a GPU
    (``step_host.json``) and assumed launches; at least half of it, on a faster processor; at most what
    ``gpu_step.json`` assumes to be unkind.
    """
    step = json.loads((results / "gpu_step.json").read_text(encoding="utf-8"))["results"]
    case = next(each for each in step["cases"] if each["rows"] == REQUESTS and each["forward"] == "fused")
    host = json.loads((results / "step_host.json").read_text(encoding="utf-8"))["results"]
    point = next(each for each in host["points"] if each["requests"] == REQUESTS)
    unkind = step["assumptions"]["unkind"]
    measured = point["before_us"] + LAUNCHES_US
    most = max(measured, unkind["host_us"] + REQUESTS * unkind["request_us"])
    # Ahead of the device it is the same work, in another order.
    beside = point["beside_us"]
    return Ours(
        case["kernels"] + case["around"],
        (measured, measured / 2, most),
        (measured + beside, (measured + beside) / 2, most + beside),
    )


LAUNCHES_US = 60.0
"""Assumed of the driver between two steps: one graph's launch, and about ten more around it."""


def ratios(device: Device, ours: Ours, context: int, *, behind: float = 1.0, reads_first: bool = False) -> list[float]:
    """Our tokens a second over vLLM's, the likely one first, then those of every corner: the machine is the same for
    both, and attention of ours comes to ``behind`` of vLLM's. ``reads_first``: we read each step before the next.
    """
    us = ours.systems(reads_first=reads_first)
    them = theirs()

    def ratio(mine: System, other: System, machine: Machine) -> float:
        slower = replace(machine, attention=machine.attention * behind)
        return step_s(device, other, machine, context) / step_s(device, mine, slower, context)

    every = itertools.product(us[1:], them[1:], corners())
    return [ratio(us[0], them[0], LIKELY), *(ratio(*each) for each in every)]


def attention_at_parity(device: Device, ours: Ours, context: int, machine: Machine = LIKELY) -> float:
    """Share of the memory's rate that our attention would need to be as fast as vLLM, whose is ``machine``'s: it pays
    for kernels that are more in number.
    """
    nbytes = REQUESTS * context * token_bytes()
    mine = step_s(device, ours.systems()[0], machine, context)
    other = step_s(device, theirs()[0], machine, context)
    allowed_s = nbytes / (device.peak_bytes_per_s * machine.attention) - (mine - other)
    return nbytes / allowed_s / device.peak_bytes_per_s if allowed_s > 0 else float("inf")


def _speed(device: Device, systems: list[System], context: int) -> tuple[float, float, float]:
    every = [
        REQUESTS / step_s(device, system, machine, context)
        for system, machine in itertools.product(systems[1:], corners())
    ]
    return REQUESTS / step_s(device, systems[0], LIKELY, context), min(every), max(every)


def estimates(device: Device, results: Path) -> Iterator[Row]:
    """Both systems' speed at batch 64, and the ratio by what could decide it."""
    ours = ours_of(results)
    for context in CONTEXTS:
        at = f"{REQUESTS} requests, {context:,} tokens behind each"
        for name, systems in (("ours", ours.systems()), ("vllm", theirs())):
            counts = sorted({round(each.kernels) for each in systems[1:]})
            title = f"decode, {at}: " + ("ours" if name == "ours" else f"vLLM {vllm_step.VERSION}")
            speed, low, high = _speed(device, systems, context)
            what = f"{title}, {' to '.join(str(each) for each in counts)} kernels"
            yield Row(f"{name}_{REQUESTS}_{context}", device.name, what, speed, "tokens/s", "", low, high)
        compared = {
            ("", f"ours over vLLM, {context:,} tokens, attention alike"): ratios(device, ours, context),
            ("_behind", f"ours over vLLM, {context:,} tokens, our attention at {BEHIND:.0%} of vLLM's"): ratios(
                device, ours, context, behind=BEHIND
            ),
            ("_read_first", f"ours over vLLM, {context:,} tokens, attention alike, tokens read first"): ratios(
                device, ours, context, reads_first=True
            ),
        }
        for (key, what), found in compared.items():
            yield Row(f"over_vllm_{REQUESTS}_{context}{key}", device.name, what, found[0], "times",
                      "" if key else "at least 1", min(found), max(found))  # fmt: skip
        need = attention_at_parity(device, ours, context)
        what = f"our attention's share of memory at parity, {context:,} tokens, vLLM's at {LIKELY.attention:.0%}"
        yield Row(f"parity_{context}", device.name, what, need, "of the memory's peak")
