"""One model type in a group of ranks: its tokens beside those of the library, over the same paged attention."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench.model_support.trial import (
    NEW_TOKENS,
    PAGE_SIZE,
    Outcome,
    PagedAnswers,
    answers_of,
    try_type,
)
from services.worker.parallel.channel import Channel
from services.worker.parallel.group_runner import load_group
from services.worker.parallel.orders import RankOrder, StartRank
from services.worker.parallel.rank import Rank

_TIMEOUT_MS = 120_000
_POLL_S = 0.02


def try_in_group(model_type: str, ranks: int, directory: Path, seed: int) -> Outcome:
    """:func:`~bench.model_support.trial.try_type` with ``ranks`` ranks."""
    return try_type(model_type, directory, seed, partial(group_answers, ranks))


def group_answers(ranks: int, path: Path, prompt: list[int], context: int = 0) -> PagedAnswers:
    """:func:`~bench.model_support.trial.paged_answers` by ``ranks`` ranks. Raises OperatorError with the reason when
    the model is refused.
    """
    pages = 3 * -(-(len(prompt) + NEW_TOKENS) // PAGE_SIZE)
    start = StartRank(
        rank=0,
        ranks=ranks,
        model_dir=str(path),
        dtype="float32",
        device="cpu",
        threads=1,
        page_size=PAGE_SIZE,
        shm_prefix=f"groupsupport{os.getpid()}",
        store_port=0,
        timeout_ms=_TIMEOUT_MS,
        max_context_tokens=context,
        log_level="critical",
    )
    group = load_group(start, device_kv_bytes=None, pages=pages, launch=launch_fork)
    try:
        tables = np.split(np.random.default_rng(0).permutation(pages).astype(np.int32), 3)
        return PagedAnswers(answers_of(group, prompt, tables), "")
    finally:
        group.close()


@dataclass
class _Forked:
    """A copy of this process, as :class:`~services.worker.parallel.ranks.RankProcess`."""

    pid: int
    code: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, timeout: float | None = None) -> int:
        """See the protocol."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._has_ended():
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_POLL_S)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """See the protocol."""
        if not self._has_ended():
            os.kill(self.pid, signal.SIGKILL)

    def _has_ended(self) -> bool:
        with self.lock:  # A status can be had once, and several threads wait.
            if self.code is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if ended else None
            return self.code is not None


def launch_fork(start: StartRank, orders: socket.socket) -> _Forked:
    """A rank in a copy of this process, which has the library imported already."""
    pid = os.fork()
    if pid:
        return _Forked(pid)
    code = 1
    try:
        code = Rank(Channel(orders, RankOrder, timeout_s=start.timeout_ms / 1e3)).run()
    finally:
        os._exit(code)
