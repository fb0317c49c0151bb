"""The receiver of cells' reports over NATS, which it passes to :class:`~services.gateway.router.cells.Cells`.

The broker may be away: without reports, a router goes by the requests that it sent itself.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from services.gateway.router import metrics
from services.gateway.router.parts import Router
from shared import logs, subjects
from shared.backoff import Backoff
from shared.bus.nats_bus import connect_with
from shared.bus.protocol import Bus, Delivery
from shared.codec import decode, encode
from shared.errors import CodecError, Unavailable
from shared.messages.cells import CellHeads, CellLoad, HeadsWanted

SWEEP_S = 1.0
FIRST_S, MOST_S = 0.5, 10.0

M = TypeVar("M", bound=msgspec.Struct)
_log = logs.get_logger("router.feed")


class Feed:
    """The receiver of all cells' reports for one router."""

    def __init__(self, router: Router) -> None:
        """Pass reports to the cells of ``router`` once :meth:`run` is called."""
        self._router = router

    async def run(self) -> None:
        """Connect, listen, and request missed summaries, for ever. Raises ConfigError for settings that cannot work."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep())
            if self._router.config.summaries:
                group.create_task(self._listen())

    async def _listen(self) -> None:
        backoff = Backoff(FIRST_S, MOST_S)
        while True:
            try:
                bus = await connect_with(self._router.config, f"router {self._router.config.id}", timeout_s=MOST_S)
                break
            except Unavailable as error:
                _log.warning("broker_away", reason=error.message)
                await asyncio.sleep(backoff.next_s())
        try:
            await bus.subscribe(subjects.CELLS_HEADS, self._on_heads)
            await bus.subscribe(subjects.CELLS_LOAD, self._on_load)
            while True:
                await self._ask(bus)
                await asyncio.sleep(SWEEP_S)
        finally:
            await bus.close()

    async def _ask(self, bus: Bus) -> None:
        for cell in self._router.cells.wanting():
            try:
                await bus.publish(subjects.heads_wanted(cell), encode(HeadsWanted(cell=cell)))
            except Unavailable:
                return  # They are requested again when the connection is back.

    async def _sweep(self) -> None:
        cells = self._router.cells
        said: dict[str, str] = {}
        while True:
            now_s = self._router.clock()
            cells.sweep(now_s)
            odd = cells.other_models
            for name in odd.keys() - said.keys():
                _log.warning("cell_has_another_model", cell=name, reason=odd[name])
            said = odd
            for cell in cells.by_name.values():
                metrics.HEADS.labels(cell.name).set(cells.index.count(cell.name))
                if cell.load is not None:
                    metrics.SUMMARY_AGE.labels(cell.name).set(now_s - cell.load_s)
            await asyncio.sleep(SWEEP_S)

    async def _on_heads(self, delivery: Delivery) -> None:
        heads = _read(delivery, CellHeads)
        if heads is not None and delivery.subject == subjects.cell_heads(heads.cell, heads.gateway):
            self._router.cells.hear_heads(heads, self._router.clock())

    async def _on_load(self, delivery: Delivery) -> None:
        load = _read(delivery, CellLoad)
        if load is not None and delivery.subject == subjects.cell_load(load.cell, load.gateway):
            self._router.cells.hear_load(load, self._router.clock())


def _read(delivery: Delivery, kind: type[M]) -> M | None:
    """Decode a message; return None, after a line in the log, for one that cannot be decoded."""
    try:
        return decode(delivery.data, kind)
    except CodecError as error:
        _log.warning("summary_unreadable", subject=delivery.subject, reason=error.message)
        return None
