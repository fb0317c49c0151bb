"""What a worker was asked for and does not have, told with its heartbeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from services.worker.kv.host_pools import HostPools
from services.worker.kv.movers.choice import machine_here
from services.worker.kv.profile import read_profile
from services.worker.step_rows import StepRows
from shared import library_versions
from shared.errors import ConfigError
from shared.messages.status import Degradation


def profile_fault(profile: str) -> str:
    """Why the profile that the operator named cannot be used; "" where it can, or none is named. Reads the file."""
    if not profile:
        return ""
    try:
        read_profile(Path(profile), machine_here())
    except ConfigError as error:
        return error.message
    return ""


def shortfalls(
    worker_id: str, pools: HostPools, unusable_profile: str, missing: Mapping[str, str], rows: StepRows
) -> Iterator[Degradation]:
    """One entry for each; ``unusable_profile`` is what :func:`profile_fault` said at the start, ``missing`` are
    compiled libraries and why there are none, ``rows`` bounds steps.
    """
    for what, reason in pools.faults():
        yield Degradation(component=worker_id, what=what, reason=reason, setting="--host-kv-bytes")
    for what, reason in rows.faults():
        yield Degradation(component=worker_id, what=what, reason=reason, setting="--device-memory-fraction")
    if unusable_profile:
        yield Degradation(component=worker_id, what="profile", reason=unusable_profile, setting="--profile")
    for reason in library_versions.untried():
        yield Degradation(component=worker_id, what="libraries", reason=reason)
    missing = dict(missing)  # Another thread may find one more meanwhile.
    for reason in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, why in missing.items() if why == reason)
        yield Degradation(component=worker_id, what="native code", reason=f"portable paths replace {names}: {reason}")
