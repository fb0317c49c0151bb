"""How long a start may take, and what is said of one that failed: time passes only where it is said to."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from shared.lifecycle import EXIT_FAILED, EXIT_OK
from shared.progress import Phase
from tests.unit.thermocline.supervisor.test_commands import make_cell
from tests.virtual_loop import run_virtually
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.supervisor import Failure, Minded
from thermocline.supervisor.up import Up


class ScriptedUp(Up):
    """Whose cell starts as ``script`` says, without a process."""

    def __init__(self, folder: Path) -> None:
        cell = make_cell(SupervisorConfig(ready_timeout_s=300.0), data_dir=folder, data_dir_is_temporary=False)
        super().__init__(cell, folder)
        self.worker = Minded(ChildSpec("worker-0", ("worker",), folder / "worker-0.log"))
        self._supervisor.minded["worker-0"] = self.worker
        self.loads_s = 0.0
        self.told_every_s = 100.0
        self.ends_with_failure = False

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while (passed_s := loop.time() - begun_s) < self.loads_s:
            self._supervisor._take_phase(self.worker, Phase(name="loading weights", done=int(passed_s), total=9999))
            await asyncio.sleep(self.told_every_s)
        if self.ends_with_failure:
            self._supervisor._failure.set_result(Failure("worker-0", refused=False, reason="it ended 4 times"))
            await asyncio.Event().wait()

    async def _announce(self) -> None:
        self._is_ready = True
        self._stopping.set()


def start(folder: Path, *, loads_s: float, told_every_s: float, fails: bool = False) -> tuple[int, float]:
    """The exit code, and the seconds that passed until then."""

    async def body() -> tuple[int, float]:
        up = ScriptedUp(folder)
        up.loads_s, up.told_every_s, up.ends_with_failure = loads_s, told_every_s, fails
        return await up._serve(), asyncio.get_running_loop().time()

    return run_virtually(body())


def test_a_start_may_take_as_long_as_it_gets_further(tmp_path: Path) -> None:
    """A model of hundreds of gigabytes is not given up while it loads."""
    code, passed_s = start(tmp_path, loads_s=5000.0, told_every_s=100.0)

    assert (code, passed_s) == (EXIT_OK, 5000.0)


def test_a_start_without_progress_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the time that --ready-timeout-s allows, counted from the last progress; it says what went on."""
    code, passed_s = start(tmp_path, loads_s=2000.0, told_every_s=1000.0)

    told = capsys.readouterr().err
    assert (code, passed_s) == (EXIT_FAILED, 300.0)
    assert "no progress for 300 s" in told
    assert "worker-0 is loading weights" in told


def test_a_start_that_fails_says_in_which_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that the process was in when it ended."""
    code, _ = start(tmp_path, loads_s=100.0, told_every_s=100.0, fails=True)

    assert code == EXIT_FAILED
    assert "worker-0: it ended 4 times while loading weights; the last lines of its log:" in capsys.readouterr().err


def test_output_that_nobody_reads_stops_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a closed pipe does with any command; what was started is stopped first."""

    async def body() -> Up:
        up = ScriptedUp(tmp_path)
        monkeypatch.setattr(up._display, "show", lambda *_: (_ for _ in ()).throw(BrokenPipeError(signal.SIGPIPE)))
        up.loads_s = 1000.0
        await up._serve()
        return up

    up = run_virtually(body())

    assert isinstance(up._unheard, BrokenPipeError)
    assert up._stopping.is_set()
