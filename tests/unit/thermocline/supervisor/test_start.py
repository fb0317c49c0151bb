"""How long a start may take, and what is said of one that failed: time passes only where it is said to."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.lifecycle import EXIT_FAILED, EXIT_OK
from shared.memory import SharedSegment
from shared.memory.segment import SHM_DIRECTORY
from shared.progress import Phase
from tests.unit.thermocline.supervisor.test_commands import make_cell
from tests.unit.thermocline.supervisor.test_leftovers import make_record
from tests.virtual_loop import run_virtually
from thermocline.supervisor import record_keeper
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.data_lock import lock_data_dir
from thermocline.supervisor.record_keeper import RecordKeeper
from thermocline.supervisor.records import RECORD_NAME, read_record
from thermocline.supervisor.supervisor import Failure, Minded, Supervisor
from thermocline.supervisor.up import Up


class ScriptedUp(Up):
    """Whose cell starts as ``script`` says, without a process."""

    def __init__(self, folder: Path) -> None:
        cell = make_cell(
            SupervisorConfig(ready_timeout_s=300.0),
            data_dir=folder,
            data_dir_is_temporary=False,
            shm_prefix=f"tctest-{os.getpid()}-start",
        )
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


class RunningUp(ScriptedUp):
    """Whose cell runs until it has noticed ``change`` of its processes, with shared memory of its own."""

    def __init__(self, folder: Path, change: Callable[[], None]) -> None:
        super().__init__(folder)
        self._change = change
        self.segment = SharedSegment.create(self._cell.shm_prefix, "device", 4096)

    async def _start(self) -> None:
        self._change()
        self._supervisor._on_change()


def run(up: Callable[[], ScriptedUp]) -> int:
    """The exit code of a run."""

    async def body() -> int:
        return await up().run()

    return asyncio.run(body())


def test_a_record_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cell serves, and at its end memory, records and lock go as ever; the log has one line about it."""
    tried = []

    def full(*_: object) -> None:
        tried.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill() -> None:
        monkeypatch.setattr(record_keeper, "write_record", full)

    segments = []

    def up() -> ScriptedUp:
        made = RunningUp(tmp_path, fill)
        segments.append(made.segment)
        return made

    code = run(up)

    assert code == EXIT_OK
    assert len(tried) > 1
    assert not (SHM_DIRECTORY / segments[0].name).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "logs"]
    lock_data_dir(tmp_path).close()
    told = capsys.readouterr()
    assert (told.out + told.err).count("record_not_written") == 1


def test_a_record_is_written_as_soon_as_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without another change of the cell."""
    folder = tmp_path / "folder"
    keeper = RecordKeeper(lambda: make_record(folder, owner=(1, 2), prefix="tc-x"), (folder / RECORD_NAME,))

    async def body() -> None:
        keeper.update()
        repeating = asyncio.create_task(keeper.repeat_for_ever())
        await asyncio.sleep(3 * record_keeper.AGAIN_S)
        folder.mkdir()
        await asyncio.sleep(2 * record_keeper.AGAIN_S)
        repeating.cancel()

    run_virtually(body())

    assert read_record(folder / RECORD_NAME) is not None


def test_whatever_fails_at_the_end_the_rest_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the stop of the processes; 192 MiB of shared memory would otherwise stay."""
    segments = []

    async def fails(self: Supervisor) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Supervisor, "stop", fails)

    def up() -> ScriptedUp:
        made = RunningUp(tmp_path, lambda: None)
        segments.append(made.segment)
        return made

    with pytest.raises(OSError, match="Input/output error"):
        run(up)

    assert not (SHM_DIRECTORY / segments[0].name).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "logs"]
    lock_data_dir(tmp_path).close()


def test_a_start_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the path and the reason: of a folder, of the lock and of the record."""
    (tmp_path / "logs").write_text("")
    with pytest.raises(ConfigError, match=f"--data-dir {tmp_path}: cannot make {tmp_path}/logs: File exists"):
        run(lambda: ScriptedUp(tmp_path))
    (tmp_path / "logs").unlink()

    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match=f"cannot lock {tmp_path}/lock: Is a directory"):
        run(lambda: ScriptedUp(tmp_path))
    (tmp_path / "lock").rmdir()

    (tmp_path / RECORD_NAME).mkdir()
    with pytest.raises(ConfigError, match=f"cannot write {tmp_path}/{RECORD_NAME}: Is a directory"):
        run(lambda: ScriptedUp(tmp_path))


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
