"""The loop that keeps a set of children running and stops them in order. It does not depend on what they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from shared import logs
from shared.lifecycle import EXIT_FAILED
from shared.progress import Phase
from thermocline.supervisor.child import Child, ChildSpec
from thermocline.supervisor.lifecycle import State, advance
from thermocline.supervisor.process_identity import start_time
from thermocline.supervisor.restarts import GiveUp, Refused, RestartPolicy

log = logs.get_logger("supervisor")


@dataclass(frozen=True, slots=True)
class Failure:
    """A child that cannot be kept running: it ``refused`` to start, or kept dying."""

    name: str
    refused: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process that was not being stopped; ``exit_code`` is negative for a signal."""

    name: str
    pid: int
    exit_code: int


@dataclass(slots=True)
class Minded:
    """One child: its state, its current process and its recent deaths."""

    spec: ChildSpec
    state: State = "waiting"
    child: Child | None = None
    started: int = 0  # Start time of the current process, see process_identity.
    deaths: tuple[float, ...] = ()
    restarts: int = 0
    phase: Phase | None = None  # Latest phase of the current process's start.
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    """A supervisor: it starts children, restarts dead ones, and reports the first failure that restarts cannot cure."""

    def __init__(
        self,
        policy: RestartPolicy | None = None,
        *,
        grace_s: float = 10.0,
        on_change: Callable[[], None] = lambda: None,
        on_death: Callable[[Death], None] = lambda death: None,
        on_phase: Callable[[str, Phase], None] = lambda name, phase: None,
    ) -> None:
        """Begin without children, on the event loop; without a ``policy`` the default one is used.

        ``grace_s`` is the time in seconds from SIGTERM to SIGKILL when a child is stopped. The
        callbacks run on the event loop: ``on_change`` whenever a child was started, has died or has failed, and at the
        end of :meth:`stop`; ``on_death`` for each process that ends without being stopped; ``on_phase`` with a child's
        name and each phase of its start.
        """
        self.minded: dict[str, Minded] = {}
        self.policy = policy or RestartPolicy()  # May be replaced at any time; it applies from the next death on.
        self._grace_s = grace_s
        self._on_change = on_change
        self._on_death = on_death
        self._on_phase = on_phase
        self._failure: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()

    async def start(self, spec: ChildSpec) -> None:
        """Start a child and keep it running until :meth:`stop`; return once its process exists."""
        minded = self.minded[spec.name] = Minded(spec)
        try:
            is_running = await self._spawn(minded)
        except OSError as error:
            self._fail(minded, Failure(spec.name, refused=True, reason=f"cannot be run: {error}"))
            return
        if is_running:
            minded.task = asyncio.create_task(self._mind(minded))
            minded.task.add_done_callback(partial(self._take_end, minded))

    async def failed(self) -> Failure:
        """Wait for the first child that cannot be kept running."""
        return await asyncio.shield(self._failure)

    @property
    def failure(self) -> Failure | None:
        """The first child that cannot be kept running, or None; see :meth:`failed` to wait for it."""
        return self._failure.result() if self._failure.done() else None

    async def restart(self, name: str) -> None:
        """Stop a running child; it is started again as after any death. Do nothing if it does not run."""
        minded = self.minded[name]
        if minded.state == "running" and minded.child is not None:
            await minded.child.stop(self._grace_s)

    async def _spawn(self, minded: Minded) -> bool:
        """Start its process; return False where it is to stop by now. Raises OSError."""
        minded.phase = None
        child = await Child.spawn(minded.spec, partial(self._take_phase, minded))
        if minded.state in ("stopping", "stopped"):
            # stop() came while the process was being created.
            await child.stop(self._grace_s)
            return False
        minded.child, minded.started = child, start_time(child.pid)
        minded.state = advance(minded.state, "started")
        log.info("child_started", child=minded.spec.name, pid=child.pid, restarts=minded.restarts)
        self._on_change()
        return True

    def _take_phase(self, minded: Minded, phase: Phase) -> None:
        minded.phase = phase
        self._on_phase(minded.spec.name, phase)

    async def _mind(self, minded: Minded) -> None:
        """Wait for deaths and act on the policy's verdict, until the child is stopped or has failed."""
        while minded.child is not None:
            exit_code = await minded.child.wait()
            # The call that stopped it waits for its end, too, and may have gone on first.
            if minded.state in ("stopping", "stopped"):
                return
            # A dead worker must not leave helper processes behind, which hold its memory.
            minded.child.kill_group()
            self._on_death(Death(minded.spec.name, minded.child.pid, exit_code))
            if not await self._start_again(minded, exit_code):
                return

    async def _start_again(self, minded: Minded, exit_code: int) -> bool:
        """Start a dead child after the policy's delay; return False where it has failed or is to stop.

        It ran before, so a start that the system refuses, such as one without memory for a process or in the middle of
        an upgrade of the program, may succeed later: it counts as another death.
        """
        name = minded.spec.name
        why_not = ""
        while True:
            now = time.monotonic()
            verdict = self.policy.judge(minded.deaths, now, exit_code, minded.spec.refusal_code)
            minded.deaths = (*self.policy.recent(minded.deaths, now), now)
            if isinstance(verdict, Refused):
                self._fail(minded, Failure(name, refused=True, reason="it refused to start"))
                return False
            if isinstance(verdict, GiveUp):
                self._fail(minded, Failure(name, refused=False, reason=verdict.reason + why_not))
                return False
            if minded.state == "running":
                minded.state = advance(minded.state, "died")
            log.warning("child_died", child=name, exit_code=exit_code, restart_in_s=verdict.delay_s)
            self._on_change()
            await asyncio.sleep(verdict.delay_s)
            minded.restarts += 1
            try:
                return await self._spawn(minded)
            except OSError as error:
                log.warning("child_not_started", child=name, reason=str(error))
                exit_code, why_not = EXIT_FAILED, f", at last because it cannot be run: {error}"

    def _take_end(self, minded: Minded, task: asyncio.Task[None]) -> None:
        """Report a child that is no longer minded because of an error of ours: its next death would go unseen."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("child_not_minded", child=minded.spec.name, exc_info=error)
        if minded.state not in ("stopping", "stopped") and not self._failure.done():
            reason = f"it is not supervised any more: {error!r}"
            self._failure.set_result(Failure(minded.spec.name, refused=False, reason=reason))

    def _fail(self, minded: Minded, failure: Failure) -> None:
        minded.state = advance(minded.state, "gave_up")
        # The operator gets the reason of a refusal in a line of its own.
        say = log.info if failure.refused else log.error
        say("child_failed", child=failure.name, refused=failure.refused, reason=failure.reason)
        if not self._failure.done():
            self._failure.set_result(failure)
        self._on_change()

    async def stop(self) -> None:
        """Stop all children, one stage after another; return when none is left."""
        for minded in self.minded.values():
            minded.state = advance(minded.state, "stop")
            if minded.state == "stopped" and minded.task is not None:
                minded.task.cancel()  # It was waiting to restart its child.
        stages = sorted(self.minded.values(), key=lambda minded: minded.spec.stage)
        for _, stage in groupby(stages, key=lambda minded: minded.spec.stage):
            await asyncio.gather(*(self._stop_one(minded) for minded in stage))
        tasks = [minded.task for minded in self.minded.values() if minded.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._on_change()

    async def _stop_one(self, minded: Minded) -> None:
        if minded.state != "stopping" or minded.child is None:
            return
        in_time = await minded.child.stop(self._grace_s)
        minded.state = advance(minded.state, "died")
        if not in_time:
            log.warning("child_killed", child=minded.spec.name, grace_s=self._grace_s)

    def hurry(self) -> None:
        """Kill all children at once, for an impatient operator; a :meth:`stop` in progress then ends."""
        for minded in self.minded.values():
            if minded.child is not None and not minded.child.has_ended:
                minded.child.kill_group()
