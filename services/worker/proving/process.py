"""The process that proves, as its worker handles it: started, sent orders, killed and restarted when silent."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from typing import Any

from services.worker.parallel.channel import Channel, ChannelClosed
from services.worker.proving.exchange import ProvingAnswer, ProvingReady, StartProving, TryWay, WayTried
from services.worker.proving.part import Part, Way
from services.worker.proving.table import Attempt, ServedShape
from shared import logs
from shared.errors import CodecError, TransportError

_log = logs.get_logger("worker.proving")

START_SECONDS = 120.0
"""Longest wait for the process to import torch and to make a context."""

SEND_SECONDS = 10.0
END_SECONDS = 10.0
"""Longest wait for a process whose socket has closed, as a crash closes it, and for one that is killed: one that waits
for its driver may not end; then it is left behind.
"""


class ProvingProcess:
    """The :class:`~services.worker.proving.choosing.Trier` of a worker. One thread uses it, and closes it."""

    def __init__(self, parts: str, shape: ServedShape) -> None:
        """``parts`` is the list of parts, as ``module:name``. A process is started when a way is tried."""
        self._start = StartProving(parts=parts, shape=shape)
        self._running: tuple[subprocess.Popen[bytes], Channel] | None = None
        self._cannot_start = ""
        self.device_name = ""
        self.starts = 0

    def attempt(self, part: Part, way: Way, limit_s: float) -> Attempt:
        """Try a way in the process; if that ends, or does not answer in time, it is the way's fault."""
        try:
            channel = self._channel()
        except TransportError as error:
            return Attempt(way=way.name, fault=error.message)
        try:
            channel.send(TryWay(part=part.name, way=way.name))
            answer = channel.receive(limit_s)
        except ChannelClosed:
            return Attempt(way=way.name, fault=f"the process that tried it ended {self._end(END_SECONDS)}")
        except TransportError:
            self._end()
            return Attempt(way=way.name, fault=f"no answer within {limit_s:.0f} s", seconds=limit_s)
        except CodecError as error:
            self._end()
            return Attempt(way=way.name, fault=error.message)
        if not isinstance(answer, WayTried):
            self._end()
            return Attempt(way=way.name, fault=f"the process that tried it answered {type(answer).__name__}")
        if answer.is_broken:
            self._end()
        return answer.attempt

    def close(self) -> None:
        """End the process, if there is one; idempotent."""
        if self._running is not None:
            self._end()

    def _channel(self) -> Channel:
        """Return the channel to the process, which is started where there is none.

        Raises TransportError where it does not start, and then at every later call.
        """
        if self._cannot_start:
            raise TransportError(self._cannot_start)
        if self._running is None:
            self._running = _spawn()
            self.starts += 1
            channel = self._running[1]
            try:
                channel.send(self._start)
                answer: Any = channel.receive(START_SECONDS)
                if isinstance(answer, WayTried):
                    raise TransportError(answer.attempt.fault)
                self.device_name = answer.device if isinstance(answer, ProvingReady) else ""
            except (TransportError, CodecError) as error:
                has_closed = isinstance(error, ChannelClosed)
                how = self._end(END_SECONDS if has_closed else 0.0)
                told = f"the process ended {how}" if has_closed else error.message
                self._cannot_start = f"no process can prove anything: {told}"
                raise TransportError(self._cannot_start) from error
        return self._running[1]

    def _end(self, wait_s: float = 0.0) -> str:
        """Kill the process unless it ends by itself within ``wait_s``; return how it ended."""
        assert self._running is not None
        process, channel = self._running
        self._running = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        ended = process.poll()
        process.kill()
        channel.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            _log.warning("proving_process_left", pid=process.pid, advice="the driver does not let it end")
        return _told(ended)


def _told(code: int | None) -> str:
    if code is None:
        return "by being killed"
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by signal {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _spawn() -> tuple[subprocess.Popen[bytes], Channel]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.worker.proving.child", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # Compilers' output goes to the log: the worker's own output may be read by a program.
        )
    return process, Channel(ours, ProvingAnswer, timeout_s=SEND_SECONDS)
