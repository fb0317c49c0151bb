"""One child process: how it is started, that it never outlives its supervisor, and how it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.progress import VARIABLE, Phase
from thermocline.supervisor.phases import PhaseLines
from thermocline.supervisor.restarts import EXIT_REFUSED

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run.

    ``stage`` orders the shutdown: stage 0 is stopped first. ``refusal_code`` is the exit code with which the
    program says that it refuses to start, or None if it has no such convention.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    stage: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    refusal_code: int | None = EXIT_REFUSED
    tells_phases: bool = False  # Through the pipe of :mod:`shared.progress`.


def die_with(parent_pid: int) -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that has the kernel send SIGTERM to the child when its parent dies (Linux; else None).

    The setting survives exec, so it works for programs that are not ours. The library is looked up here and
    not in the child, where nothing but the system call is safe.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)  # The parent died before the kernel knew about us.

    return bind


async def _phase_pipe(on_phase: Callable[[Phase], None]) -> int:
    """Return the writing end of a pipe. It is read until the last process that has this end is gone."""
    reader, writer = os.pipe()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: PhaseLines(on_phase), os.fdopen(reader, "rb", buffering=0))
    return writer


class Child:
    """A running process in a process group of its own, so that Ctrl-C reaches only the supervisor."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.pid = process.pid
        self._process = process

    @classmethod
    async def spawn(cls, spec: ChildSpec, on_phase: Callable[[Phase], None] = lambda phase: None) -> Child:
        """Start it; output goes to ``spec.log``, and what it is busy with to ``on_phase``.

        Raises OSError if the program cannot be run.
        """
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as output, contextlib.ExitStack() as ends:
            env = {**os.environ, **spec.env}
            passed: tuple[int, ...] = ()
            if spec.tells_phases:
                writer = await _phase_pipe(on_phase)
                ends.callback(os.close, writer)
                env[VARIABLE], passed = str(writer), (writer,)
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with(os.getpid()),
                process_group=0,
                pass_fds=passed,
            )
        return cls(spec, process)

    async def wait(self) -> int:
        """Return the exit code, once it ended; negative for a signal."""
        return await self._process.wait()

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def send(self, number: signal.Signals) -> None:
        """Signal the process if it still runs."""
        if not self.has_ended:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                pass  # It ended a moment ago; its waiter will learn that.

    def kill_group(self) -> None:
        """SIGKILL everything left in its process group: the process, and whatever it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # Nothing is left in the group.

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL after ``grace_s``. Returns whether it went by itself."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self.kill_group()
            await self.wait()
