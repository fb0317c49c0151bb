"""Features that a worker was asked for and lacks, reported with its heartbeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from services.worker.kv.host_pools import HostPools
from services.worker.kv.movers.choice import machine_here
from services.worker.kv.profile import read_profile
from services.worker.proving.table import Lost, ProofTable
from services.worker.step_rows import StepRows
from shared import library_versions
from shared.errors import ConfigError
from shared.messages.status import Degradation


def profile_fault(profile: str) -> str:
    """Return why the profile that the operator named cannot be used; "" where it can, or none is named. Reads it."""
    if not profile:
        return ""
    try:
        read_profile(Path(profile), machine_here())
    except ConfigError as error:
        return error.message
    return ""


def shortfalls(
    worker_id: str,
    pools: HostPools,
    unusable_profile: str,
    missing: Mapping[str, str],
    rows: StepRows,
    proofs: ProofTable,
) -> Iterator[Degradation]:
    """Yield one entry for each missing feature.

    ``unusable_profile`` is the result of :func:`profile_fault` at the start, ``missing`` are compiled libraries and why
    there are none, ``rows`` bounds steps, ``proofs`` are those of the worker's GPU.
    """
    for what, reason in pools.faults():
        yield Degradation(component=worker_id, what=what, reason=reason, setting="--host-kv-bytes")
    for what, reason in rows.faults():
        yield Degradation(component=worker_id, what=what, reason=reason, setting="--device-memory-fraction")
    if unusable_profile:
        yield Degradation(component=worker_id, what="profile", reason=unusable_profile, setting="--profile")
    for reason in library_versions.untried():
        yield Degradation(component=worker_id, what="libraries", reason=reason)
    missing = dict(missing)  # A copy, because another thread may add to it meanwhile.
    for reason in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, why in missing.items() if why == reason)
        yield Degradation(component=worker_id, what="native code", reason=f"portable paths replace {names}: {reason}")
    for part, reason in unproven(proofs):
        yield Degradation(component=worker_id, what=part, reason=reason)


def unproven(proofs: ProofTable) -> Iterator[tuple[str, str]]:
    """Yield each part of CUDA that is served by another way than the best, with what to do about it."""
    lost: dict[str, list[Lost]] = {}
    for each in proofs.lost():
        lost.setdefault(each.part, []).append(each)
    for part, ways in lost.items():
        faults = "; ".join(f"{each.way}: {each.fault}" for each in ways)
        if all(each.is_absent for each in ways):
            yield f"GPU {part}", f"{ways[0].instead} serves; {faults}"
        else:
            yield f"GPU {part}", f"{ways[0].instead} serves, for {faults} (report: thermocline doctor --gpu --json)"
