"""What a way does to the process that tries it is its own fault and no other's (services/worker/proving/process)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.worker.proving import choosing, process
from services.worker.proving.device import proofs_of
from services.worker.proving.process import ProvingProcess
from services.worker.proving.table import ProofTable, ServedShape
from shared.messages.pools import KvGeometry
from tests.unit.worker.proving import faulty_parts
from tests.unit.worker.proving.faulty_parts import FAULTS, PARTS

SHAPE = ServedShape(
    device="cpu",
    geometry=KvGeometry(layers=2, kv_heads=2, head_dim=16, page_size=16, dtype="float32"),
    query_heads=4,
)

REASONS = {
    "wrong": "WrongResult: ones: 4 of 4 values differ, by up to 1",
    "nan": "WrongResult: ones: 4 of 4 values differ, by up to inf",
    "refused": "TransportError: cudaHostRegister of 4 bytes failed with code 2",
    "missing": "ModuleNotFoundError: No module named 'flashinfer_of_another_machine'",
    "hang": "no answer within 3 s",
    "killed": "the process that tried it ended by signal SIGKILL",
    "crash": "the process that tried it ended by signal SIGSEGV",
    "exit": "the process that tried it ended with exit code 3",
    "sticky": "RuntimeError: CUDA error: an illegal memory access was encountered",
}


@pytest.fixture(scope="module")
def table() -> Iterator[ProofTable]:
    """All faults in a row, through real processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "WAY_SECONDS", 3.0)
        yield proofs_of(SHAPE, PARTS, f"{faulty_parts.__name__}:PARTS")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_next_way_serves_whatever_happened_to_the_best(table: ProofTable, fault: str) -> None:
    """With the reason in words that can be reported."""
    lost = {each.part: each for each in table.lost()}

    assert table.way(fault) == "next"
    assert (lost[fault].way, lost[fault].instead, lost[fault].fault) == ("best", "next", REASONS[fault])


def test_a_process_goes_on_until_it_is_lost(table: ProofTable) -> None:
    """What only fails costs no new process; what hangs, dies or breaks its context costs one."""
    pids = {proof.part: proof.attempts[1].speed.value for proof in table.proofs if proof.attempts[1].speed}

    assert pids["wrong"] == pids["nan"] == pids["refused"] == pids["missing"]
    assert len({pids[fault] for fault in ("missing", "hang", "killed", "crash", "exit", "sticky")}) == 6


def test_a_device_that_cannot_be_had_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started again and again for it."""
    monkeypatch.setattr(process, "START_SECONDS", 60.0)
    trier = ProvingProcess("no.such.module:PARTS", SHAPE)
    part = PARTS[0]

    faults = [trier.attempt(part, part.ways[1], 1.0).fault for _ in range(2)]

    assert faults == ["no process can prove anything: ModuleNotFoundError: No module named 'no'"] * 2
    assert trier.starts == 1
    trier.close()
