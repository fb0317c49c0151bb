"""What ``thermocline up`` says once the cell can serve. Pure: facts in, lines out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.context_limit import size_flag
from services.gateway.openai_schema.models import Serving, ServingDevice, ServingPool
from shared.sizes import size

_EACH = {"device": " of each worker", "host": " of each node"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFacts:
    """``serving`` is what the gateway says of devices and pools; None where it says nothing. ``degraded`` holds a line
    for each thing that is missing, and ``page`` says where the page is and how it opens.
    """

    base_url: str
    model: str
    workers: int
    page: str
    schedulers: int = 1
    serving: Serving | None = None
    degraded: Sequence[str] = ()


def ready_lines(facts: ReadyFacts) -> list[str]:
    """The first line says that the cell is ready and where; the others what it serves with."""
    workers = "1 worker" if facts.workers == 1 else f"{facts.workers} workers"
    if facts.schedulers > 1:
        workers += f", {facts.schedulers} schedulers"
    state = "ready, degraded," if facts.degraded else "ready"
    lines = [f"Thermocline is {state} at {facts.base_url} (model {facts.model}, {workers})", *facts.degraded]
    serving = facts.serving
    if serving is not None:
        lines += device_lines(serving)
        lines.append(f"Pools: {'; '.join(_pools(serving.pools)) or 'none'}")
        lines.append(context_line(serving))
    return [*lines, f"API: {facts.base_url}/v1", facts.page]


def device_lines(serving: Serving) -> list[str]:
    """What computes, in which data type, and why a GPU that is there does not; equal devices are said once."""
    names = list(dict.fromkeys(_device(device) for device in serving.devices)) or ["unknown"]
    notes = dict.fromkeys(device.note for device in serving.devices if device.note)
    return [f"Device: {', '.join(names)}; {serving.dtype}", *(f"Note: {note}" for note in notes)]


def context_line(serving: Serving) -> str:
    """How long a request may be, and what to raise where the model would take a longer one."""
    own, tokens = serving.model_context_tokens, serving.context_tokens
    if tokens >= own:
        return f"Context: {own:,} tokens"
    needed = size_flag(own, serving.page_size, serving.page_bytes)
    return (
        f"Context: {tokens:,} tokens, all that the device pool of a worker holds; the model takes {own:,}, with "
        f"--device-kv-bytes {needed}"
    )


def _device(device: ServingDevice) -> str:
    ranks = f" and {device.ranks - 1} more" if device.kind == "cuda" and device.ranks > 1 else ""
    return f"{device.kind} ({device.name}{ranks})"


def _pools(pools: Sequence[ServingPool]) -> list[str]:
    """One entry a tier: equal pools are said once."""
    tiers = dict.fromkeys(pool.tier for pool in pools)
    return [_tier(tier, [pool for pool in pools if pool.tier == tier]) for tier in tiers]


def _tier(tier: str, pools: Sequence[ServingPool]) -> str:
    sizes = list(dict.fromkeys(_size(pool) for pool in pools))
    each = _EACH.get(tier, "") if len(pools) > 1 and len(sizes) == 1 else ""
    return f"{tier} {', '.join(sizes)}{each}"


def _size(pool: ServingPool) -> str:
    parts = [] if pool.tokens is None else [f"{pool.tokens:,} tokens"]
    if pool.bytes is not None:
        parts.append(f"({size(pool.bytes)})" if parts else size(pool.bytes))
    if not pool.is_ready:
        parts.append("being made")
    return " ".join(parts) or "without bound"
