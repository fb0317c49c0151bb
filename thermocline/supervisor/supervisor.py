"""The loop that keeps a set of children running and stops them in order. It knows nothing of what they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from shared import logs
from shared.progress import Phase
from thermocline.supervisor.child import Child, ChildSpec
from thermocline.supervisor.lifecycle import State, advance
from thermocline.supervisor.process_identity import start_time
from thermocline.supervisor.restarts import GiveUp, Refused, RestartPolicy

log = logs.get_logger("supervisor")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the supervisor cannot go on. ``refused`` children would refuse again; others kept dying."""

    name: str
    refused: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Death:
    """A process ended that the supervisor was not asked to stop; ``exit_code`` is negative for a signal."""

    name: str
    pid: int
    exit_code: int


@dataclass(slots=True)
class Minded:
    """One child as the supervisor sees it: its state, its present process and its recent deaths."""

    spec: ChildSpec
    state: State = "waiting"
    child: Child | None = None
    started: int = 0  # Start time of the present process, see process_identity.
    deaths: tuple[float, ...] = ()
    restarts: int = 0
    phase: Phase | None = None  # What the present process was last busy with, until it was ready.
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    """Starts children, restarts what dies, and reports the first failure that restarts cannot cure."""

    def __init__(
        self,
        policy: RestartPolicy | None = None,
        *,
        grace_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
        on_death: Callable[[Death], None] = lambda death: None,
        on_phase: Callable[[str, Phase], None] = lambda name, phase: None,
    ) -> None:
        self.minded: dict[str, Minded] = {}
        self.policy = policy or RestartPolicy()  # May be replaced at any time; the next death is judged by it.
        self._grace_s = grace_s
        self._now = now
        self._on_change = on_change
        self._on_death = on_death
        self._on_phase = on_phase
        self._failure: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()

    async def start(self, spec: ChildSpec) -> None:
        """Start ``spec`` and mind it until :meth:`stop`. Returns once the process exists."""
        minded = self.minded[spec.name] = Minded(spec)
        if await self._spawn(minded):
            minded.task = asyncio.create_task(self._mind(minded))

    async def failed(self) -> Failure:
        """Wait for the first child that cannot be kept running."""
        return await asyncio.shield(self._failure)

    @property
    def failure(self) -> Failure | None:
        return self._failure.result() if self._failure.done() else None

    async def _spawn(self, minded: Minded) -> bool:
        try:
            minded.phase = None
            child = await Child.spawn(minded.spec, partial(self._take_phase, minded))
        except OSError as error:
            self._fail(minded, Failure(minded.spec.name, refused=True, reason=f"cannot be run: {error}"))
            return False
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
        """Wait for deaths and act on the policy's verdict, until stopped or beyond help."""
        name = minded.spec.name
        while minded.child is not None:
            exit_code = await minded.child.wait()
            if minded.state == "stopping":
                return
            # A dead worker must not leave helpers behind that hold its memory.
            minded.child.kill_group()
            self._on_death(Death(name, minded.child.pid, exit_code))
            now = self._now()
            verdict = self.policy.judge(minded.deaths, now, exit_code, minded.spec.refusal_code)
            minded.deaths = (*self.policy.recent(minded.deaths, now), now)
            if isinstance(verdict, Refused):
                self._fail(minded, Failure(name, refused=True, reason="it refused to start"))
                return
            if isinstance(verdict, GiveUp):
                self._fail(minded, Failure(name, refused=False, reason=verdict.reason))
                return
            minded.state = advance(minded.state, "died")
            log.warning("child_died", child=name, exit_code=exit_code, restart_in_s=verdict.delay_s)
            self._on_change()
            await asyncio.sleep(verdict.delay_s)
            minded.restarts += 1
            if not await self._spawn(minded):
                return

    def _fail(self, minded: Minded, failure: Failure) -> None:
        minded.state = advance(minded.state, "gave_up")
        # Why a child refused is said to the operator in a line of its own.
        say = log.info if failure.refused else log.error
        say("child_failed", child=failure.name, refused=failure.refused, reason=failure.reason)
        if not self._failure.done():
            self._failure.set_result(failure)
        self._on_change()

    async def stop(self) -> None:
        """Stop every child, one stage after another; returns when none is left."""
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
        """SIGKILL everything now, for an operator who does not want to wait; :meth:`stop` then ends at once."""
        for minded in self.minded.values():
            if minded.child is not None and not minded.child.has_ended:
                minded.child.kill_group()
