"""The cell under test: the supervisor's processes, each with a proxy of its own between it and the broker."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from shared.errors import ConfigError, Unavailable
from thermocline.chaos.proxy import Proxy
from thermocline.chaos.settings import SERVICE_ENVIRONMENT
from thermocline.supervisor import nats_server, readiness
from thermocline.supervisor.cell import Cell, resolve
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.commands import nats_child, service_children
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.embedded_broker import write_broker_files
from thermocline.supervisor.leftovers import clean_up
from thermocline.supervisor.nats_program import find_nats_program
from thermocline.supervisor.process_identity import own_identity
from thermocline.supervisor.records import CellRecord, ChildRecord, write_record
from thermocline.supervisor.restarts import RestartPolicy
from thermocline.supervisor.supervisor import Death, Supervisor

# Dead processes are restarted at once, however often: deaths are the point here.
_RESTARTS = RestartPolicy(initial_delay_s=0.1, factor=1.0, max_restarts=1_000_000)
_POLL_S = 0.02
_NATS_UP_S = 30.0


class ChaosCell:
    """A cell whose processes and connections can be hurt. Start it once, and :meth:`stop` it in any case."""

    def __init__(self, config: SupervisorConfig, runs: Path, on_death: Callable[[Death], None]) -> None:
        """Resolve ``config``, on the event loop; nothing is started. The cell's record is kept in ``runs``.

        ``on_death`` is called on the event loop for each process that ends before :meth:`stop`. Raises ConfigError for
        settings with which no cell can start.
        """
        self._runs = runs
        self._owner = own_identity()
        self._cell: Cell = resolve(config, runs)
        self._supervisor = Supervisor(
            _RESTARTS, grace_s=config.grace_s, on_change=self._write_record, on_death=on_death
        )
        self.proxies: dict[str, Proxy] = {}

    @property
    def base_url(self) -> str:
        """Address of the gateway, not proxied."""
        return self._cell.base_url

    @property
    def nats_url(self) -> str:
        """Address of the broker for the operator, not proxied."""
        return self._cell.operator_urls[0]

    @property
    def shm_prefix(self) -> str:
        """First part of the names of all shared segments of this cell."""
        return self._cell.shm_prefix

    @property
    def model(self) -> Path:
        """Folder of the served model."""
        return self._cell.model

    @property
    def disk(self) -> Path:
        """The directory of the disk tier."""
        return Path(self._cell.config.disk_dir[0])

    @property
    def logs(self) -> Path:
        """Folder with one log file per process."""
        return self._cell.logs

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all processes, the broker first."""
        return tuple(self._supervisor.minded)

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers, running or not."""
        return tuple(name for name in self.names if name.startswith("worker"))

    def log(self, name: str) -> Path:
        """Return the log file of a process. Raises KeyError for an unknown name."""
        return self._supervisor.minded[name].spec.log

    def pids(self) -> dict[str, int]:
        """Return the pids of the running processes, by name."""
        minded = self._supervisor.minded
        return {n: m.child.pid for n, m in minded.items() if m.child is not None and not m.child.has_ended}

    def gave_up(self) -> str | None:
        """Return which process the supervisor stopped restarting, and why; None while it restarts all."""
        failure = self._supervisor.failure
        return None if failure is None else f"{failure.name}: {failure.reason}"

    async def start(self, timeout_s: float = 300.0) -> None:
        """Start everything and wait until the gateway can serve. Raises Unavailable, ConfigError."""
        cell = self._cell
        cell.logs.mkdir(parents=True, exist_ok=True)
        self.disk.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not cell.nats_port:
            raise ConfigError("faults need a broker of their own")
        program = find_nats_program(cell.config.nats_server)
        await self._supervisor.start(nats_child(cell, program.path, write_broker_files(cell)))
        await nats_server.wait_until_up(cell.shm_prefix, "127.0.0.1", cell.nats_port, timeout_s=_NATS_UP_S)
        for spec in service_children(cell):
            proxy = self.proxies[spec.name] = Proxy(spec.name, cell.nats_port)
            await proxy.start()
            await self._supervisor.start(self._behind(proxy, spec.name))
        try:
            async with asyncio.timeout(timeout_s):
                await readiness.wait_until_ready(cell.base_url)
        except TimeoutError:
            raise Unavailable(f"the cell was not ready within {timeout_s:.0f} s; see {cell.logs}") from None

    def _behind(self, proxy: Proxy, name: str) -> ChildSpec:
        """Return the specification of a process, with the proxy's address in place of the broker's."""
        moved = dataclasses.replace(self._cell, nats_urls=(proxy.url,))
        spec = next(spec for spec in service_children(moved) if spec.name == name)
        return dataclasses.replace(spec, env={**spec.env, **SERVICE_ENVIRONMENT})

    async def signal(self, name: str, number: signal.Signals, *, timeout_s: float = 60.0) -> int:
        """Send a signal to the process once it runs; return its pid. Raises Unavailable if it does not run in time."""
        ended = 0
        while True:
            pid = await self.running_pid(name, other_than=ended, timeout_s=timeout_s)
            try:
                os.kill(pid, number)
                return pid
            except ProcessLookupError:
                ended = pid  # It ended by itself at this moment; its successor will do.

    async def running_pid(self, name: str, *, other_than: int = 0, timeout_s: float = 60.0) -> int:
        """Return the pid of ``name``, waiting until there is one that is not ``other_than``. Raises Unavailable."""
        deadline = time.monotonic() + timeout_s
        while (pid := self.pids().get(name, other_than)) == other_than:
            if time.monotonic() > deadline:
                raise Unavailable(f"{name} was not restarted within {timeout_s:.0f} s")
            await asyncio.sleep(_POLL_S)
        return pid

    async def stop(self) -> None:
        """Heal all proxies and resume stopped processes, then end them in order."""
        for proxy in self.proxies.values():
            proxy.heal()
        for pid in self.pids().values():
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass  # It ended at this moment.
        await self._supervisor.stop()
        for proxy in self.proxies.values():
            await proxy.close()

    def clean_up(self) -> None:
        """Remove what the cell left in shared memory, and its record; only after :meth:`stop`."""
        clean_up(self._record(), self._runs)

    def _record(self) -> CellRecord:
        """Return the record from which the next start cleans up if this process is killed."""
        minded = self._supervisor.minded
        return CellRecord(
            owner_pid=self._owner[0],
            owner_started=self._owner[1],
            base_url=self.base_url,
            nats_url=self.nats_url,
            data_dir=str(self._cell.data_dir),
            data_dir_is_temporary=False,
            shm_prefix=self.shm_prefix,
            children=tuple(
                ChildRecord(name=name, pid=m.child.pid, started=m.started, state=m.state, restarts=m.restarts)
                for name, m in minded.items()
                if m.child is not None
            ),
        )

    def _write_record(self) -> None:
        write_record(self._record(), (self._runs / f"{self.shm_prefix}.json",))
