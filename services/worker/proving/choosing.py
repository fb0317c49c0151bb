"""Which way of each part serves: the first that passes. Pure, except for the object that tries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from services.worker.proving.part import Part, Way
from services.worker.proving.table import Attempt, Proof, ProofTable
from shared.errors import DeviceUnproven

WAY_SECONDS = 60.0
"""Longest wait for one way: Triton compiles several kernels in some, for the first time on a machine."""

ALL_SECONDS = 180.0
"""When so many seconds are spent, only the last way of each part is still tried, which is the simplest."""


class Trier(Protocol):
    """An object that tries ways on a device (``services.worker.proving.process``)."""

    def attempt(self, part: Part, way: Way, limit_s: float) -> Attempt:
        """Try a way, for little more than ``limit_s``. An error or crash of the way is in the result, not raised."""


def choose_ways(
    parts: Sequence[Part], trier: Trier, clock_s: Callable[[], float], *, proves_all: bool = False
) -> tuple[Proof, ...]:
    """Try the ways of each part until one passes; all of them with ``proves_all``, or where the part says so."""
    began_s = clock_s()
    passed: dict[str, tuple[str, ...]] = {}
    proofs = []
    for part in parts:
        attempts: list[Attempt] = []
        chosen = ""
        for way in part.ways:
            has_time = clock_s() - began_s < ALL_SECONDS or way is part.ways[-1]
            attempts.append(_attempt(part, way, trier, passed, has_time=has_time))
            if not attempts[-1].fault:
                chosen = chosen or way.name
                if not (proves_all or part.proves_all):
                    break
        proofs.append(Proof(part=part.name, way=chosen, attempts=tuple(attempts)))
        passed[part.name] = proofs[-1].passed
    return tuple(proofs)


def _attempt(part: Part, way: Way, trier: Trier, passed: dict[str, tuple[str, ...]], *, has_time: bool) -> Attempt:
    if way.prove is None:
        return Attempt(way=way.name)
    missing = [f"{name} by {needed}" for name, needed in way.needs if needed not in passed.get(name, ())]
    if missing:
        return Attempt(way=way.name, fault=f"it needs {' and '.join(missing)}, which did not pass")
    if not has_time:
        return Attempt(way=way.name, fault=f"not tried: proofs had taken {ALL_SECONDS:.0f} s")
    return trier.attempt(part, way, WAY_SECONDS)


def require_all(table: ProofTable) -> None:
    """Raise DeviceUnproven where no way of some part passed, with the reason of the last one."""
    faults = [
        f"{proof.part}: {'; '.join(f'{each.way}: {each.fault}' for each in proof.failed)}"
        for proof in table.proofs
        if not proof.way
    ]
    if faults:
        raise DeviceUnproven(
            f"{table.device or 'the GPU'} does not compute correctly, so nothing is served from it: "
            f"{' | '.join(faults)}; thermocline doctor --gpu shows all, and --device cpu does without"
        )
