"""A device as late as CUDA allows: what was launched happens when somebody waits for it, and not before.

Streams and events order work as CUDA's do. On it run a model and a mover whose pools lie in shared memory, so that
other processes' code can look at the bytes between a report and the next synchronization.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.sample_row import SampleRow
from services.worker.engine.sampler import choose_unread
from services.worker.engine.unread_tokens import Following, UnreadTokens
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.movers.protocol import Known
from services.worker.kv.page_memory import PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from tests.unit.worker.fake_model import GEOMETRY, FakeRunner


class LateStream:
    """Launches in order. ``on_work`` is called for each piece of work that the device does."""

    def __init__(self, on_work: Callable[[], object] = lambda: None) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self._launched = self._done = 0
        self._on_work = on_work

    def launch(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self._launched += 1

    def record(self) -> LateEvent:
        """The point behind everything launched so far."""
        return LateEvent(self, self._launched)

    def wait(self, event: LateEvent) -> None:
        """What is launched from now on happens behind ``event``."""
        self.launch(event.synchronize)

    def synchronize(self) -> None:
        self.reach(self._launched)

    def reach(self, count: int) -> None:
        """Do everything up to the ``count``-th launch."""
        while self._done < count:
            self._done += 1
            self._queue.popleft()()
            self._on_work()


@dataclass(frozen=True)
class LateEvent:
    """As ``torch.cuda.Event``."""

    stream: LateStream
    count: int

    def synchronize(self) -> None:
        self.stream.reach(self.count)


class LateRunner(FakeRunner):
    """The fake model on such a device. Who reads logits waits for its stream, as copying them to the host does; a step
    that has none of them is launched and left.
    """

    def __init__(self, pages: int = 64, on_work: Callable[[], object] = lambda: None, *, is_ahead: bool = True) -> None:
        """``is_ahead``: steps may be launched before the tokens of the step before are read."""
        super().__init__(pages)
        self.stream = LateStream(on_work)
        self.launcher = self if is_ahead else None

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        for layer in range(GEOMETRY.layers):
            self.stream.launch(partial(self._write, layer, ids, positions, meta))
            if meta.gate is not None:
                meta.gate.wait(layer)
        self.steps.append([(segment.context, segment.rows) for segment in meta.segments])
        if len(last_rows):
            self.stream.synchronize()
        return self.logits(meta, last_rows)

    def launch(
        self, ids: torch.Tensor | Following, positions: torch.Tensor, meta: ForwardMeta, rows: Sequence[SampleRow]
    ) -> UnreadTokens:
        """As ``ModelRunner.launch``: nothing has happened when it returns, and tokens are there when they are read."""
        chosen, host = (torch.full((2, len(rows)), -1, dtype=torch.int64) for _ in "12")

        def write(layer: int) -> None:
            self._write(layer, ids.ids() if isinstance(ids, Following) else ids, positions, meta)

        for layer in range(GEOMETRY.layers):
            self.stream.launch(partial(write, layer))
        self.steps.append([(segment.context, segment.rows) for segment in meta.segments])
        self.stream.launch(lambda: chosen.copy_(choose_unread(self.logits(meta, torch.arange(len(rows))), rows)))
        self.stream.launch(lambda: host.copy_(chosen))
        return UnreadTokens(chosen, host, self.stream.record())

    def settle(self) -> None:
        self.stream.record().synchronize()

    def _write(self, layer: int, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta) -> None:
        self.pool.k(layer).view(-1, GEOMETRY.head_dim)[meta.slots] = ids.float()[:, None]
        self.pool.v(layer).view(-1, GEOMETRY.head_dim)[meta.slots] = positions.float()[:, None]


class LateMover(BatchedMover):
    """Copies on a stream of their own. What is checked was staged and is checked when it is launched."""

    def __init__(self, pool: DevicePool) -> None:
        super().__init__(pool, native=False)
        self.stream = LateStream()

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Known:
        wrong = np.zeros(len(pages), dtype=bool)
        if checks is None:
            self.stream.launch(lambda: self._copy(source.host_rows()[pages][:, layers], layers, device_pages))
            return Known(wrong)
        staged = source.host_rows()[pages][:, layers].copy()
        for row in range(len(pages)):
            for at in range(len(layers)):
                wrong[row] |= not checks.holds(staged[row, at].reshape(-1), row, at)
        self.stream.launch(lambda: self._copy(staged[~wrong], layers, device_pages[~wrong]))
        return Known(wrong)

    def fence(self) -> Any:
        return self.stream.record()

    def drain(self) -> None:
        self.stream.synchronize()

    def _copy(self, rows: np.ndarray, layers: range, device_pages: PageNumbers) -> None:
        into = self._memory.host_rows()
        for at, layer in enumerate(layers):
            into[device_pages, layer] = rows[:, at]
