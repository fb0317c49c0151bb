"""What a way does to the process that tries it is its own fault and no other's (services/worker/proving/process)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from services.worker.kv.host_pools import HostPools
from services.worker.proving import choosing, device
from services.worker.proving.device import prove_device
from services.worker.proving.part import Part, Way
from services.worker.proving.process import ProvingProcess
from services.worker.proving.table import Attempt, Proof, ProofTable, ServedShape
from services.worker.shortfalls import shortfalls
from services.worker.step_rows import StepRows
from shared.degradations import line
from shared.messages.pools import KvGeometry
from shared.metrics import REGISTRY
from tests.unit.worker.proving import faulty_parts
from tests.unit.worker.proving.faulty_parts import FAULTS, PARTS, hangs

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
    "hang": "no answer within 1 s",
    "killed": "the process that tried it ended by signal SIGKILL",
    "crash": "the process that tried it ended by signal SIGSEGV",
    "exit": "the process that tried it ended with exit code 3",
    "sticky": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "late": "the process that tried it ended with exit code 4",
}


class Impatient(ProvingProcess):
    """Waits long only for what comes."""

    def attempt(self, part: Part, way: Way, limit_s: float) -> Attempt:
        return super().attempt(part, way, 1.0 if way.prove is hangs else limit_s)


class Proven(NamedTuple):
    """A device with every fault, and what its log says."""

    table: ProofTable
    logs: list[Any]


@pytest.fixture(scope="module")
def proven() -> Proven:
    """All faults in a row, through real processes."""
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr(device, "ProvingProcess", Impatient)
        patch.setattr(choosing, "ALL_SECONDS", 3600.0)
        return Proven(prove_device(SHAPE, PARTS, f"{faulty_parts.__name__}:PARTS"), logs)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_next_way_serves_whatever_happened_to_the_best(proven: Proven, fault: str) -> None:
    """With the reason in words that can be reported."""
    lost = {each.part: each for each in proven.table.lost()}

    assert proven.table.way(fault) == "next"
    assert (lost[fault].way, lost[fault].instead, lost[fault].fault) == ("best", "next", REASONS[fault])


def test_a_process_goes_on_until_it_is_lost(proven: Proven) -> None:
    """What only fails costs no new process; what hangs, dies or breaks its context costs one."""
    pids = {proof.part: proof.attempts[1].speed.value for proof in proven.table.proofs if proof.attempts[1].speed}

    assert pids["wrong"] == pids["nan"] == pids["refused"] == pids["missing"]
    assert len({pids[fault] for fault in ("missing", "hang", "killed", "crash", "exit", "sticky")}) == 6


def test_the_log_has_a_line_for_each_part(proven: Proven) -> None:
    """With what serves and, of what does not, the reason."""
    lines = {each["part"]: each for each in proven.logs if each["event"] == "gpu_part_proven"}

    assert list(lines) == [part.name for part in PARTS]
    assert {each["way"] for each in lines.values()} == {"next"}
    assert lines["crash"]["failed"] == {"best": "the process that tried it ended by signal SIGSEGV"}
    assert lines["crash"]["log_level"] == "warning"


@pytest.mark.usefixtures("proven")
def test_metrics_say_which_way_serves_and_count_those_that_failed() -> None:
    """By part and way."""
    text = generate_latest(REGISTRY).decode()

    for fault in FAULTS:
        assert f'thermocline_worker_gpu_part_ways{{part="{fault}",way="best"}} 0.0' in text
        assert f'thermocline_worker_gpu_part_ways{{part="{fault}",way="next"}} 1.0' in text
        assert f'thermocline_worker_gpu_part_failures_total{{part="{fault}",way="best"}} 1.0' in text


def test_the_ready_line_and_the_cell_say_what_was_lost_and_what_to_report(proven: Proven) -> None:
    """One degradation for each part, as a heartbeat carries it to ``/health``, ``/v1/cell`` and the ready line."""
    passed = ProofTable(proofs=(Proof(part="attention", way="triton", attempts=(Attempt(way="triton"),)),))
    told = list(shortfalls("worker-0", HostPools(SHAPE.geometry), "", {}, StepRows(), proven.table))

    assert [each.what for each in told] == [f"GPU {fault}" for fault in FAULTS]
    assert line(told[0]) == (
        "worker-0, GPU wrong: next serves, for best: WrongResult: ones: 4 of 4 values differ, by up to 1 "
        "(report: thermocline doctor --gpu --json)"
    )
    assert list(shortfalls("worker-0", HostPools(SHAPE.geometry), "", {}, StepRows(), passed)) == []


def test_a_device_that_cannot_be_had_is_told_once() -> None:
    """No process is started again and again for it."""
    trier = ProvingProcess("no.such.module:PARTS", SHAPE)
    part = PARTS[0]

    faults = [trier.attempt(part, part.ways[1], 1.0).fault for _ in range(2)]

    assert faults == ["no process can prove anything: ModuleNotFoundError: No module named 'no'"] * 2
    assert trier.starts == 1
    trier.close()
