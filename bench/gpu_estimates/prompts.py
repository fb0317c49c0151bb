"""Chunks of a prompt: bound by products, whose share of the tensor cores' peak is assumed."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu_estimates.llama import attention_flop, product_flop
from bench.gpu_estimates.rows import Device, Row

CHUNKS = (2048, 8192)
"""Tokens of a chunk: the two points that ``bench.gpu.prefill`` measures at the start of a prompt."""

PRODUCTS = (0.45, 0.75)
"""Least and largest share of the dense peak that products of thousands of rows reach: cuBLAS comes to about three
quarters of it on Hopper while the clock holds, and to less where power bounds the clock or tiles do not fill the last
wave.
"""

ATTENTION = (0.2, 0.6)
"""The same of attention over pages with heads of 128 dimensions: 60% is about what FlashAttention-3 publishes for short
causal prompts, and a Triton kernel without its pipelining has a third to two thirds of that.
"""


def chunk_s(device: Device, rows: int, products: float, attention: float) -> float:
    """A chunk at the start of a prompt, whose products and attention take their turns."""
    peak = device.peak_flop_per_s
    return product_flop(rows, 1) / (peak * products) + attention_flop(rows) / (peak * attention)


def assumed_shares(device: Device, rows: int) -> tuple[float, float]:
    """Of products and attention, as the device's profile has them."""
    compute = device.profile.compute
    return max(share for least, share in compute.efficiency if least <= rows), compute.attention_efficiency


def prefill_tokens_per_s(device: Device, rows: int) -> float:
    """At the profile's shares."""
    return rows / chunk_s(device, rows, *assumed_shares(device, rows))


def estimates(device: Device) -> Iterator[Row]:
    """Speed of chunks, and what share of the roofline it is."""
    for rows in CHUNKS:
        flop = product_flop(rows, 1) + attention_flop(rows)
        slow, fast = (rows / chunk_s(device, rows, *shares) for shares in zip(PRODUCTS, ATTENTION, strict=True))
        speed = prefill_tokens_per_s(device, rows)
        of_peak = flop / rows / device.peak_flop_per_s
        what = f"a chunk of {rows:,} tokens, {flop / 1e12:.3g} TFLOP, {attention_flop(rows) / flop:.1%} of it attention"
        yield Row(f"prefill_{rows}", device.name, what, speed, "tokens/s", "", slow, fast)
        what = f"a chunk of {rows:,} tokens: share of the roofline"
        yield Row(f"prefill_{rows}_roofline", device.name, what, speed * of_peak, "of the dense peak",
                  "near the roofline", slow * of_peak, fast * of_peak)  # fmt: skip
