"""The file of a run is whole after every part, whoever ends the run, and its summary can be read from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import evidence, part_process
from bench.gpu.evidence import EvidenceFile, parts_folder, read
from bench.gpu.part_process import Outcome, run_part
from bench.gpu.parts import Allotment, Part
from bench.gpu.stopping import Stopped, stoppable
from bench.results_file import write

PLAYED = "tests.unit.bench.gpu.played_parts"
PARTS = [Part(name, "?", 1.0, 1.0) for name in ("first", "second", "third")]
WHOLE = {"headline": [["the answer", 42.0, "units"]]}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "gpu.json"


@pytest.fixture
def file(out: Path, tmp_path: Path) -> EvidenceFile:
    return EvidenceFile(out, torch.device("cpu"), 8.0, tmp_path)


def states(out: Path) -> dict[str, str]:
    found = json.loads(out.read_text(encoding="utf-8"))["results"]["parts"]
    return {name: part["state"] for name, part in found.items()}


def test_the_file_is_whole_when_a_part_begins(out: Path, file: EvidenceFile) -> None:
    """It says which have ended, which runs, and which were not begun."""
    seen = []

    def run(part: Part, allotted: Allotment) -> Outcome:
        seen.append(states(out))
        return Outcome(part.name, "whole", 1.0, results=WHOLE)

    command.run_all(
        PARTS, 100.0, run, lambda: 0.0, lambda ended, waiting: file.write(ended, waiting, running=True)
    )  # fmt: skip

    assert seen == [
        {"first": "running", "second": "not begun", "third": "not begun"},
        {"first": "whole", "second": "running", "third": "not begun"},
        {"first": "whole", "second": "whole", "third": "running"},
    ]


def test_of_a_run_that_was_killed_the_summary_has_what_its_part_had_found(
    out: Path, file: EvidenceFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole parts with their figures, the one that ran with those that it had written, the others as not begun."""
    file.write([Outcome("first", "whole", 3.0, results=WHOLE)], PARTS[1:], running=True)
    write("gpu_second", {"headline": [["half", 21.0, ""]]}, seed=0, out=parts_folder(out) / "second.json")

    code = command.main(["--summary", str(out)])

    shown = capsys.readouterr().out
    assert code == 1
    assert "first (whole, 3 s)" in shown
    assert "the answer" in shown
    assert "second (killed, 0 s)" in shown
    assert "half" in shown
    assert "third (not begun, 0 s)" in shown
    assert read(out)["parts"]["second"]["results"]["headline"] == [["half", 21.0, ""]]


def test_at_its_end_only_the_file_is_left(out: Path, file: EvidenceFile) -> None:
    """What parts wrote is in it; a run that was killed leaves its folder to the next, which empties it."""
    write("gpu_first", {}, seed=0, out=parts_folder(out) / "first.json")
    EvidenceFile(out, torch.device("cpu"), 8.0, out.parent)
    assert list(parts_folder(out).iterdir()) == []

    file.close()

    assert not parts_folder(out).exists()


def test_a_gpu_is_described_by_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the run itself holds none of its memory while parts measure it."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        said = "570.1" if command[0] == "nvidia-smi" else json.dumps({"gpu": "NVIDIA H200"})
        return subprocess.CompletedProcess(command, 0, said)

    monkeypatch.setattr(subprocess, "run", run)

    assert evidence.described(torch.device("cuda")) == {"gpu": "NVIDIA H200", "driver": "570.1"}
    assert asked[0][0] == sys.executable


def test_a_summary_of_another_file_is_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its name."""
    assert command.main(["--summary", str(out)]) == 2
    out.write_text('{"results": {}}')
    assert command.main(["--summary", str(out)]) == 2
    assert "gpu.json is no file of this benchmark" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_between_parts_leaves_those_behind_it_out(number: signal.Signals) -> None:
    """What has ended is kept, and nothing is begun any more; a second signal changes nothing."""
    ended: list[list[str]] = []

    def keep(outcomes: Any, waiting: Any) -> None:
        ended.append([outcome.part for outcome in outcomes])
        if len(outcomes) == 1:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    with stoppable():
        outcomes = command.run_all(PARTS, 100.0, lambda part, _: Outcome(part.name, "whole"), lambda: 0.0, keep)

    assert [(each.part, each.state) for each in outcomes] == [
        ("first", "whole"), ("second", "left out"), ("third", "left out"),
    ]  # fmt: skip
    assert ended == [[], ["first"]]


def test_a_signal_within_a_part_ends_it_and_keeps_what_it_had_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part's process is gone, its results are there, and no part follows."""
    monkeypatch.setattr(part_process, "STOP_S", 0.1)
    waited, log = subprocess.Popen.wait, tmp_path / "part_hangs.log"
    began: list[int] = []

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """Until the part hangs; then a signal comes to this process."""
        if timeout == 7.0:
            began.append(process.pid)
            while not (log.exists() and b"it hangs" in log.read_bytes()):
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGTERM)
        return waited(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)

    def run(part: Part, allotted: Allotment) -> Outcome:
        return run_part(part, Allotment(7.0, 7.0), ["--cpu"], tmp_path, package=PLAYED)

    parts = [Part("part_hangs", "", 1.0, 1.0), PARTS[0]]
    with stoppable():
        outcomes = command.run_all(parts, 100.0, run, lambda: 0.0, lambda ended, waiting: None)

    assert [(each.part, each.state) for each in outcomes] == [("part_hangs", "stopped"), ("first", "left out")]
    assert outcomes[0].reason == "stopped by SIGTERM"
    assert outcomes[0].results["found"] == 1
    with pytest.raises(ProcessLookupError):
        os.kill(began[0], 0)


def test_signals_have_their_old_meaning_afterwards() -> None:
    """Within the block they raise, later they do what they did."""
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(Stopped, match="SIGTERM"), stoppable():
        os.kill(os.getpid(), signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) is before
