"""A simulation's model of a machine. Every number has its unit in its name."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Rows = Annotated[int, Meta(ge=1)]
Curve = Annotated[list[tuple[Rows, Fraction]], Meta(min_length=1)]
Rates = Annotated[dict[str, Positive], Meta(min_length=1)]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device and of its node."""

    device_gib: Positive
    host_gib: Positive  # Per node, shared by all its workers.
    bandwidth_gb_s: Positive  # Datasheet bandwidth of device memory, 1e9 bytes a second.
    weight_read_efficiency: Fraction  # Part of the bandwidth that reading weights reaches.
    kv_read_efficiency: Fraction  # Part of the bandwidth that attention reaches when it reads KV.


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """Arithmetic of one device."""

    peak_tflops: Rates  # By dtype, dense.
    efficiency: Curve  # (rows of a step, part of the peak that its matrix products reach).
    attention_efficiency: Fraction  # Part of the peak that attention of a prefill chunk reaches.


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a forward pass besides arithmetic: launches, Python, sampling."""

    overhead_us: NotNegative
    layer_overhead_us: NotNegative  # Per layer.
    request_overhead_us: NotNegative  # Per request in the step.
    request_layer_overhead_us: NotNegative  # Per request and layer.


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The link between one device and host memory, in one direction."""

    bandwidth_gb_s: Positive  # Datasheet, 1e9 bytes a second.
    latency_us: NotNegative  # Before the first byte of a load, promotion or backup.
    transfer_overhead_us: NotNegative  # Per copy, when pages are copied one by one.
    peak_efficiency: Fraction  # Part of the bandwidth that one very large copy reaches.
    assisted_efficiency: Fraction  # Part that a gather kernel reaches, whatever the page size.
    overlap: Annotated[float, Meta(ge=0, le=1)]  # Part of a load that can run beside computation.
    full_duplex: bool  # Backups do not slow loads.


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The node's disk."""

    bandwidth_gb_s: Positive
    latency_us: NotNegative


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The link between the devices of one tensor-parallel group."""

    bandwidth_gb_s: Positive
    latency_us: NotNegative  # Per all-reduce.


class CellCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Times that the cell's own processes add."""

    gateway_us: NotNegative  # HTTP, tokenising and streaming, on the way in and out together.
    message_us: NotNegative  # One message through the broker, publish to handler.
    scheduler_us: NotNegative  # One step of the scheduler's core; it does one at a time.


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device, its links and its node, in sections."""

    name: Annotated[str, Meta(min_length=1)]
    description: str
    memory: Memory
    compute: Compute
    step: Step
    link: Link
    disk: Disk
    peer: Peer
    cell: CellCosts


def contradictions(profile: HardwareProfile) -> list[str]:
    """Return the contradictions between fields that are each well-formed."""
    faults = []
    rows = [row for row, _ in profile.compute.efficiency]
    if any(later <= earlier for earlier, later in pairwise(rows)):
        faults.append("compute.efficiency: rows must rise from point to point")
    if profile.link.assisted_efficiency > profile.link.peak_efficiency:
        faults.append("link.assisted_efficiency: must not exceed link.peak_efficiency")
    return faults
