"""``thermocline simulate --sweep``: whole sweeps in real processes."""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.scheduler.core.cache.eviction import POLICIES
from shared.errors import ConfigError, InvalidRequest
from thermocline.simulate import sweep_command
from thermocline.simulate.__main__ import main
from thermocline.simulate.axes import Axis, Row
from thermocline.simulate.sweeping import SweepFailed, SweepInterrupted, processes, sweep, sweep_rows

_QUICK = ["--workload", "few-shot", "--requests", "40", "--host-tokens", "0"]
_SWEEP = ["policy=lru,thermocline", "capacity=6000,9000", "lease_tokens=32,64"]
_LONG = ["--workload", "chat", "--requests", "2000000", "--sweep", "policy=lru,sieve", "seed=1,2,3"]


def test_every_combination_is_simulated_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table, as CSV and as a chart; each row is what its own command line gives."""
    files = [tmp_path / "runs.csv", tmp_path / "runs.svg"]
    line = [*_QUICK, "--sweep", *_SWEEP, "--csv", str(files[0]), "--plot", str(files[1])]

    assert main(line) == 0

    printed = capsys.readouterr().out
    assert "few-shot, a100-pcie4, llama-3.1-8b: 8 simulations" in printed
    with files[0].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["device_tokens"], row["lease_tokens"]) for row in rows] == [
        (policy, capacity, lease)
        for policy in ("lru", "thermocline")
        for capacity in ("6000", "9000")
        for lease in ("32", "64")
    ]
    assert files[1].read_text(encoding="utf-8").count("<polyline") == 4
    alone = ["--policy", "thermocline", "--device-tokens", "6000", "--set", "lease_tokens=64", "--json"]
    assert main([*_QUICK, *alone]) == 0
    figures = json.loads(capsys.readouterr().out)
    for name in ("hit_ratio", "input_tokens", "simulated_seconds", "steps"):
        assert float(rows[5][name]) == figures[name]
    assert float(rows[5]["ttft_ms_p99"]) == figures["ttft_ms"]["p99"]


def test_the_number_of_processes_changes_nothing() -> None:
    """Nor does their speed: rows come in the order of the settings."""
    one, two = (sweep(_SWEEP[:2], _QUICK, jobs=jobs) for jobs in (1, 2))

    assert json.dumps(one) == json.dumps(two)
    assert [(row["policy"], row["device_tokens"]) for row in one] == [
        ("lru", 6000), ("lru", 9000), ("thermocline", 6000), ("thermocline", 9000),
    ]  # fmt: skip


def test_json_holds_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    """One object."""
    assert main([*_QUICK, "--sweep", "seed=1,2", "--json"]) == 0

    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["seed"] for run in runs] == [1, 2]
    assert all("hit_tokens_device" in run and "wall_seconds" not in run for run in runs)


def test_processes_are_bounded() -> None:
    """By the cores, by what is asked for, and by what there is to do."""
    cores = len(os.sched_getaffinity(0))

    assert (processes(None, 1000), processes(10_000, 1000)) == (cores, cores)
    assert (processes(None, 1), processes(1, 1000)) == (1, 1)


def test_a_fault_of_any_combination_comes_before_the_first_simulation() -> None:
    """It is named with the first combination that has it, once."""
    with pytest.raises(ConfigError) as refused:
        sweep(["policy=lru,clairvoyant", "capacity=1,9000"], _QUICK)

    message = refused.value.message
    assert "with policy=lru, device_tokens=1: " in message
    assert message.count("with policy=clairvoyant, device_tokens=1: policy: 'clairvoyant' is none of") == 1
    assert message.count("is none of") == 1


def test_a_fault_that_a_simulation_meets_names_its_settings(tmp_path: Path) -> None:
    """Such as a malformed line of the trace."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\nnothing\n')

    with pytest.raises(InvalidRequest, match=r"with policy=lru: .*trace\.jsonl:2"):
        sweep(["policy=lru"], ["--trace", str(path)])


_AT_FAULT = """
from services.scheduler.core.cache.eviction import LruPolicy

class Fails(LruPolicy):
    name = "test-fails"
    def rank(self, node):
        if self.capacity < 8000: raise {}
        return super().rank(node)
"""


@pytest.fixture
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of somebody's policy; all that importing it changes is undone."""
    monkeypatch.chdir(tmp_path)
    before, path = dict(POLICIES), list(sys.path)
    yield tmp_path
    POLICIES.clear()
    POLICIES.update(before)
    sys.modules.pop("at_fault", None)
    sys.path[:] = path


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("ValueError('too small')", "ValueError: too small (at_fault.py:7)"),
        (
            "SystemExit(3)",
            "InternalError: policy test-fails: its code called for the end of the process, by SystemExit(3)",
        ),
    ],
)
def test_a_fault_of_a_policy_costs_one_row(
    raised: str, told: str, in_own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is marked and named with its settings; the rows of the others are printed and written."""
    (in_own_folder / "at_fault.py").write_text(_AT_FAULT.format(raised))
    files = [in_own_folder / "runs.csv", in_own_folder / "runs.svg"]
    sweeping = ["--sweep", "capacity=6000,9000,12000", "--csv", str(files[0]), "--plot", str(files[1])]

    assert main([*_QUICK, "--policy", "at_fault:Fails", *sweeping]) == 1

    captured = capsys.readouterr()
    assert f"with device_tokens=6000: {told}" in captured.err
    assert captured.out.count("failed") == 2  # In the heading, and in its place.
    with files[0].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["error"].startswith(told) for row in rows] == [True, False, False]
    assert [bool(row["hit_ratio"]) for row in rows] == [False, True, True]
    assert "9,000" in files[1].read_text(encoding="utf-8")


def test_programs_get_the_rows_with_the_error(in_own_folder: Path) -> None:
    """None of them is lost, and no failed one is taken for a result."""
    (in_own_folder / "at_fault.py").write_text(_AT_FAULT.format("ValueError('too small')"))

    with pytest.raises(SweepFailed, match="with device_tokens=6000: ValueError: too small") as failed:
        sweep(["capacity=6000,9000"], [*_QUICK, "--policy", "at_fault:Fails"])

    rows = failed.value.rows
    assert [row["device_tokens"] for row in rows] == [6000, 9000]
    assert [row["hit_ratio"] is None for row in rows] == [True, False]


def test_ctrl_c_keeps_what_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of simulations that had ended are printed and written; the others are marked, for programs, too."""

    def interrupt(ended: int, _: int) -> None:
        if ended:
            raise KeyboardInterrupt

    def interrupted(options: argparse.Namespace, axes: tuple[Axis, ...], warn: Callable[[str], None]) -> list[Row]:
        return sweep_rows(options, axes, interrupt, warn)

    monkeypatch.setattr(sweep_command, "_with_progress", interrupted)
    line = ["--workload", "chat", "--sweep", "sessions=5,1000000", "--jobs", "1", "--csv", str(tmp_path / "runs.csv")]

    with pytest.raises(SweepInterrupted) as ended:
        main(line)

    assert [row["error"] for row in ended.value.rows] == [None, "interrupted"]
    captured = capsys.readouterr()
    assert "interrupted; 1 of 2 simulations ended" in captured.err
    assert captured.out.count("interrupted") == 1
    with (tmp_path / "runs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["sessions"], bool(row["hit_ratio"]), row["error"]) for row in rows] == [
        ("5", True, ""),
        ("1000000", False, "interrupted"),
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--csv", "x.csv"], "give --sweep"),
        (["--sweep", "policy=lru,sieve", "--plot", "x.svg"], "--plot needs a setting"),
        (["--sweep", "policy=lru", "--csv", "/nowhere/x.csv"], "is no folder"),
        (["--sweep", "policy=lru", "--jobs", "0"], "--jobs must be at least 1"),
        (["--sweep", "nonsense=1,2"], "--set nonsense: unknown setting"),
    ],
)
def test_bad_lines_exit_with_two(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing on standard output, the reason on standard error."""
    assert main([*_QUICK, *arguments]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err


@pytest.fixture
def long_sweep() -> Iterator[subprocess.Popen[str]]:
    """A sweep that would take hours, once all of its processes are there."""
    started = subprocess.Popen(
        [sys.executable, "-m", "thermocline", "simulate", *_LONG, "--jobs", "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while started.poll() is None and len(simulating(started.pid)) < processes(2, 6):
        time.sleep(0.05)
    yield started
    if started.poll() is None:
        started.kill()
    started.communicate(timeout=60)


def simulating(parent: int) -> list[int]:
    """Processes of a sweep that have begun: they no longer listen to Ctrl-C."""
    found = []
    for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        folder = Path(f"/proc/{number}")
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
        ignored = int(status["SigIgn"], 16) & 1 << (signal.SIGINT - 1)
        if ignored and b"--multiprocessing-fork" in (folder / "cmdline").read_bytes():
            found.append(int(number))
    return found


def is_gone(number: int) -> bool:
    """Whether a process has ended, be it that its parent has not heard of it yet."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_processes_end_with_the_command(long_sweep: subprocess.Popen[str], ending: int, code: int) -> None:
    """By Ctrl-C without a traceback, and where it is killed."""
    working = simulating(long_sweep.pid)
    os.kill(long_sweep.pid, ending)
    _, complaint = long_sweep.communicate(timeout=60)

    assert long_sweep.returncode == code
    assert working
    while not all(map(is_gone, working)):
        time.sleep(0.05)
    assert "Traceback" not in complaint


def test_a_process_that_dies_ends_the_sweep(long_sweep: subprocess.Popen[str]) -> None:
    """With its reason, and without the others."""
    working = simulating(long_sweep.pid)
    os.kill(working[0], signal.SIGKILL)
    _, complaint = long_sweep.communicate(timeout=60)

    assert long_sweep.returncode == 1
    assert "a process of the sweep died" in complaint
    while not all(map(is_gone, working)):
        time.sleep(0.05)
