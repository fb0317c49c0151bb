"""The lines that ``thermocline up`` prints once the cell can serve. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.context_limit import size_flag
from services.gateway.openai_schema.models import Serving, ServingDevice, ServingPool
from shared.sizes import size

_EACH = {"device": " of each worker", "host": " of each node"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFacts:
    """Facts about a cell that can serve.

    ``serving`` has the gateway's devices and pools, or is None; ``degraded`` has a line per degradation, ``page`` is
    the line about the page, and ``gpus`` counts this machine's GPUs.
    """

    base_url: str
    model: str
    workers: int
    page: str
    schedulers: int = 1
    serving: Serving | None = None
    degraded: Sequence[str] = ()
    gpus: int = 0


def ready_lines(facts: ReadyFacts) -> list[str]:
    """Return the lines: the first with the state and address, the others with devices, pools and limits."""
    workers = "1 worker" if facts.workers == 1 else f"{facts.workers} workers"
    if facts.schedulers > 1:
        workers += f", {facts.schedulers} schedulers"
    state = "ready, degraded," if facts.degraded else "ready"
    lines = [f"Thermocline is {state} at {facts.base_url} (model {facts.model}, {workers})", *facts.degraded]
    serving = facts.serving
    if serving is not None:
        lines += [*device_lines(serving), *idle_gpu_lines(serving, facts.gpus)]
        lines.append(f"Pools: {'; '.join(_pools(serving.pools)) or 'none'}")
        lines += small_host_lines(serving)
        lines.append(context_line(serving))
    return [*lines, f"API: {facts.base_url}/v1", facts.page]


def device_lines(serving: Serving) -> list[str]:
    """Return the devices and the data type, and notes such as why a GPU is not used; equal devices are listed once."""
    names = list(dict.fromkeys(_device(device) for device in serving.devices)) or ["unknown"]
    notes = dict.fromkeys(device.note for device in serving.devices if device.note)
    dtype = serving.dtype
    if serving.kv_dtype not in ("", dtype):
        dtype += f", KV {serving.kv_dtype}"
    return [f"Device: {', '.join(names)}; {dtype}", *(f"Note: {note}" for note in notes)]


def context_line(serving: Serving) -> str:
    """Return the longest request, and what to raise where the model allows a longer one."""
    own, tokens = serving.model_context_tokens, serving.context_tokens
    if tokens >= own:
        return f"Context: {own:,} tokens"
    if any(device.kind == "cuda" for device in serving.devices):
        pages = -(-own // serving.page_size)
        cure = f"a pool of {size(pages * serving.page_bytes)}: a larger --tensor-parallel, or a GPU with more memory"
    else:
        cure = f"--device-kv-bytes {size_flag(own, serving.page_size, serving.page_bytes)}"
    return (
        f"Context: {tokens:,} tokens, all that the device pool of a worker holds; the model takes {own:,}, with {cure}"
    )


def idle_gpu_lines(serving: Serving, gpus: int) -> list[str]:
    """Return a note with the number of workers that would use all ``gpus``, if some are idle."""
    ranks = [device.ranks for device in serving.devices if device.kind == "cuda"]
    if not ranks or sum(ranks) + max(ranks) > gpus:
        return []
    return [f"Note: {sum(ranks)} of {gpus} GPUs are used; --workers {gpus // max(ranks)} uses all"]


def small_host_lines(serving: Serving) -> list[str]:
    """Return a warning when host pools hold less than half the tokens of device pools: most evicted KV is then lost."""
    tokens = {
        tier: [pool.tokens for pool in serving.pools if pool.tier == tier and pool.tokens is not None]
        for tier in ("device", "host")
    }
    host, device = sum(tokens["host"]), sum(tokens["device"])
    if not tokens["host"] or 2 * host >= device:
        return []
    return [
        f"Note: host pools hold {host:,} tokens, few beside {device:,} on devices; --host-kv-bytes makes them larger "
        "where /dev/shm has room (docker run --shm-size)"
    ]


def _device(device: ServingDevice) -> str:
    ranks = f" and {device.ranks - 1} more" if device.kind == "cuda" and device.ranks > 1 else ""
    return f"{device.kind} ({device.name}{ranks})"


def _pools(pools: Sequence[ServingPool]) -> list[str]:
    """Return one entry per tier, with equal pools listed once."""
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
