"""The proof of a device, with its results reported in the log, part by part, and in metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from services.worker import metrics
from services.worker.proving.choosing import choose_ways, require_all
from services.worker.proving.part import Part
from services.worker.proving.parts import PARTS
from services.worker.proving.process import ProvingProcess
from services.worker.proving.table import ProofTable, ServedShape, joined
from shared import logs, progress

_log = logs.get_logger("worker.proving")

PARTS_NAME = "services.worker.proving.parts:PARTS"


def proofs_of(
    shape: ServedShape, parts: Sequence[Part] = PARTS, parts_name: str = PARTS_NAME, *, proves_all: bool = False
) -> ProofTable:
    """Try the parts on the device of ``shape``, in a process of their own; none is required to pass.

    ``parts_name`` is where that process finds ``parts``. With ``proves_all`` ways behind those that pass are tried,
    too. Takes a few seconds, and minutes at the most (``choosing``).
    """
    began_s = time.monotonic()
    process = ProvingProcess(parts_name, shape)
    try:
        proofs = choose_ways(parts, process, time.monotonic, proves_all=proves_all)
    finally:
        process.close()
    return ProofTable(device=process.device_name, proofs=proofs, seconds=time.monotonic() - began_s)


def prove_device(shape: ServedShape, parts: Sequence[Part] = PARTS, parts_name: str = PARTS_NAME) -> ProofTable:
    """Return the result of :func:`proofs_of`, reported. Raises DeviceUnproven where no way of some part passes."""
    with progress.phase("proving the GPU"):
        table = proofs_of(shape, parts, parts_name)
    tell(table)
    require_all(table)
    return table


def find_fault(table: ProofTable, part: str, way: str, fault: str, instead: str) -> ProofTable:
    """Return ``table`` with a fault that the model itself has shown since, reported."""
    _log.warning("gpu_part_failed", part=part, way=way, instead=instead, reason=fault)
    metrics.GPU_PART_WAYS.labels(part, way).set(way == instead)
    metrics.GPU_PART_WAYS.labels(part, instead).set(1)
    metrics.GPU_PART_FAILURES.labels(part, way).inc()
    return table.with_fault(part, way, fault, instead)


def tell(table: ProofTable) -> None:
    """Log a line for each part, and set its metrics."""
    for proof in table.proofs:
        chosen = next((each for each in proof.attempts if each.way == proof.way), None)
        facts = {} if chosen is None else {"seconds": round(chosen.seconds, 2), "speed": str(chosen.speed or "")}
        failed = {each.way: each.fault for each in proof.failed if not each.is_absent}
        absent = {each.way: each.fault for each in proof.failed if each.is_absent}
        say = _log.warning if failed else _log.info
        say("gpu_part_proven" if proof.way else "gpu_part_unproven", part=proof.part, way=proof.way, **facts, **(
            {name: ways for name, ways in (("failed", failed), ("absent", absent)) if ways}
        ))  # fmt: skip
    _count(table)
    _log.info("gpu_proven", device=table.device, seconds=round(table.seconds, 2))


def group_proofs(own: ProofTable, others: Sequence[ProofTable]) -> ProofTable:
    """Return which ways serve in a group, by the tables of all ranks.

    ``own`` was logged by this process; the others are in their own logs, and are counted here, where metrics are read.
    """
    table = joined([own, *others])
    for each in (*others, table):
        _count(each, with_failures=each is not table)
    return table


def _count(table: ProofTable, *, with_failures: bool = True) -> None:
    for proof in table.proofs:
        for each in proof.attempts:
            metrics.GPU_PART_WAYS.labels(proof.part, each.way).set(each.way == proof.way)
        for each in proof.failed:
            if not with_failures or each.is_absent:
                continue
            metrics.GPU_PART_FAILURES.labels(proof.part, each.way).inc()
