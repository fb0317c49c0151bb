"""``doctor --gpu`` prints what was proven, with speeds and reasons, or says that there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.proving.table import Attempt, Proof, ProofTable, Speed
from shared.errors import ConfigError
from tests.checkpoints import make_checkpoint
from thermocline.doctor import gpu
from thermocline.doctor.__main__ import main

FAST = Attempt(way="triton", seconds=4.2, speed=Speed(value=812.3, unit="GB/s"))
SLOW = Attempt(way="torch", seconds=0.1, speed=Speed(value=11.0, unit="GB/s"))
GOOD = ProofTable(
    device="NVIDIA Nonesuch",
    seconds=9.03,
    proofs=(
        Proof(part="attention", way="triton", attempts=(FAST, SLOW)),
        Proof(
            part="cuda ipc",
            way="none",
            attempts=(Attempt(way="both ways", fault="TransportError: no export"), Attempt(way="none")),
        ),
    ),
)
HOPELESS = ProofTable(
    device="NVIDIA Nonesuch",
    proofs=(Proof(part="attention", way="", attempts=(Attempt(way="torch", fault="WrongResult: all"),)),),
)


def test_the_table_has_every_way_with_its_speed_or_its_fault() -> None:
    """And what to do with faults."""
    assert gpu.report(GOOD).splitlines() == [
        "NVIDIA Nonesuch, proven in 9.0 s",
        "",
        "attention  triton     serves  812 GB/s, 4.20 s",
        "           torch      passes  11 GB/s, 0.10 s",
        "cuda ipc   both ways  FAILS   TransportError: no export",
        "           none       serves",
        "",
        "A worker serves on this GPU by the ways that are marked.",
        "1 way does not pass. Please report this table: thermocline doctor --gpu --json",
    ]


def test_what_is_not_installed_is_nothing_to_report() -> None:
    """It is in the table with its reason, and is not among the faults."""
    absent = Attempt(way="flashinfer", fault="the package is not installed", is_absent=True)
    table = ProofTable(
        device="NVIDIA Nonesuch", proofs=(Proof(part="attention", way="triton", attempts=(absent, FAST)),)
    )

    lines = gpu.report(table).splitlines()

    assert lines[2] == "attention  flashinfer  absent  the package is not installed"
    assert lines[-1] == "A worker serves on this GPU by the ways that are marked."


def test_a_gpu_on_which_no_worker_starts_is_said_to_be_one() -> None:
    """By the parts for which nothing is left."""
    assert "No worker starts on this GPU: nothing serves for attention." in gpu.report(HOPELESS)


@pytest.mark.parametrize(("table", "code"), [(GOOD, 0), (HOPELESS, 1)])
def test_json_is_the_table_and_the_exit_code_says_whether_a_worker_would_start(
    table: ProofTable, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What people are asked to report is what was found, whole."""
    monkeypatch.setattr(gpu, "run_measurement", lambda *_, **__: msgspec.json.encode(table).decode())

    assert main(["--gpu", "--json"]) == code
    assert msgspec.convert(json.loads(capsys.readouterr().out), ProofTable) == table


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, as for a profile that cannot be made; the reason is torch's."""
    assert main(["--gpu"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("thermocline doctor: proving the GPU failed: there is none that PyTorch can use: ")


def test_a_checkpoint_is_proven_with_its_own_heads(tmp_path: Path) -> None:
    """Read from its files; one that does not tell is refused."""
    shape = gpu.shape_of(str(make_checkpoint("llama", tmp_path / "model")))
    config: dict[str, Any] = json.loads((tmp_path / "model" / "config.json").read_text())

    assert (shape.query_heads, shape.geometry.kv_heads) == (
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    assert gpu.shape_of("") == gpu.DEFAULT_SHAPE
    with pytest.raises(ConfigError):
        gpu.shape_of(str(tmp_path))
