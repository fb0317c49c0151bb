"""One child process: its start, its stop, and a guarantee that it does not outlive its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shared.lifecycle import die_with_parent
from shared.progress import VARIABLE, Phase
from thermocline.supervisor.phases import PhaseLines
from thermocline.supervisor.restarts import EXIT_REFUSED


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One program to run.

    ``stage`` orders the shutdown: stage 0 is stopped first. ``refusal_code`` is the program's exit code for a refusal
    to start, None if it has no such convention. Its environment is ``env`` over those of our variables that it
    ``inherits``.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    stage: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    inherits: Callable[[str], bool] = lambda variable: True
    refusal_code: int | None = EXIT_REFUSED
    tells_phases: bool = False  # It reports phases through the pipe of :mod:`shared.progress`.


async def _phase_pipe(on_phase: Callable[[Phase], None]) -> int:
    """Return the writing end of a pipe, which is read until the last process with this end has ended."""
    reader, writer = os.pipe()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: PhaseLines(on_phase), os.fdopen(reader, "rb", buffering=0))
    return writer


class Child:
    """A running process in a process group of its own, so that Ctrl-C reaches only the supervisor."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        """Wrap ``process``, the leader of a process group of its own; :meth:`spawn` starts one from ``spec``."""
        self.spec = spec
        self.pid = process.pid
        self._process = process

    @classmethod
    async def spawn(cls, spec: ChildSpec, on_phase: Callable[[Phase], None] = lambda phase: None) -> Child:
        """Start the program; its output goes to ``spec.log``, its phases to ``on_phase``.

        Raises OSError if the program cannot be run.
        """
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as output, contextlib.ExitStack() as ends:
            inherited = {name: value for name, value in os.environ.items() if spec.inherits(name)}
            env = {**inherited, **spec.env}
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
                preexec_fn=partial(die_with_parent, os.getpid()),
                process_group=0,
                pass_fds=passed,
            )
        return cls(spec, process)

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit code, negative for a signal."""
        return await self._process.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the exit code has been collected."""
        return self._process.returncode is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it still runs."""
        if not self.has_ended:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                pass  # It has just ended; wait() will return.

    def kill_group(self) -> None:
        """Send SIGKILL to its process group: the process and all that it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # Nothing is left in the group.

    async def stop(self, grace_s: float) -> bool:
        """Send SIGTERM, after ``grace_s`` SIGKILL; return whether it ended in time."""
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
