"""Reading ahead: the important tokens of layer l are read for layer l + 1 while layer l computes (HyperInfer IV-C).

Adjacent layers look at similar tokens, so what layer l chose is a guess at what layer l + 1 will choose. The guess
costs nothing on the critical path; what it missed is read on demand once layer l + 1 has chosen, and what it guessed
wrongly was read for nothing. Whether that pays is for :mod:`speculation_control` to say.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from services.worker.importance.prefix_source import LayerKv
from shared.errors import ThermoclineError


@dataclass(frozen=True, slots=True)
class LayerOutcome:
    """One layer of one request. Bytes are of K and V that the layer attended over; probe keys are not among them.

    ``speculated_bytes`` were read ahead, ``hit_bytes`` of them were needed. ``keys_s`` went into keys for choosing,
    ``wait_s`` into waiting for what was being read ahead, ``on_demand_s`` into what it had missed: all three while
    nothing computed. ``ahead_s`` is the time that reading ahead took beside the computation, 0 if it never arrived.
    """

    layer: int
    needed_bytes: int
    speculated_bytes: int
    hit_bytes: int
    on_demand_bytes: int
    keys_s: float
    wait_s: float
    on_demand_s: float
    ahead_s: float

    @property
    def recall(self) -> float:
        """The share of what was needed that had been read ahead; 1 if nothing was."""
        return self.hit_bytes / self.needed_bytes if self.needed_bytes else 1.0

    @property
    def precision(self) -> float:
        """The share of what was read ahead that was needed; 1 if nothing was read ahead."""
        return self.hit_bytes / self.speculated_bytes if self.speculated_bytes else 1.0

    @property
    def wasted_bytes(self) -> int:
        return self.speculated_bytes - self.hit_bytes

    @property
    def stall_s(self) -> float:
        return self.keys_s + self.wait_s + self.on_demand_s


@dataclass(frozen=True, slots=True)
class Landed:
    """What was read ahead: kv ``[2, kv_heads, n, head_dim]`` of tokens int64 ``[n]``, ascending, n > 0."""

    tokens: torch.Tensor
    kv: torch.Tensor
    seconds: float

    def find(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of ``tokens`` int64 ``[k]`` are here, bool ``[k]``, and the columns of those, int64."""
        columns = torch.searchsorted(self.tokens, tokens).clamp_max(len(self.tokens) - 1)
        is_here = self.tokens[columns] == tokens
        return is_here, columns[is_here]


class Flight:
    """One read ahead, under way or landed."""

    def __init__(self, layer: int, tokens: torch.Tensor, nbytes: int, future: Future[Landed]) -> None:
        self.layer, self.tokens, self.nbytes = layer, tokens, nbytes
        self._future = future

    def land(self, deadline_s: float) -> Landed | None:
        """Return what was read, or None if it failed or takes longer than ``deadline_s``: the layer reads on demand
        then.

        A failed read is not reported here, because the same read on demand fails again if it is worth reporting.
        """
        try:
            return self._future.result(deadline_s)
        except (TimeoutError, ThermoclineError, OSError):
            return None

    def ends_within(self, deadline_s: float) -> bool:
        """Wait until the source is no longer read, by success or failure, and say whether that came to pass."""
        return not wait([self._future], deadline_s).not_done


READS = 8
"""Reads under way or waiting: about as many requests as one step speculates for. The rest would come too late."""


class ReadAhead:
    """One thread that reads one thing after another. Its maker closes it."""

    def __init__(self, *, reads: int = READS, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._reads = clock, reads
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._begun: deque[Future[Landed]] = deque()

    def start(self, source: LayerKv, layer: int, tokens: torch.Tensor, nbytes: int) -> Flight | None:
        """Begin to read ``tokens`` of ``layer``; None while as many reads as are allowed have not ended."""
        while self._begun and self._begun[0].done():  # They end in the order in which they began.
            self._begun.popleft()
        if len(self._begun) >= self._reads:
            return None
        self._begun.append(self._threads.submit(self._read, source, layer, tokens))
        return Flight(layer, tokens, nbytes, self._begun[-1])

    def close(self) -> None:
        """Wait for the read that is under way, and end the thread. What has not begun by then never does."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, source: LayerKv, layer: int, tokens: torch.Tensor) -> Landed:
        began = self._clock()
        kv = source.gather(layer, tokens)
        return Landed(tokens, kv, self._clock() - began)
