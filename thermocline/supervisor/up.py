"""Starts one cell, keeps it running, and stops it. The shell around the pure parts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from services.worker.checks import driver_shows_gpus, gpus_here
from shared import logs
from shared.errors import ConfigError, reason_of
from shared.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_REFUSED
from shared.progress import Phase
from thermocline.supervisor import nats_server, readiness
from thermocline.supervisor.cell import WATCHER, Cell
from thermocline.supervisor.commands import NATS, nats_child, service_children
from thermocline.supervisor.data_lock import lock_data_dir
from thermocline.supervisor.embedded_broker import broker_flags, write_broker_files
from thermocline.supervisor.importance import importance_notice
from thermocline.supervisor.leftovers import clean_up
from thermocline.supervisor.log_rotation import rotate_for_ever
from thermocline.supervisor.log_tail import readable, refusal_reason, tail
from thermocline.supervisor.nats_program import NatsProgram, find_nats_program
from thermocline.supervisor.page_key import admin_key_of, page_line
from thermocline.supervisor.phases import StartDisplay, described
from thermocline.supervisor.process_identity import own_identity, own_place
from thermocline.supervisor.ready_lines import ReadyFacts, ready_lines
from thermocline.supervisor.record_keeper import RecordKeeper
from thermocline.supervisor.records import RECORD_NAME, CellRecord, ChildRecord
from thermocline.supervisor.restarts import RestartPolicy
from thermocline.supervisor.store_watch import watch_store
from thermocline.supervisor.supervisor import Failure, Supervisor
from thermocline.supervisor.tier_check import check_tiers

_LOOPBACK = "127.0.0.1"
_NATS_UP_S = 30.0
_SHOWN_LINES = 40

# The bundled model was trained for such questions; any other model can answer it, too.
_TRY = "The password of the Tujer warehouse is topaz. What is the password of the Tujer warehouse?"

# Until the cell has been ready once, a process that keeps dying or refuses is a fault of the setup: report it soon.
STARTING = RestartPolicy(max_restarts=3)
RUNNING = RestartPolicy(is_refusal_final=False)

_log = logs.get_logger("supervisor.up")


class Up:
    """One run of ``thermocline up``. Make it on the event loop, then :meth:`run` it once."""

    def __init__(self, cell: Cell, runs: Path) -> None:
        """Prepare to run ``cell``; ``runs`` is the folder in which all cells keep their records."""
        self._cell = cell
        self._runs = runs
        self._owner, self._place = own_identity(), own_place()
        self._is_ready = False
        self._stopping = asyncio.Event()
        paths = (runs / f"{cell.shm_prefix}.json", cell.data_dir / RECORD_NAME)
        self._keeper = RecordKeeper(self._record, paths)
        self._supervisor = Supervisor(
            STARTING, grace_s=cell.config.grace_s, on_change=self._keeper.update, on_phase=self._on_phase
        )
        self._display = StartDisplay(sys.stdout)
        self._ready_by: asyncio.Timeout | None = None  # Only while the cell starts.
        self._unheard: OSError | None = None

    async def run(self) -> int:
        """Serve until a signal or a failure; return the exit code. Raises ConfigError where the cell cannot start."""
        cell = self._cell
        _make_disk_directories(cell)
        await asyncio.to_thread(check_tiers, cell, self._runs, os.environ)
        try:
            cell.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{cell.data_dir_flag}: cannot make {cell.logs}: {reason_of(error)}") from error
        loop = asyncio.get_running_loop()
        # All of them happen, last first, whatever raises.
        async with AsyncExitStack() as ends:
            ends.enter_context(lock_data_dir(cell.data_dir))
            # SIGHUP: the terminal was closed.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self._on_signal)
            ends.callback(self._forget)
            self._keeper.begin()
            ends.push_async_callback(self._supervisor.stop)
            ends.callback(self._say_that_it_stops)
            for work in (rotate_for_ever(cell.logs), self._keeper.repeat_for_ever(), self._watch_store()):
                ends.callback(asyncio.create_task(work).cancel)
            code = await self._serve()
        if self._unheard is not None:
            raise self._unheard
        return code

    def _say_that_it_stops(self) -> None:
        self._display.close()
        if self._stopping.is_set() and self._unheard is None:
            _say("stopping; Ctrl-C again kills at once")

    def _forget(self) -> None:
        """Remove all that a stopped cell leaves, and its record."""
        for end in (partial(clean_up, self._record(), self._runs), self._keeper.remove):
            try:
                end()
            except OSError as error:
                _log.warning("leftovers_stay", reason=str(error))

    async def _watch_store(self) -> None:
        cell = self._cell
        password = cell.broker_passwords.get(WATCHER)
        if password is None:
            return  # A broker of the operator's own.
        health = partial(nats_server.health_fault_at, _LOOPBACK, cell.nats_port, WATCHER, password)
        await watch_store(health, cell.data_dir, partial(self._supervisor.restart, NATS), _say_if_heard)

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
        await nats_server.wait_until_up(cell.shm_prefix, _LOOPBACK, cell.nats_port, timeout_s=_NATS_UP_S)

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
        question = {"model": model, "messages": [{"role": "user", "content": _TRY}], "temperature": 0}
        body = shlex.quote(json.dumps(question, ensure_ascii=False))
        url = shlex.quote(f"{cell.base_url}/v1/chat/completions")
        print("\n".join(ready_lines(facts)))
        print(f"Broker: {broker_flags(cell)}")
        notice = importance_notice(service_children(cell), os.environ)
        if notice:
            print(notice)
        print(f"Try: curl {url} {headers} -d {body}")
        sys.stdout.flush()
        self._is_ready = True
        self._keeper.update()

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
            place=self._place,
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


def _make_disk_directories(cell: Cell) -> None:
    """Create the directories of --disk-dir with mode 0700 if missing. Raises ConfigError."""
    for path in cell.config.disk_dir:
        try:
            with contextlib.suppress(FileExistsError):  # A file in its place is found by the check of the tiers.
                Path(path).expanduser().mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise ConfigError(f"cannot make --disk-dir {path}: {error.strerror}") from error


def _say(text: str) -> None:
    print(f"thermocline up: {text}", file=sys.stderr, flush=True)


def _say_if_heard(text: str) -> None:
    with contextlib.suppress(OSError):
        _say(text)


def _say_tail(name: str, log_file: Path, lines: int = 20) -> None:
    text = "\n".join(readable(line) for line in tail(log_file, lines).splitlines())
    for line in text.splitlines()[-_SHOWN_LINES:]:
        print(f"  {name} | {line}", file=sys.stderr, flush=True)
