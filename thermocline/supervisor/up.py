"""Starts one cell, keeps it running, and stops it. The shell around the pure parts."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TextIO

from services.worker.checks import driver_shows_gpus, gpus_here
from shared.errors import ConfigError
from shared.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_REFUSED
from shared.progress import Phase
from thermocline.supervisor import nats_server, readiness
from thermocline.supervisor.cell import Cell
from thermocline.supervisor.commands import nats_child, service_children
from thermocline.supervisor.embedded_broker import broker_flags, write_broker_files
from thermocline.supervisor.importance import importance_notice
from thermocline.supervisor.leftovers import clean_up
from thermocline.supervisor.log_rotation import rotate_for_ever
from thermocline.supervisor.log_tail import readable, refusal_reason, tail
from thermocline.supervisor.nats_program import NatsProgram, find_nats_program
from thermocline.supervisor.page_key import admin_key_of, page_line
from thermocline.supervisor.phases import StartDisplay, described
from thermocline.supervisor.process_identity import own_identity
from thermocline.supervisor.ready_lines import ReadyFacts, ready_lines
from thermocline.supervisor.records import RECORD_NAME, CellRecord, ChildRecord, write_record
from thermocline.supervisor.restarts import RestartPolicy
from thermocline.supervisor.supervisor import Failure, Supervisor
from thermocline.supervisor.tier_check import check_tiers

_NATS_UP_S = 30.0
_SHOWN_LINES = 40

# The bundled model was trained for such questions; any other model can answer it, too.
_TRY = "The password of the Tujer warehouse is topaz. What is the password of the Tujer warehouse?"

# Until the cell has been ready once, a process that keeps dying is a fault of the setup: report it soon.
STARTING = RestartPolicy(max_restarts=3)
RUNNING = RestartPolicy()


class Up:
    """One run of ``thermocline up``. Make it on the event loop, then :meth:`run` it once."""

    def __init__(self, cell: Cell, runs: Path) -> None:
        """Prepare to run ``cell``; ``runs`` is the folder in which all cells keep their records."""
        self._cell = cell
        self._runs = runs
        self._owner = own_identity()
        self._is_ready = False
        self._stopping = asyncio.Event()
        self._supervisor = Supervisor(
            STARTING, grace_s=cell.config.grace_s, on_change=self._write_record, on_phase=self._on_phase
        )
        self._display = StartDisplay(sys.stdout)
        self._ready_by: asyncio.Timeout | None = None  # Only while the cell starts.
        self._unheard: OSError | None = None

    async def run(self) -> int:
        """Serve until a signal or a failure; return the exit code. Raises ConfigError where the cell cannot start."""
        cell = self._cell
        _make_disk_directories(cell)
        await asyncio.to_thread(check_tiers, cell, self._runs, os.environ)
        cell.logs.mkdir(parents=True, exist_ok=True)
        lock = _lock(cell.data_dir)
        rotating: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        # SIGHUP: the terminal was closed.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        try:
            self._write_record()
            rotating = asyncio.create_task(rotate_for_ever(cell.logs))
            code = await self._serve()
            if self._unheard is not None:
                raise self._unheard
            return code
        finally:
            if rotating is not None:
                rotating.cancel()
            self._display.close()
            if self._stopping.is_set() and self._unheard is None:
                _say("stopping; Ctrl-C again kills at once")
            await self._supervisor.stop()
            clean_up(self._record(), self._runs)
            if not cell.data_dir_is_temporary:
                (cell.data_dir / RECORD_NAME).unlink(missing_ok=True)
            lock.close()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._supervisor.hurry()  # The second Ctrl-C: the operator does not want to wait.
        self._stopping.set()

    def _on_phase(self, name: str, phase: Phase) -> None:
        """Show a process's phase; progress restarts the timeout of the start."""
        self._put_off()
        try:
            self._display.show(name, phase)
        except OSError as error:
            self._unheard = error  # The output is closed. Raised after all processes have stopped.
            self._stopping.set()

    def _put_off(self) -> None:
        if self._ready_by is not None and not self._ready_by.expired():
            self._ready_by.reschedule(asyncio.get_running_loop().time() + self._cell.config.ready_timeout_s)

    async def _serve(self) -> int:
        cell = self._cell
        try:
            async with asyncio.timeout(cell.config.ready_timeout_s) as self._ready_by:
                if await self._unless_over(self._start()):
                    self._display.close()
                    await self._announce()
        except TimeoutError:
            self._display.close()
            _say(f"no progress for {cell.config.ready_timeout_s:.0f} s; the last lines of every log:")
            for name, minded in self._supervisor.minded.items():
                if minded.phase is not None and minded.phase.name:
                    _say(f"{name} is {described(minded.phase)}")
                _say_tail(name, minded.spec.log, lines=5)
            return EXIT_FAILED
        finally:
            self._ready_by = None
        await self._unless_over(asyncio.Event().wait())
        failure = self._supervisor.failure
        if failure is not None and not self._stopping.is_set():
            self._explain(failure)
            return EXIT_REFUSED if failure.refused else EXIT_FAILED
        return EXIT_OK

    async def _unless_over(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Run ``work``; cancel it and return False if a signal or a failure comes first."""
        task = asyncio.ensure_future(work)
        ends = {asyncio.ensure_future(self._stopping.wait()), asyncio.ensure_future(self._supervisor.failed())}
        try:
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if any(end.done() for end in ends):
                return False
            task.result()
            return True
        finally:
            unfinished = {task, *ends}
            for each in unfinished:
                each.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def _start(self) -> None:
        """Start all processes and wait until the gateway says that the cell can serve."""
        cell = self._cell
        program = find_nats_program(cell.config.nats_server) if cell.nats_port else None
        # Loading PyTorch and the model takes seconds, during which a user should see progress.
        print(f"Starting {cell.model.name} ... (logs: {cell.logs})", flush=True)
        if program is not None:
            await self._start_nats(program)
        else:
            await nats_server.require_external(cell.nats_urls)
        for spec in service_children(cell):
            await self._supervisor.start(spec)
        await readiness.wait_until_ready(cell.base_url)

    async def _start_nats(self, program: NatsProgram) -> None:
        cell = self._cell
        print(f"Broker program: {program}", flush=True)
        await self._supervisor.start(nats_child(cell, program.path, write_broker_files(cell)))
        await nats_server.wait_until_up(cell.shm_prefix, "127.0.0.1", cell.nats_port, timeout_s=_NATS_UP_S)

    async def _announce(self) -> None:
        cell = self._cell
        self._supervisor.policy = RUNNING
        open_model = await readiness.served_model(cell.base_url)
        model = open_model or cell.model.name
        facts = ReadyFacts(
            base_url=cell.base_url,
            model=model,
            workers=cell.config.workers,
            schedulers=cell.config.schedulers,
            serving=await readiness.serving(cell.base_url),
            degraded=await readiness.degraded_lines(cell.base_url, admin_key_of(cell, os.environ)),
            page=await page_line(cell, os.environ),
            gpus=await asyncio.to_thread(gpus_here) if driver_shows_gpus() else 0,
        )
        headers = "-H 'content-type: application/json'"
        if open_model is None:
            headers += " -H 'authorization: Bearer YOUR-KEY'"
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": _TRY}], "temperature": 0})
        print("\n".join(ready_lines(facts)))
        print(f"Broker: {broker_flags(cell)}")
        notice = importance_notice(service_children(cell), os.environ)
        if notice:
            print(notice)
        print(f"Try: curl {cell.base_url}/v1/chat/completions {headers} -d '{body}'")
        sys.stdout.flush()
        self._is_ready = True
        self._write_record()

    def _explain(self, failure: Failure) -> None:
        self._display.close()
        minded = self._supervisor.minded[failure.name]
        log_file = minded.spec.log
        reason = refusal_reason(tail(log_file, 200)) if failure.refused else None
        if reason:
            _say(f"{failure.name} refused to start: {reason}")
            return
        while_busy = f" while {minded.phase.name}" if minded.phase is not None and minded.phase.name else ""
        _say(f"{failure.name}: {failure.reason}{while_busy}; the last lines of its log:")
        _say_tail(failure.name, log_file)

    def _record(self) -> CellRecord:
        cell = self._cell
        return CellRecord(
            owner_pid=self._owner[0],
            owner_started=self._owner[1],
            base_url=cell.base_url,
            nats_url=",".join(cell.operator_urls),
            data_dir=str(cell.data_dir),
            data_dir_is_temporary=cell.data_dir_is_temporary,
            shm_prefix=cell.shm_prefix,
            admin_key=cell.admin_key,
            is_ready=self._is_ready,
            children=tuple(
                ChildRecord(
                    name=name,
                    pid=minded.child.pid,
                    started=minded.started,
                    state=minded.state,
                    restarts=minded.restarts,
                )
                for name, minded in self._supervisor.minded.items()
                if minded.child is not None
            ),
        )

    def _write_record(self) -> None:
        paths = (self._cell.data_dir / RECORD_NAME, self._runs / f"{self._cell.shm_prefix}.json")
        write_record(self._record(), paths)


def _make_disk_directories(cell: Cell) -> None:
    """Create the directories of --disk-dir with mode 0700 if missing. Raises ConfigError."""
    for path in cell.config.disk_dir:
        try:
            with contextlib.suppress(FileExistsError):  # A file in its place is found by the check of the tiers.
                Path(path).expanduser().mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise ConfigError(f"cannot make --disk-dir {path}: {error.strerror}") from error


def _lock(data_dir: Path) -> TextIO:
    """Lock the data folder for this process. Raises ConfigError if another cell runs in it.

    The kernel drops the lock when this process ends, however it ends.
    """
    file = (data_dir / "lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"another cell runs in {data_dir}") from error
    return file


def _say(text: str) -> None:
    print(f"thermocline up: {text}", file=sys.stderr, flush=True)


def _say_tail(name: str, log_file: Path, lines: int = 20) -> None:
    text = "\n".join(readable(line) for line in tail(log_file, lines).splitlines())
    for line in text.splitlines()[-_SHOWN_LINES:]:
        print(f"  {name} | {line}", file=sys.stderr, flush=True)
