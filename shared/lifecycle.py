"""The life of a process: start, announce readiness, send heartbeats, stop on SIGTERM or SIGINT, clean up, exit code.

A service's ``__main__`` calls :func:`run_service` or :func:`run_process`; everything with a clock or a signal
lives here, so that shells can be driven by tests with a :class:`Lifecycle` of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import uvloop

from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.degradations import bounded
from shared.errors import OperatorError, Unavailable
from shared.messages.status import Degradation, Heartbeat, Kind

EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2

HEARTBEAT_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
# Looked up here: in a child between fork and exec only the system call is safe.
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


class Stopping(Exception):
    """The process is to end, and its present work is given up."""


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None:
        """Release what the object holds."""


def _close(value: object) -> None:
    if isinstance(value, _Closable):
        value.close()


class Lifecycle:
    """The end of a process: ``stopping`` is set once, by a signal or the service; ``hurrying`` by a second signal.

    ``has_given_up``: a thread still works on a part that :meth:`in_thread`, or a service, has not waited for.
    """

    def __init__(self) -> None:
        """Begin with neither event set, and exit code 0."""
        self.stopping = asyncio.Event()
        self.hurrying = asyncio.Event()
        self.exit_code = EXIT_OK
        self.has_given_up = False
        self._parts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._starter: threading.Thread | None = None

    def stop(self, exit_code: int = EXIT_OK) -> None:
        """Ask the process to end; the first exit code that is not 0 is kept."""
        self.exit_code = self.exit_code or exit_code
        self.stopping.set()

    def signalled(self) -> None:
        """Handle SIGTERM or SIGINT; a second one asks to leave undone what can be."""
        if self.stopping.is_set():
            self.hurrying.set()
        self.stop()

    async def in_thread(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run a part of the start, such as loading a model, in the one thread for them; return its result.

        Raises Stopping as soon as the process is to end, whatever the thread is in the middle of: it ends with the
        process, whose memory the kernel takes back. So the part must not leave anything that the next start would
        not clear away; if it ends after all, its result is closed. The thread lives as long as the process, because
        the kernel takes the end of the thread that started a child for the end of the child's parent
        (``die_with_parent``).
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(done: Callable[[], None], too_late: Callable[[], None]) -> None:
            try:
                loop.call_soon_threadsafe(lambda: too_late() if result.done() else done())
            except RuntimeError:  # The loop has ended.
                too_late()

        def body() -> None:
            try:
                value = work(*arguments, **named)
            except BaseException as error:
                failure = error
                settle(lambda: result.set_exception(failure), lambda: None)
            else:
                settle(lambda: result.set_result(value), lambda: _close(value))

        if self._starter is None:
            self._starter = threading.Thread(target=self._do_parts, name="start", daemon=True)
            self._starter.start()
        self._parts.put(body)
        stopper = asyncio.create_task(self.stopping.wait())
        ends: set[asyncio.Future[Any]] = {result, stopper}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise Stopping
            return result.result()
        finally:
            stopper.cancel()
            if not result.done():
                self.has_given_up = True
                result.cancel()

    def _do_parts(self) -> None:
        while True:
            self._parts.get()()

    async def watch(self, *tasks: asyncio.Task[None]) -> None:
        """Wait until stopping, or until one of ``tasks`` ends, whose exception is raised here."""
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
    degraded: Callable[[], Iterable[Degradation]] = tuple,
) -> None:
    """Publish a heartbeat every second until cancelled, also while the connection is lost."""
    while True:
        heartbeat = Heartbeat(
            kind=kind,
            id=process_id,
            incarnation=incarnation,
            last_plan=last_plan(),
            owned_bytes=owned_bytes(),
            degraded=bounded(degraded()),
        )
        try:
            await bus.beat(subjects.heartbeat(kind, process_id), encode(heartbeat))
        except Unavailable:
            pass  # The bus reconnects by itself; others learn of it by missing beats.
        await asyncio.sleep(HEARTBEAT_S)


def die_with_parent(parent: int | None = None) -> None:
    """Have Linux send SIGTERM when the parent dies, so that a killed supervisor leaves no orphans.

    A parent that died before this call causes no signal: given its pid, the process exits at once in that case. The
    setting survives exec, so as a ``preexec_fn`` this works for programs that are not ours.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(EXIT_FAILED)


@contextmanager
def importing() -> Iterator[None]:
    """Switch Python's collector off for imports of torch and of modules that use it.

    It would scan again and again through permanent objects: a sixth of the time that a worker's imports take.
    """
    gc.disable()
    try:
        yield
        quiet_collector()
    finally:
        gc.enable()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C end the process by the signal itself.

    There is nothing to clean up yet, and KeyboardInterrupt in the middle of an import can surface as any other error.
    """
    earlier = signal.getsignal(signal.SIGINT)
    if earlier is not signal.SIG_IGN:  # A shell has it ignored for jobs in the background.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def quiet_collector() -> None:
    """Keep Python's cyclic collector out of requests.

    Imported objects are permanent and are not scanned again, and young objects, which nearly all die by reference
    count, are scanned less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def run_process(
    service: str, main: Callable[[Lifecycle], Awaitable[None]], prepare: Callable[[], None] = lambda: None
) -> int:
    """Run ``prepare``, then ``main`` under uvloop until it returns; return the exit code.

    ``prepare`` checks settings and does slow imports; a signal ends the process at once meanwhile.
    Exit codes: 0 stopped as asked, 1 failed (a supervisor restarts it), 2 refused to start (it does not).
    """
    log = logs.get_logger(service)

    async def body() -> int:
        quiet_collector()
        life = Lifecycle()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, life.signalled)
        try:
            await main(life)
        except Stopping:
            log.info("start_given_up")
        if life.has_given_up:
            # Its threads would keep the interpreter from ending, or be ended in the middle of native code.
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # A log may be on a full disk.
                    stream.flush()
            os._exit(life.exit_code)
        return life.exit_code

    try:
        with _ended_by_signals():
            prepare()
        exit_code: int = uvloop.run(body())
        return exit_code
    except OperatorError as error:
        log.error("refused_to_start", code=error.code, reason=error.message)
        return EXIT_REFUSED
    except Unavailable as error:
        # The broker or another process is away; a traceback of this one explains nothing.
        log.error("process_failed", code=error.code, reason=error.message)
        return EXIT_FAILED
    except Exception:
        log.exception("process_failed")
        return EXIT_FAILED


def run_service(service: str, entry: str, settings: object) -> int:
    """Run the coroutine function ``entry`` (``module:function``) of settings and lifecycle; return the exit code.

    Its module is imported only now, so that ``--help`` and faulty settings do not wait for it. See :func:`run_process`.
    """
    module, _, function = entry.partition(":")

    def prepare() -> None:
        with importing():
            import_module(module)

    async def main(life: Lifecycle) -> None:
        await getattr(import_module(module), function)(settings, life)

    return run_process(service, main, prepare)
