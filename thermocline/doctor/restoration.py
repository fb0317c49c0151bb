"""What restoring costs with one model: measured by a process of the worker's code, and told with what follows of it.

What follows is the planner's own answer (HCache 4.1.2): which layers of a prefix are kept as what, by how fast it is
read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from services.scheduler.core.hidden.hidden_form import TYPICAL_TOKENS
from services.scheduler.core.hidden.partition import LayerCosts, worth_storing
from services.worker.restore.costs import costs_of
from services.worker.restore.figures import RestorationProfile
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry
from thermocline.doctor.measuring import run_measurement

LENGTHS = "256,1024,4096"
ENOUGH_S = 20.0
"""No longer prefix is begun that would presumably take more in all."""

BANDWIDTHS = (0.1e9, 0.25e9, 0.5e9, 1e9, 2e9, 5e9)
"""From a disk in a network to several fast ones, bytes a second."""

_POOLS = 3
"""A prefix is measured with room for it in the model's pool, in a host pool, and in a device pool to load it to."""


def measure_model(
    model: Path,
    geometry: KvGeometry,
    *,
    device: str,
    dtype: str,
    threads: int,
    lengths: str,
    rounds: int,
    shm_bytes: int,
    said: Callable[[str], None],
) -> RestorationProfile:
    """Measure prefixes of those ``lengths`` for which half of ``shm_bytes`` of shared memory are enough, and of the
    shortest. Raises ConfigError when that cannot be.
    """
    try:
        wanted = sorted({int(length) for length in lengths.split(",")})
    except ValueError as error:
        raise ConfigError(f"--prefix-lengths {lengths}: write numbers of tokens, such as {LENGTHS}") from error
    fitting = [length for length in wanted if _POOLS * length * geometry.token_bytes <= shm_bytes // 2]
    flags = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "page-size": geometry.page_size,
        "threads": threads,
        "lengths": ",".join(map(str, fitting or wanted[:1])),
        "rounds": rounds,
        "enough-s": ENOUGH_S,
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return RestorationProfile.from_json(run_measurement("services.worker.restore.measure", arguments, said).encode())


def table(profile: RestorationProfile, disk_bytes_per_s: float = 0.0) -> Iterator[str]:
    """Figures, and what restores soonest at each bandwidth; also at that of the disk that was measured."""
    of_threads = f", {profile.threads} threads" if profile.threads else ""
    yield f"restoration of {profile.architecture}, {profile.geometry.dtype}, {profile.device}{of_threads}:"
    yield "microseconds of one token in one layer"
    yield f"{'tokens':>8}{'IO_H':>10}{'IO_KV':>10}{'C_H':>10}{'C_Token':>10}"
    for each in profile.figures:
        times = (each.io_hidden_s, each.io_kv_s, each.compute_hidden_s, each.compute_token_s)
        yield f"{each.tokens:>8}" + "".join(f"{seconds * 1e6:>10.3f}" if seconds else f"{'-':>10}" for seconds in times)
    yield ""
    yield f"a prefix of {TYPICAL_TOKENS} tokens: layers to recompute / from hidden states / as KV, and milliseconds"
    yield f"{'read with':>14}{'layers':>12}{'best':>10}{'all KV':>10}{'recompute':>11}"
    costs = layer_costs(profile)
    for bandwidth in BANDWIDTHS:
        yield _row(costs, bandwidth, may_keep_hidden=profile.hidden > 0)
    if disk_bytes_per_s:
        yield _row(costs, disk_bytes_per_s, may_keep_hidden=profile.hidden > 0) + "  this disk"
    yield from _caveat(profile)


def layer_costs(profile: RestorationProfile) -> LayerCosts:
    """Return what the planner calculates with on a worker that joins with these figures."""
    costs = costs_of(profile)
    return LayerCosts(
        layers=profile.geometry.layers,
        kv_bytes=profile.kv_bytes,
        hidden_bytes=profile.hidden_bytes,
        hidden_us=costs.hidden_us,
        token_us=costs.token_us,
        pair_us=costs.pair_us,
    )


def _row(costs: LayerCosts, bytes_per_s: float, *, may_keep_hidden: bool) -> str:
    rate = bytes_per_s / 1e6
    best = worth_storing(costs, tokens=TYPICAL_TOKENS, bytes_per_us=rate, may_keep_hidden=may_keep_hidden).partition
    layers = f"{best.tokens}/{best.hidden}/{best.kv}"
    times_us = (
        best.time_us,
        TYPICAL_TOKENS * costs.layers * costs.kv_bytes / rate,
        costs.layers * costs.recompute_us(0, TYPICAL_TOKENS),
    )
    best_ms, kv_ms, computed_ms = (us / 1e3 for us in times_us)
    return f"{bytes_per_s / 1e9:>9.2f} GB/s{layers:>12}{best_ms:>10.1f}{kv_ms:>10.1f}{computed_ms:>11.1f}"


def _caveat(profile: RestorationProfile) -> Sequence[str]:
    if not profile.hidden:
        return ("This model's KV cannot be restored from hidden states: prefixes are kept as KV, or recomputed.",)
    if profile.hidden_bytes < profile.kv_bytes:
        return ()
    return (
        f"A hidden state has {profile.hidden_bytes} bytes and the K and V that are made of it {profile.kv_bytes}: with"
        " grouped queries it saves nothing,",
        "so prefixes are kept as KV or recomputed. (HCache is about multi-head attention, where it halves them.)",
    )
