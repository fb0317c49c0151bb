"""Loads and backups over the link, and what they take from the model's kernels beside them.

Copies and checks are modelled in :mod:`bench.gpu_estimates.copies`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from bench.gpu_estimates import copies
from bench.gpu_estimates.copies import PREFIX, Machine
from bench.gpu_estimates.llama import LLAMA_8B, layer_products, token_bytes
from bench.gpu_estimates.one_request import MEMORY_LATENCY_US
from bench.gpu_estimates.prompts import CHUNKS, prefill_tokens_per_s
from bench.gpu_estimates.rows import Device, Row
from services.worker.kernels import row_checksums
from services.worker.kv.movers.gpu_assisted import LOAD_PROGRAMS

LINK_LATENCY_US = (1.5, 3.0, 9.0)
"""Assumed from a load instruction of the GPU to the arrival of what it reads in host memory over PCIe: an idle link's,
a likely one under load, and a bad one.
"""

LOAD_TARGET, SLOWDOWN_TARGET = 0.9, 0.05
PAGES = (1, 16, 32)
"""Tokens of a page."""

TILE = (128, 256)
"""Assumed rows and columns of a result that a multiprocessor computes at a time: cuBLAS's usual tile on Hopper."""


def machine(device: Device) -> Machine:
    """What the model of transfers takes of a device."""
    return Machine(
        link_gb_s=device.link_bytes_per_s / 1e9,
        memory_gb_s=device.peak_bytes_per_s / 1e9,
        memory_latency_us=MEMORY_LATENCY_US,
        multiprocessors=device.multiprocessors,
        tiles_ahead=device.tiles_ahead,
    )


def loaded_share(device: Device, page_tokens: int, latency_us: float) -> float:
    """A verified load of ``PREFIX`` tokens by the GPU-assisted mover, as a share of a copy in one piece."""
    return copies.verified_share(page_tokens, latency_us, LOAD_PROGRAMS, machine(device))


def copied_bytes_per_s(device: Device, page_tokens: int) -> float:
    """By one copy for each row of a page, each with its overhead."""
    row = page_tokens * LLAMA_8B.geometry(1).half_bytes
    return row / (device.profile.link.transfer_overhead_us / 1e6 + row / device.link_bytes_per_s)


def waves(rows: int, multiprocessors: int) -> float:
    """Time of a layer's products in tiles, one after the other, on so many multiprocessors: whole waves of them."""
    return sum(
        math.ceil(math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1]) / multiprocessors) * depth
        for columns, depth in layer_products()
    )


def waves_lost(device: Device, rows: int, taken: int) -> float:
    """Slowdown of a prompt's products when ``taken`` multiprocessors are others'."""
    return waves(rows, device.multiprocessors - taken) / waves(rows, device.multiprocessors) - 1.0


def prefill_slowdown(device: Device) -> tuple[float, float, float]:
    """Share that copy and check hold of multiprocessors on average; that of the copy alone; and the worst: products in
    whole waves of tiles, while the check runs and while it does not.
    """
    held = copies.occupied_share(LOAD_PROGRAMS, machine(device))
    copy = LOAD_PROGRAMS / device.multiprocessors
    checking = copies.checking_share(machine(device))
    both = LOAD_PROGRAMS + row_checksums.SUM_PROGRAMS
    worst = max(
        checking * waves_lost(device, rows, both) + (1.0 - checking) * waves_lost(device, rows, LOAD_PROGRAMS)
        for rows in CHUNKS
    )
    return held, copy, max(held, worst)


def decode_slowdown(device: Device) -> tuple[float, float, float]:
    """Share of memory bandwidth that writes and checks take; a half of it, where copies find what is idle; and with
    the multiprocessors that are held on top.
    """
    memory = copies.memory_share(machine(device))
    return memory, memory / 2, memory + copies.occupied_share(LOAD_PROGRAMS, machine(device))


def hiding_tokens(device: Device) -> float:
    """New tokens whose computation takes as long as loading a prefix of ``PREFIX`` tokens."""
    speed = loaded_share(device, 16, LINK_LATENCY_US[1]) * device.link_bytes_per_s
    return PREFIX * token_bytes() / speed * prefill_tokens_per_s(device, CHUNKS[0])


def estimates(device: Device) -> Iterator[Row]:
    """Loads, what they slow, backups, and what hides a load."""
    best, likely, worst = LINK_LATENCY_US
    for page in PAGES:
        yield Row(
            f"loads_{page}", device.name,
            f"loads by the GPU-assisted mover, {LOAD_PROGRAMS} programs, verified on the device, "
            f"pages of {page}", loaded_share(device, page, likely), "of a copy in one piece",
            f"at least {LOAD_TARGET:g}, verified", loaded_share(device, page, worst), loaded_share(device, page, best),
        )  # fmt: skip
    for page in PAGES:
        share = copied_bytes_per_s(device, page) / device.link_bytes_per_s
        yield Row(f"copies_{page}", device.name, f"loads by a copy a row, unverified, pages of {page}", share,
                  "of a copy in one piece")  # fmt: skip
    for name, (estimate, low, high) in {"prefill": prefill_slowdown(device), "decode": decode_slowdown(device)}.items():
        yield Row(f"slowdown_{name}", device.name, f"slowdown of a {name} beside such loads", estimate, "of the time",
                  f"at most {SLOWDOWN_TARGET:g}", low, high)  # fmt: skip
    programs, link = max(1, LOAD_PROGRAMS // 2), device.link_bytes_per_s / 1e9
    # Writes over a link are not answered, so what is read of the device's memory waits; at worst they are.
    copied = [copies.copied_gb_s(programs, us, machine(device)) / link for us in (MEMORY_LATENCY_US, worst)]
    yield Row("backups", device.name, f"backups over a side stream, {programs} program", copied[0],
              "of a copy in one piece", "beside loads", copied[1], copied[0])  # fmt: skip
    made = prefill_tokens_per_s(device, CHUNKS[0]) * token_bytes() / device.link_bytes_per_s
    yield Row("backups_made", device.name, "KV that prefills at full speed make", made, "of a copy in one piece")
    yield Row("hiding", device.name, f"new tokens that hide a load of {PREFIX:,} tokens", hiding_tokens(device),
              "tokens")  # fmt: skip
