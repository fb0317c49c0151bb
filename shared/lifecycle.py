"""The life of a process: start, announce readiness, beat, stop on SIGTERM or SIGINT, clean up, exit code.

A service's ``__main__`` calls :func:`run_process` with its bootstrap; everything with a clock or a signal
lives here, so that shells can be driven by tests with a :class:`Lifecycle` of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.errors import OperatorError, Unavailable
from shared.messages.status import Heartbeat, Kind

EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2

HEARTBEAT_S = 1.0


class Lifecycle:
    """``stopping`` is set once, by a signal or by the service itself; ``hurrying`` by a second signal."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.hurrying = asyncio.Event()
        self.exit_code = EXIT_OK

    def stop(self, exit_code: int = EXIT_OK) -> None:
        """Ask the process to end; the first exit code that is not 0 wins."""
        self.exit_code = self.exit_code or exit_code
        self.stopping.set()

    def signalled(self) -> None:
        """SIGTERM or SIGINT came. Who sends another does not want to wait for what can be left undone."""
        if self.stopping.is_set():
            self.hurrying.set()
        self.stop()

    async def watch(self, *tasks: asyncio.Task[None]) -> None:
        """Wait until stopping, or until one of ``tasks`` ends; its exception is raised here."""
        stopper = asyncio.create_task(self.stopping.wait())
        try:
            done, _ = await asyncio.wait({stopper, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopper}:
                task.result()
        finally:
            stopper.cancel()


async def beat(
    bus: Bus,
    kind: Kind,
    process_id: str,
    incarnation: str,
    last_plan: Callable[[], int] = lambda: 0,
    owned_bytes: Callable[[], dict[str, int]] = dict,
) -> None:
    """Publish a heartbeat every second until cancelled; a lost connection is no reason to stop."""
    while True:
        heartbeat = Heartbeat(
            kind=kind, id=process_id, incarnation=incarnation, last_plan=last_plan(), owned_bytes=owned_bytes()
        )
        try:
            await bus.publish(subjects.heartbeat(kind, process_id), encode(heartbeat))
        except Unavailable:
            pass  # The bus reconnects by itself; missing beats are how others learn of it.
        await asyncio.sleep(HEARTBEAT_S)


def die_with_parent() -> None:
    """Linux: get SIGTERM when the parent dies, so that a killed supervisor leaves no orphans."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


def quiet_collector() -> None:
    """Keep Python's cyclic collector out of requests: what was imported lives for ever and is not looked at again,
    and young objects, nearly all of which die by reference count, are looked at less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def run_process(service: str, main: Callable[[Lifecycle], Awaitable[None]]) -> int:
    """Run ``main`` under uvloop until it returns. Returns the exit code.

    Exit codes: 0 stopped as asked, 1 failed (a supervisor restarts it), 2 refused to start (it does not).
    """
    log = logs.get_logger(service)
    if os.environ.get("THERMOCLINE_SUPERVISED"):
        die_with_parent()

    async def body() -> int:
        quiet_collector()
        life = Lifecycle()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, life.signalled)
        await main(life)
        return life.exit_code

    try:
        exit_code: int = uvloop.run(body())
        return exit_code
    except OperatorError as error:
        log.error("refused_to_start", code=error.code, reason=error.message)
        return EXIT_REFUSED
    except Exception:
        log.exception("process_failed")
        return EXIT_FAILED
