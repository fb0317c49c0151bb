"""The GPU benchmark keeps to its time, survives its parts, and each of them works on a processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import part_process, reading
from bench.gpu.budget import Budget
from bench.gpu.evidence import EvidenceFile, is_whole
from bench.gpu.part_process import Outcome, run_part
from bench.gpu.parts import PARTS, Allotment, Part, allot
from bench.gpu.served_cases import PLAIN, Scale, calibrated, loads, setups

ROOT = Path(__file__).parents[4]
PLAYED = "tests.unit.bench.gpu.played_parts"


def no_file(ended: object, waiting: object) -> None:
    """Where nothing is kept."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


# -- time ---------------------------------------------------------------------------------------------------------


def test_parts_share_the_time_by_their_weights() -> None:
    """The last one has all that is left."""
    parts = [Part("a", "", 30.0, 1.0), Part("b", "", 10.0, 1.0)]

    assert allot(parts[0], parts[1:], 100.0) == Allotment(75.0, 100.0)
    assert allot(parts[1], [], 60.0) == Allotment(60.0, 60.0)


def test_a_part_has_what_it_needs_at_the_least_or_nothing() -> None:
    """What is more telling goes first, even where its share were too small."""
    part, other = Part("a", "", 1.0, 20.0), Part("b", "", 9.0, 20.0)

    assert allot(part, [other], 100.0) == Allotment(20.0, 40.0)
    assert allot(part, [other], 20.0) == Allotment(20.0, 20.0)
    assert allot(part, [other], 19.9) is None


@pytest.mark.parametrize("minutes", [0.5, 1.0, 3.0, 8.0, 30.0])
@pytest.mark.parametrize("slow", [0.2, 1.0, 5.0])
def test_all_parts_together_keep_to_the_time(minutes: float, slow: float) -> None:
    """However long parts take: one that takes too long is killed at its limit, and that never lies past the end."""
    clock = Clock()

    def run(part: Part, allotted: Allotment) -> Outcome:
        clock.now_s += min(allotted.limit_s, slow * allotted.share_s)
        return Outcome(part.name, "whole")

    outcomes = command.run_all(PARTS, minutes * 60, run, clock, no_file)

    assert clock.now_s <= minutes * 60 + 1e-6
    assert [outcome.part for outcome in outcomes] == [part.name for part in PARTS]
    assert minutes < 8 or slow > 1 or all(outcome.state == "whole" for outcome in outcomes)


def test_eight_minutes_suffice_for_every_part() -> None:
    """Each has its share by weight, and none has to be given its least."""
    left_s = command.MINUTES * 60 - command.RESERVE_S
    for number, part in enumerate(PARTS):
        allotted = allot(part, PARTS[number + 1 :], left_s)
        assert allotted is not None
        assert allotted.share_s > part.least_s, part
        left_s -= allotted.share_s


def test_nothing_is_begun_that_would_not_end() -> None:
    """As far as the longest one before it tells; what is left out is named."""
    clock = Clock()
    budget = Budget(10.0, clock)
    done = []
    for seconds in budget.each([1.0, 4.0, 2.0, 3.0, 1.0]):
        done.append(seconds)
        clock.now_s += seconds

    assert done == [1.0, 4.0, 2.0]
    assert budget.left_out == ["3.0", "1.0"]


def test_the_first_thing_is_done_however_little_time_there_is() -> None:
    """A part that was begun says something."""
    assert list(Budget(0.0, Clock()).each(["only"])) == ["only"]


def test_without_a_bound_everything_is_done() -> None:
    """As when a part is run alone."""
    clock = Clock()
    for _ in Budget(None, clock).each(range(3)):
        clock.now_s += 1e9

    assert clock.now_s == 3e9


# -- failures -----------------------------------------------------------------------------------------------------


def test_a_part_that_fails_is_recorded_and_the_next_has_its_turn(tmp_path: Path) -> None:
    """The exit code tells that not all of them ran."""
    clock = Clock()
    states = iter(["whole", "failed", "out of time", *["cut short"] * (len(PARTS) - 3)])

    def run(part: Part, allotted: Allotment) -> Outcome:
        state: Any = next(states)
        return Outcome(part.name, state, reason="a line\nRuntimeError: out of luck" if state == "failed" else "")

    outcomes = command.run_all(PARTS, 600.0, run, clock, no_file)

    assert [outcome.state for outcome in outcomes[:4]] == ["whole", "failed", "out of time", "cut short"]
    file = EvidenceFile(None, torch.device("cpu"), 8.0, tmp_path)
    found = file.write(outcomes, (), running=False)
    assert found["parts"][PARTS[1].name]["reason"] == "a line\nRuntimeError: out of luck"
    assert found["note"] == reading.NO_FIGURES
    assert not is_whole(found)
    assert is_whole(file.write([outcomes[0], outcomes[3]], (), running=False))


def run_played(name: str, folder: Path, limit_s: float = 120.0) -> Outcome:
    part = Part(name, "", 1.0, 1.0)
    return run_part(part, Allotment(limit_s, limit_s), ["--cpu"], folder, package=PLAYED)


def test_a_part_that_ends_well_leaves_its_results(tmp_path: Path) -> None:
    """As the file that it wrote has them."""
    outcome = run_played("part_ends", tmp_path)

    assert (outcome.state, outcome.results["answer"]) == ("whole", 42)
    assert outcome.results["headline"] == [["the answer", 42.0, ""]]


def test_a_part_that_raises_leaves_its_traceback_and_what_it_had_found(tmp_path: Path) -> None:
    """Both go into the file."""
    outcome = run_played("part_fails", tmp_path)

    assert outcome.state == "failed"
    assert outcome.reason.startswith("exit code 1\n")
    assert "Traceback (most recent call last)" in outcome.reason
    assert outcome.reason.endswith("RuntimeError: the device fell off the bus")
    assert outcome.results["found"] == 1


def test_a_part_that_hangs_is_killed_and_leaves_what_it_had_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told to end first; this one does not listen."""
    monkeypatch.setattr(part_process, "STOP_S", 0.1)
    log = tmp_path / "part_hangs.log"
    waited = subprocess.Popen.wait

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """Until it hangs, in the place of the share."""
        if timeout == 7.0:
            done = threading.Event()
            while not (log.exists() and b"it hangs" in log.read_bytes()):
                done.wait(0.02)
            raise subprocess.TimeoutExpired("part", timeout)
        return waited(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)

    outcome = run_played("part_hangs", tmp_path, limit_s=7.0)

    assert outcome.state == "out of time"
    assert "it hangs" in outcome.reason
    assert outcome.results["found"] == 1


# -- what is asked of a cell ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_gpu", [True, False])
def test_cases_differ_from_the_plain_one_in_their_mechanism_alone(has_gpu: bool) -> None:
    """Each cell begins with the same one, and the last asks it once more at its end."""
    known = setups(Scale(contexts=4, queries=12, turns=20), has_gpu=has_gpu)

    assert [setup.mover for setup in known] == ["batched", "gpu_assisted" if has_gpu else "per_page", "auto"]
    assert [setup.has_profile for setup in known] == [False, False, True]
    assert all(setup.cases[0] == known[-1].cases[-1] for setup in known)
    for setup in known:
        assert {case.load.name for case in setup.cases if case.mechanism == "all on"} == {
            "loogle",
            "reviewmt",
            "sharegpt",
        }
        for case in setup.cases:
            changed = [name for name in PLAIN.__struct_fields__ if getattr(case.config, name) != getattr(PLAIN, name)]
            assert bool(changed) == (case.mechanism != "all on"), case
    without = {case.load.name for case in known[0].cases if case.mechanism == "no host tier"}
    assert without == {"loogle", "reviewmt", "sharegpt"}


def test_workloads_are_known_to_the_client() -> None:
    """Their options too; nothing is found out on a lent machine."""
    from thermocline.load.command_line import check, parser

    for load in loads(Scale(contexts=4, queries=12, turns=20)).values():
        check(parser().parse_args(load.arguments))


@pytest.mark.parametrize(("cold_s", "warm_s"), [(0.02, 0.01), (1.5, 0.2), (4.0, 1.0), (60.0, 5.0)])
def test_what_is_asked_follows_from_the_time_there_is(cold_s: float, warm_s: float) -> None:
    """At least three documents, each asked about twice; on a fast machine no more than bounds allow."""
    scale = calibrated(cold_s, warm_s, 20.0)

    assert 3 <= scale.contexts <= 10
    assert 2 * scale.contexts <= scale.queries <= 10 + 96
    expected_s = scale.contexts * cold_s + (scale.queries - scale.contexts) * (cold_s + warm_s) / 2
    assert expected_s <= 20.0 * 1.2 or scale.contexts == 3


# -- the parts themselves -------------------------------------------------------------------------------------------


STARTING = ("correctness", "tokens", "serving", "restarts")
"""These start whole processes: tests/integration has them."""

IN_PROCESS = [part.name for part in PARTS if part.name not in STARTING]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every part wrote; Triton interprets kernels in the process that they share."""
    folder = tmp_path_factory.mktemp("parts")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    subprocess.run(
        [sys.executable, "-m", f"{PLAYED}.several", str(folder), *IN_PROCESS],
        cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=500,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_part_works_without_a_gpu(name: str, measured: Path) -> None:
    """In a tiny geometry, kernels interpreted: it compares what it is to compare, and writes figures and a headline."""
    failed = measured / f"{name}.failed"
    assert not failed.exists(), failed.read_text(encoding="utf-8")
    document = json.loads((measured / f"{name}.json").read_text(encoding="utf-8"))
    assert document["benchmark"] == f"gpu_{name}"
    results = document["results"]
    assert (results["gpu"], results["note"], results["is_whole"]) == (None, reading.NO_FIGURES, True)
    assert results["headline"]


def test_a_part_alone_has_its_kernels_interpreted(tmp_path: Path) -> None:
    """It begins anew for that, with its arguments: Triton decides when it is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = (
        "import sys; from bench.gpu import reading; sys.modules['__main__'].__spec__ = reading.__spec__;"
        "reading.os.execve = lambda *call: print(call[1][1:], call[2]['TRITON_INTERPRET']);"
        "reading.begin('attention', None)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, "--cpu", "--rounds", "2"],
        cwd=ROOT, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip

    assert done.stdout == "['-m', 'bench.gpu.reading', '--cpu', '--rounds', '2'] 1\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, and that is no failure."""
    assert command.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out
