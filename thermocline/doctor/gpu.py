"""``thermocline doctor --gpu``: the ways that a worker would serve by on this GPU, and all others, with speeds.

The proofs are a worker's own (``services.worker.proving``), in processes of their own: only workers import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from services.worker.proving.table import Attempt, Proof, ProofTable, ServedShape
from shared.messages.pools import KvGeometry
from thermocline.doctor.measuring import run_measurement
from thermocline.supervisor.model_demand import geometry_of, query_heads_of

DEFAULT_SHAPE = ServedShape(
    device="cuda:0",
    geometry=KvGeometry(layers=4, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"),
    query_heads=32,
    windows=(0, 512),
)
"""Shape that is proven without a model: heads like those of Llama 3.1 8B, with and without a window."""

LIMIT_SECONDS = 600


def shape_of(model: str) -> ServedShape:
    """Return the shape to prove for a checkpoint; "" is the default. Raises ConfigError if its files lack it."""
    if not model:
        return DEFAULT_SHAPE
    folder = Path(model).expanduser().resolve()
    return msgspec.structs.replace(DEFAULT_SHAPE, geometry=geometry_of(folder), query_heads=query_heads_of(folder))


def prove(model: str, said: Callable[[str], None]) -> ProofTable:
    """Prove this machine's first visible GPU; ``said`` gets lines of progress. Raises ConfigError on failure."""
    flags = ["--shape", msgspec.json.encode(shape_of(model)).decode()]
    answer = run_measurement(
        "services.worker.proving",
        flags,
        said,
        limit_s=LIMIT_SECONDS,
        doing="proving the GPU",
        advice="see the lines above",
    )
    return msgspec.json.decode(answer, type=ProofTable)


def is_usable(table: ProofTable) -> bool:
    """Return whether a worker would start: each part has a way that passed."""
    return all(proof.way for proof in table.proofs)


def report(table: ProofTable) -> str:
    """Return the table as text, with what to do about failures."""
    rows = [row for proof in table.proofs for row in _rows(proof)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else [0, 0, 0]
    lines = [f"{table.device}, proven in {table.seconds:.1f} s", ""]
    for part, way, verdict, rest in rows:
        lines.append(f"{part:<{widths[0]}}  {way:<{widths[1]}}  {verdict:<{widths[2]}}  {rest}".rstrip())
    faults = sum(not each.is_absent for proof in table.proofs for each in proof.failed)
    lines.append("")
    if not is_usable(table):
        without = ", ".join(proof.part for proof in table.proofs if not proof.way)
        lines.append(f"No worker starts on this GPU: nothing serves for {without}.")
    else:
        lines.append("A worker serves on this GPU by the ways that are marked.")
    if faults:
        told = "1 way does" if faults == 1 else f"{faults} ways do"
        lines.append(f"{told} not pass. Please report this table: thermocline doctor --gpu --json")
    return "\n".join(lines)


def _rows(proof: Proof) -> Iterator[tuple[str, str, str, str]]:
    for at, attempt in enumerate(proof.attempts):
        yield "" if at else proof.part, attempt.way, _verdict(proof, attempt), _facts(attempt)


def _verdict(proof: Proof, attempt: Attempt) -> str:
    if attempt.fault:
        return "absent" if attempt.is_absent else "FAILS"
    return "serves" if attempt.way == proof.way else "passes"


def _facts(attempt: Attempt) -> str:
    if attempt.fault:
        return attempt.fault
    told = f"{attempt.seconds:.2f} s" if attempt.seconds else ""
    return f"{attempt.speed}, {told}" if attempt.speed else told
