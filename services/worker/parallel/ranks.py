"""The processes of ranks 1 and up, as rank 0 handles them: started, sent orders, watched and ended together.

When one of them ends unasked, the others are killed at once: a collective that waits for a dead rank would otherwise
wait for its timeout, and on a GPU it cannot be cancelled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from services.worker.parallel.channel import Channel
from services.worker.parallel.group_lost import GroupLost
from services.worker.parallel.orders import (
    RankAnswer,
    RankFailed,
    RankLoaded,
    RankMeasured,
    RankProven,
    RankReady,
    StartRank,
    StopRank,
)
from shared import logs
from shared.errors import CodecError, InternalError, OperatorError, TransportError

_log = logs.get_logger("worker")

Answer = TypeVar("Answer", RankLoaded, RankMeasured, RankProven, RankReady)

START_TIMEOUT_S = 1800.0
"""Longest wait for a rank that loads: reading hundreds of gigabytes from a slow disk takes long."""

STOP_TIMEOUT_S = 5.0
REASON_TIMEOUT_S = 2.0
"""Longest wait for the reason that an ended rank may have reported."""


class RankProcess(Protocol):
    """The process of a rank, as far as rank 0 uses it; see ``subprocess.Popen``."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code. Raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """Kill it, if it has not ended."""


Launch = Callable[[StartRank, socket.socket], RankProcess]
"""Starts the process of a rank, which gets its orders on this socket."""


@dataclass(frozen=True, slots=True)
class _Member:
    rank: int
    process: RankProcess
    channel: Channel


def launch_process(start: StartRank, orders: socket.socket) -> RankProcess:
    """Start the rank in a Python process of its own, and return the process."""
    # Thread pools read this before any order comes.
    threads = {"OMP_NUM_THREADS": str(start.threads)} if start.threads else {}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "services.worker.parallel", str(orders.fileno())],
        pass_fds=(orders.fileno(),),
        stdin=subprocess.DEVNULL,
        env=dict(os.environ) | threads,
    )


class Ranks:
    """The processes of the other ranks. One thread at a time sends orders."""

    def __init__(self, starts: Sequence[StartRank], *, timeout_s: float, launch: Launch = launch_process) -> None:
        """Start a process for each of ``starts`` and send it that order.

        ``timeout_s`` bounds every later wait for a rank to take an order.
        """
        self._lock = threading.Lock()
        self._lost: GroupLost | None = None
        self._on_lost: Callable[[GroupLost], object] | None = None
        self._closing = False
        self._members: list[_Member] = []
        self._watchers: list[threading.Thread] = []
        try:
            for start in starts:
                self._members.append(_spawn(start, timeout_s, launch))
            for member in self._members:
                watcher = threading.Thread(target=self._watch, args=(member,), name="watch-rank", daemon=True)
                watcher.start()
                self._watchers.append(watcher)
            for member, start in zip(self._members, starts, strict=True):
                member.channel.send(start)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {member.rank: member.process.pid for member in self._members}

    @property
    def lost(self) -> GroupLost | None:
        """Why the group cannot compute any more, or None."""
        return self._lost

    def on_lost(self, callback: Callable[[GroupLost], object]) -> None:
        """Call ``callback`` once, on any thread; at once if the group is lost already."""
        with self._lock:
            self._on_lost = callback
            lost = self._lost
        if lost is not None:
            callback(lost)

    def tell(self, order: msgspec.Struct) -> None:
        """Send ``order`` to every rank. Raises GroupLost."""
        if self._lost is not None:
            raise self._lost
        for member in self._members:
            try:
                member.channel.send(order)
            except TransportError as error:
                raise self.lose(f"rank {member.rank}: {error.message}") from error

    def collect(self, kind: type[Answer]) -> list[Answer]:
        """Return the next answer of every rank, in order. Raises OperatorError or InternalError with its reason."""
        return [self._answer(member, kind) for member in self._members]

    def reason(self) -> Exception | None:
        """Return a rank's report of its own end, if any. Only for a failed start: ranks send nothing else."""
        for member in self._members:
            try:
                answer = member.channel.receive(REASON_TIMEOUT_S)
            except (TransportError, CodecError):
                continue
            if isinstance(answer, RankFailed):
                return _failure(member.rank, answer)
        return None

    def lose(self, reason: str) -> GroupLost:
        """Declare the group lost, kill its ranks and call the callback; return the first such error."""
        with self._lock:
            first = self._lost is None
            self._lost = self._lost or GroupLost(reason)
            lost, callback = self._lost, self._on_lost
        if first:
            _log.error("group_lost", reason=reason)
            self._kill()
            if callback is not None:
                callback(lost)
        return lost

    def close(self) -> None:
        """Stop all ranks, and kill those that do not; idempotent."""
        with self._lock:
            self._closing = True
        for member in self._members:
            member.channel.timeout_s = STOP_TIMEOUT_S
            with contextlib.suppress(TransportError):  # It has ended, or is killed below.
                member.channel.send(StopRank())
        for member in self._members:
            try:
                member.process.wait(STOP_TIMEOUT_S if self._lost is None else 0)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        for watcher in self._watchers:
            watcher.join()
        for member in self._members:
            member.channel.close()

    def _answer(self, member: _Member, kind: type[Any]) -> Any:
        try:
            answer = member.channel.receive(START_TIMEOUT_S)
        except (TransportError, CodecError) as error:
            code = self._exit_code(member)
            ended = f"it ended with exit code {code}" if code is not None else error.message
            # It may have been killed because of another, which has reported why.
            raise self.reason() or InternalError(f"rank {member.rank} did not start: {ended}") from error
        if isinstance(answer, RankFailed):
            raise _failure(member.rank, answer)
        if not isinstance(answer, kind):
            raise InternalError(f"rank {member.rank} answered {type(answer).__name__} in the place of {kind.__name__}")
        return answer

    def _exit_code(self, member: _Member) -> int | None:
        try:
            return member.process.wait(REASON_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def _watch(self, member: _Member) -> None:
        code = member.process.wait()
        with self._lock:
            expected = self._closing
        if not expected:
            self.lose(f"rank {member.rank} ended with exit code {code}")

    def _kill(self) -> None:
        for member in self._members:
            member.process.kill()


def _spawn(start: StartRank, timeout_s: float, launch: Launch) -> _Member:
    ours, theirs = socket.socketpair()
    with theirs:
        process = launch(start, theirs)
    return _Member(start.rank, process, Channel(ours, RankAnswer, timeout_s=timeout_s))


def _failure(rank: int, answer: RankFailed) -> Exception:
    kind = OperatorError if answer.is_refusal else InternalError
    return kind(f"rank {rank}: {answer.reason}")
