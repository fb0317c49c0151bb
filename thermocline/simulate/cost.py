"""The times of work on a modelled device: pure functions of a machine, a model and a piece of work.

A step is modelled as its parts one after another, each limited by arithmetic or by memory, whichever is slower
(the roofline model):

* matrix products: ``2 * parameters * rows`` FLOP at an efficiency that grows with the rows, against reading all
  weights once;
* attention: ``4 * layers * heads * head_dim`` FLOP for every pair of a row and a token that it sees, against
  reading the KV of the context once for each request;
* overheads that depend on neither: per step, per layer and per request.

Tensor parallelism divides FLOP, weights and KV by its degree and adds two all-reduces a layer. Everything is in
seconds, bytes and FLOP.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Literal

from shared.errors import ConfigError
from thermocline.simulate.profiles import HardwareProfile, ModelProfile

Io = Literal["assisted", "per-page"]
Piece = tuple[int, int]
"""A prefill chunk: tokens [start, end) of one request."""

GIB = 2**30
_US = 1e-6
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Costs:
    """Coefficients of one device, one model and one way of copying, for the functions below.

    Figures are per device: with tensor parallelism each device has its share of heads, weights and KV.
    """

    layers: int
    page_size: int  # tokens
    layer_flop: float  # Matrix products, per row of a step.
    output_flop: float  # Output matrix, per sampled row.
    pair_flop: float  # Attention, per pair of a row and a token that it sees.
    peak_flops: float  # FLOP a second.
    efficiency: tuple[tuple[float, float], ...]  # (log of rows, fraction of the peak)
    attention_flops: float  # FLOP a second of chunk attention.
    weights_s: float  # Reading all weights once.
    kv_token_bytes: float  # KV of one token on this device.
    kv_read_rate: float  # Bytes a second.
    overhead_s: float  # Per step, layers included.
    request_overhead_s: float  # Per request in a step, layers included.
    reduce_latency_s: float  # All-reduces, per step.
    reduce_row_s: float  # All-reduces, per row.
    link_latency_s: float
    link_token_s: float  # Per loaded token, with the chosen way of copying.
    backup_token_s: float  # Per backed-up token.
    overlap: float
    linear_cache: dict[tuple[int, int], float] = field(default_factory=dict, compare=False)


def costs_of(
    hardware: HardwareProfile,
    model: ModelProfile,
    *,
    page_size: int,
    tensor_parallel: int = 1,
    io: Io = "assisted",
    backup_share: float = 1.0,
) -> Costs:
    """Combine profiles; backups get ``backup_share`` of a link's time.

    Raises ConfigError when the hardware has no rate for the dtype or heads do not divide.
    """
    if model.dtype not in hardware.compute.peak_tflops:
        known = ", ".join(hardware.compute.peak_tflops)
        raise ConfigError(
            f"hardware {hardware.name} has no peak_tflops for {model.dtype} of {model.name}, only {known}"
        )
    if model.heads % tensor_parallel:
        raise ConfigError(f"{model.heads} heads of {model.name} do not divide among {tensor_parallel} devices")
    degree = tensor_parallel
    peak = hardware.compute.peak_tflops[model.dtype] * 1e12
    memory, step, link = hardware.memory, hardware.step, hardware.link
    kv_token_bytes = model.kv_token_bytes / min(degree, model.kv_heads)
    # Around a ring each device sends and receives its row twice, less its own share of it.
    reduced_bytes = 2 * model.layers * model.hidden * model.dtype_bytes * 2 * (degree - 1) / degree
    return Costs(
        layers=model.layers,
        page_size=page_size,
        layer_flop=2.0 * model.layer_parameters / degree,
        output_flop=2.0 * model.embedding_parameters / degree,
        pair_flop=4.0 * model.layers * model.heads * model.head_dim / degree,
        peak_flops=peak,
        efficiency=tuple((log(rows), fraction) for rows, fraction in hardware.compute.efficiency),
        attention_flops=peak * hardware.compute.attention_efficiency,
        weights_s=model.weight_bytes / degree / (memory.bandwidth_gb_s * _GB * memory.weight_read_efficiency),
        kv_token_bytes=kv_token_bytes,
        kv_read_rate=memory.bandwidth_gb_s * _GB * memory.kv_read_efficiency,
        overhead_s=(step.overhead_us + step.layer_overhead_us * model.layers) * _US,
        request_overhead_s=(step.request_overhead_us + step.request_layer_overhead_us * model.layers) * _US,
        reduce_latency_s=2 * model.layers * hardware.peer.latency_us * _US if degree > 1 else 0.0,
        reduce_row_s=reduced_bytes / (hardware.peer.bandwidth_gb_s * _GB),
        link_latency_s=link.latency_us * _US,
        link_token_s=_copy_token_s(hardware, model, kv_token_bytes, page_size, io),
        backup_token_s=_copy_token_s(hardware, model, kv_token_bytes, page_size, io) / backup_share,
        overlap=link.overlap,
    )


def _copy_token_s(
    hardware: HardwareProfile, model: ModelProfile, kv_token_bytes: float, page_size: int, io: Io
) -> float:
    """Return the link time for one token's KV, in seconds.

    Assisted (Strata 4.2): a gather kernel reaches the same part of the bandwidth at any page size. Per page: K and V of
    each page and layer are a copy of their own, at the link's best rate plus a fixed overhead; so efficiency falls with
    the size of the copy (Strata 3.1, Figure 3).
    """
    link = hardware.link
    rate = link.bandwidth_gb_s * _GB
    if io == "assisted":
        return kv_token_bytes / (rate * link.assisted_efficiency)
    copies_per_token = model.layers * 2 / page_size
    return kv_token_bytes / (rate * link.peak_efficiency) + copies_per_token * link.transfer_overhead_us * _US


def efficiency(costs: Costs, rows: int) -> float:
    """Return the part of the peak for matrix products of ``rows`` rows: linear in log(rows), flat beyond the ends."""
    points = costs.efficiency
    at = log(max(1, rows))
    index = bisect_right(points, (at, 2.0))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (left, low), (right, high) = points[index - 1], points[index]
    return low + (high - low) * (at - left) / (right - left)


def linear_s(costs: Costs, rows: int, sampled: int) -> float:
    """Return seconds of a step's matrix products and all-reduces, for ``rows`` rows, ``sampled`` of them sampled."""
    key = (rows, sampled)
    known = costs.linear_cache.get(key)
    if known is not None:
        return known
    flop = costs.layer_flop * rows + costs.output_flop * sampled
    seconds = max(flop / (costs.peak_flops * efficiency(costs, rows)), costs.weights_s)
    seconds += costs.reduce_latency_s + costs.reduce_row_s * rows
    if len(costs.linear_cache) < 65_536:
        costs.linear_cache[key] = seconds
    return seconds


def chunk_attention_s(costs: Costs, start: int, end: int) -> float:
    """Return seconds of a prefill chunk's attention: token i sees i + 1 tokens, and KV up to ``end`` is read once."""
    pairs = (end * (end + 1) - start * (start + 1)) / 2
    return max(pairs * costs.pair_flop / costs.attention_flops, end * costs.kv_token_bytes / costs.kv_read_rate)


def decode_token_s(costs: Costs) -> float:
    """Return seconds of a decoding request's attention, per token of its context."""
    return max(costs.pair_flop / costs.peak_flops, costs.kv_token_bytes / costs.kv_read_rate)


def step_s(costs: Costs, chunks: Sequence[Piece], decoding: int, context: int) -> float:
    """Return seconds of a whole step without loads, 0 without work.

    It computes ``chunks``, and one token for each of ``decoding`` requests, whose contexts sum to ``context`` tokens.
    """
    if not chunks and not decoding:
        return 0.0
    rows = decoding + sum(end - start for start, end in chunks)
    requests = decoding + len(chunks)
    seconds = costs.overhead_s + costs.request_overhead_s * requests + linear_s(costs, rows, requests)
    seconds += decode_token_s(costs) * context
    for start, end in chunks:
        seconds += chunk_attention_s(costs, start, end)
    return seconds


def load_s(costs: Costs, tokens: int) -> float:
    """Return seconds to load ``tokens`` tokens (whole pages) from host memory over an idle link."""
    pages = -(-tokens // costs.page_size)
    return costs.link_latency_s + pages * costs.page_size * costs.link_token_s if tokens else 0.0


def backup_s(costs: Costs, tokens: int) -> float:
    """Return seconds to back up ``tokens`` tokens (whole pages) to host memory over an idle link."""
    return costs.link_latency_s + tokens * costs.backup_token_s if tokens else 0.0


def overlapped_s(costs: Costs, compute_s: float, loading_s: float, head_start_s: float = 0.0) -> tuple[float, float]:
    """Return (wall time, stall) in seconds of a step whose loads overlap it layer by layer (Strata 2.3).

    Layer i waits for the loads of layers up to i. With equal layers of compute c and load l the last layer ends at
    max(l + L * c, L * l + c): either loading or computing waits only for one layer of the other. The load began
    ``head_start_s`` before the step. The part that cannot overlap is added to the computation.
    """
    if not loading_s:
        return compute_s, 0.0
    layers = costs.layers
    slowed = compute_s + (1.0 - costs.overlap) * loading_s
    load, compute = loading_s / layers, slowed / layers
    end = max(load + slowed, loading_s + compute, head_start_s + slowed)
    wall = end - head_start_s
    return wall, wall - compute_s


def hidden_after_s(costs: Costs, compute_s: float, loading_s: float) -> float:
    """Return seconds from the load's beginning to the earliest start of a step that never waits for a layer."""
    layers = costs.layers
    compute = (compute_s + (1.0 - costs.overlap) * loading_s) / layers
    return max(loading_s / layers, loading_s - (layers - 1) * compute)


def device_kv_tokens(hardware: HardwareProfile, model: ModelProfile, tensor_parallel: int = 1) -> int:
    """Return the tokens of KV that fit in 90% of device memory beside the weights; may be 0."""
    room = hardware.memory.device_gib * GIB * 0.9 - model.weight_bytes / tensor_parallel
    return max(0, int(room / (model.kv_token_bytes / min(tensor_parallel, model.kv_heads))))


def host_kv_tokens(hardware: HardwareProfile, model: ModelProfile) -> int:
    """Return the tokens of KV that fit in 80% of a node's host memory."""
    return int(hardware.memory.host_gib * GIB * 0.8 / model.kv_token_bytes)
