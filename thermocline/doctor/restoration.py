"""The costs of restoration with one model, measured by a process of the worker's code, and a table of them.

The table includes the planner's answer (HCache 4.1.2): the form in which each layer of a prefix is kept, by the
bandwidth at which it is read back.
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
"""A longer prefix is skipped if its measurement would probably take more in total."""

BANDWIDTHS = (0.1e9, 0.25e9, 0.5e9, 1e9, 2e9, 5e9)
"""Bandwidths in the table, bytes a second: from a network disk to several fast ones."""

_POOLS = 3
"""Pools that hold a prefix under measurement: the model's, a host pool, and a device pool to load it to."""


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
    """Measure prefixes of the ``lengths`` (tokens, comma-separated) that fit in half of ``shm_bytes``.

    The shortest is measured if none fits. Raises ConfigError for invalid ``lengths`` or a failed measurement.
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
    """Yield the lines of a table: figures, and the fastest restoration at each bandwidth and at the measured disk's."""
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
    """Return the costs that the planner uses for a worker that joins with these figures."""
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
