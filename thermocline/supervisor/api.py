"""Cells for programs: tests and the demo start ``thermocline up`` as a process and get a handle on it.

::

    with running(SupervisorConfig(port=0, workers=2)) as cell:
        httpx.get(f"{cell.base_url}/health/ready")
        cell.kill("worker-0", signal.SIGKILL)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from shared import variables
from shared.errors import Unavailable
from thermocline.supervisor.config import PACKAGE_ROOT, SupervisorConfig, to_flags
from thermocline.supervisor.log_tail import tail
from thermocline.supervisor.process_identity import is_same_process
from thermocline.supervisor.records import CellRecord, ChildRecord, all_records, runs_dir

_POLL_S = 0.05
_MAX_OUTPUT_BYTES = 1024**2


class CellNotReady(Unavailable):
    """A cell that ended, or was not ready in time; the message has its output and the ends of its logs."""

    code = "cell_not_ready"


class RunningCell:
    """A handle on a running ``thermocline up``. Every property is read again from the cell's record."""

    def __init__(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        """Watch ``process``, a running ``thermocline up``, whose output goes to the file ``output``.

        The caller closes the file, and ends the process with :meth:`stop`.
        """
        self.supervisor_pid = process.pid
        self._process = process
        self._output = output
        self._last_record: CellRecord | None = None

    @property
    def record(self) -> CellRecord:
        """The cell's latest record, also after its end. Raises CellNotReady before the first one."""
        found = (record for _, record in all_records(runs_dir()) if record.owner_pid == self.supervisor_pid)
        self._last_record = next(found, self._last_record)
        if self._last_record is None:
            raise CellNotReady(f"the cell has not started\n{self.output}")
        return self._last_record

    @property
    def data_dir(self) -> Path:
        """Folder of its streams and logs, removed at the end unless the settings named it."""
        return Path(self.record.data_dir)

    @property
    def base_url(self) -> str:
        """The gateway's address, such as ``http://127.0.0.1:8000``."""
        return self.record.base_url

    @property
    def nats_url(self) -> str:
        """The broker's address (several are joined by commas)."""
        return self.record.nats_url

    @property
    def shm_prefix(self) -> str:
        """First part of the names of the cell's shared segments."""
        return self.record.shm_prefix

    @property
    def output(self) -> str:
        """Output of ``thermocline up`` itself so far, the first MiB of it."""
        # pread leaves the file's offset alone, at which the cell goes on writing.
        return os.pread(self._output.fileno(), _MAX_OUTPUT_BYTES, 0).decode("utf-8", errors="replace")

    def children(self) -> dict[str, ChildRecord]:
        """Return all children by name: ``nats``, ``scheduler``, ``storage``, ``worker-0`` …, ``gateway``."""
        return {child.name: child for child in self.record.children}

    def pids(self) -> dict[str, int]:
        """Return the pids of the running children, by name."""
        return {name: child.pid for name, child in self.children().items() if is_same_process(child.pid, child.started)}

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one child; return its pid. Raises KeyError if none of that name runs."""
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    def logs(self, name: str, lines: int = 200) -> str:
        """Return the last lines of a child's log, "" without one."""
        return tail(self.data_dir / "logs" / f"{name}.log", lines)

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until the cell has been ready once. Raises CellNotReady if it ends or ``timeout_s`` pass before."""
        self._wait_for(lambda: self.record.is_ready, "not ready", timeout_s)

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = 60.0) -> int:
        """Wait until ``name`` runs under another pid, and return that. Raises CellNotReady."""
        self._wait_for(lambda: self.pids().get(name, old_pid) != old_pid, f"{name} not restarted", timeout_s)
        return self.pids()[name]

    def _wait_for(self, condition: Callable[[], bool], complaint: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self._process.poll() is not None
            try:
                if condition():
                    return
            except CellNotReady:
                pass  # No record yet.
            if ended or time.monotonic() > deadline:
                why = f"it ended with exit code {self._process.returncode}" if ended else f"after {timeout_s:.0f} s"
                raise CellNotReady(f"{complaint}: {why}\n{self.output}{self._all_tails()}")
            time.sleep(_POLL_S)

    def _all_tails(self) -> str:
        if self._last_record is None:
            return ""
        files: Sequence[Path] = sorted((self.data_dir / "logs").glob("*.log"))
        return "".join(f"\n--- {file.name}\n{tail(file, 15)}" for file in files)

    def stop(self, timeout_s: float = 120.0) -> int:
        """Stop the cell as Ctrl-C does and return its exit code; kill it after ``timeout_s``."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@contextmanager
def running(
    config: SupervisorConfig,
    *,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    ready: bool = True,
    ready_timeout_s: float = 300.0,
) -> Iterator[RunningCell]:
    """Run a cell for the duration of the block; with ``ready`` the block begins once it can serve.

    ``config_file`` holds settings of its processes, ``environ`` is added to this process's environment. Call it from a
    thread that outlives the block: the kernel ends the cell when the thread that started it ends, so that a killed test
    leaves nothing behind.
    Raises CellNotReady.
    """
    config = msgspec.structs.replace(config, ready_timeout_s=ready_timeout_s)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "thermocline", "up", *to_flags(config), *to_flags({"config": config_file})],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **_import_path(), **(environ or {}), variables.SUPERVISED: str(os.getpid())},
            process_group=0,
        )
        cell = RunningCell(process, output)
        try:
            if ready:
                cell.wait_ready(ready_timeout_s)
            yield cell
        finally:
            cell.stop()


def _import_path() -> dict[str, str]:
    """Return a PYTHONPATH for a checkout, which may not be installed; nothing elsewhere."""
    if not (PACKAGE_ROOT / "pyproject.toml").is_file():
        return {}
    earlier = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGE_ROOT), earlier)))}
