"""The receiver of cells' reports over NATS, which it passes to :class:`~services.gateway.router.cells.Cells`."""

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
from shared.bus.requests import translated
from shared.codec import decode, encode
from shared.errors import CodecError, ConfigError, Unavailable
from shared.messages.cells import CellHeads, CellLoad, HeadsWanted

SWEEP_S = 1.0
FIRST_S, MOST_S = 0.5, 10.0
BEGIN_S = 2.0
"""Longest wait for the hub before a router says that it is ready."""


M = TypeVar("M", bound=msgspec.Struct)
_log = logs.get_logger("router.feed")


class Feed:
    """The receiver of all cells' reports for one router.

    ``silent`` are the cells that report nothing, and a sentence on each. The hub may be away, hang or refuse us: then
    the router goes by the requests that it sent itself. Only at the start is a refusal a fault of the settings; later
    it is the hub's, and no reason to end a router that serves.
    """

    def __init__(self, router: Router) -> None:
        """Pass reports to the cells of ``router`` once :meth:`begin` or :meth:`run` is called."""
        self._router = router
        self._bus: Bus | None = None
        self.silent: dict[str, str] = {}

    async def begin(self) -> None:
        """Connect for the first time, if a hub answers soon. Raises ConfigError where it refuses us."""
        if not self._router.config.summaries:
            return
        try:
            await self._open(BEGIN_S)
        except Unavailable as error:
            _log.warning("broker_away", reason=error.message)

    async def run(self) -> None:
        """Connect, listen, and request missed summaries, for ever."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._sweep())
                if self._router.config.summaries:
                    group.create_task(self._listen())
        except BaseExceptionGroup as errors:
            if len(errors.exceptions) > 1:
                raise
            raise errors.exceptions[0] from None  # The process tells errors apart by their types.

    async def close(self) -> None:
        """Disconnect; idempotent."""
        if self._bus is not None:
            bus, self._bus = self._bus, None
            await bus.close()

    async def _listen(self) -> None:
        backoff = Backoff(FIRST_S, MOST_S)
        try:
            while True:
                if self._bus is not None:
                    await self._ask(self._bus)
                    await asyncio.sleep(SWEEP_S)
                    continue
                try:
                    await self._open(MOST_S)
                except (Unavailable, ConfigError) as error:
                    _log.warning("broker_away", reason=error.message)
                    await asyncio.sleep(backoff.next_s())
        finally:
            await self.close()

    async def _open(self, timeout_s: float) -> None:
        """Connect and subscribe, or close what was opened. Raises Unavailable and ConfigError.

        A hub that hangs can do so behind the connection, so its errors of every step are translated.
        """
        name = f"router {self._router.config.id}"
        bus = await translated(connect_with(self._router.config, name, timeout_s=timeout_s))
        try:
            await translated(bus.subscribe(subjects.CELLS_HEADS, self._on_heads))
            await translated(bus.subscribe(subjects.CELLS_LOAD, self._on_load))
        except BaseException:
            await bus.close()
            raise
        self._bus = bus

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
            cells.sweep(self._router.clock())
            odd = cells.other_models
            for name in odd.keys() - said.keys():
                _log.warning("cell_has_another_model", cell=name, reason=odd[name])
            said = odd
            self._find_silent()
            for cell in cells.by_name:
                metrics.HEADS.labels(cell).set(cells.index.count(cell))
                age_s = self._router.summary_age_s(cell)
                if age_s is not None:
                    metrics.SUMMARY_AGE.labels(cell).set(age_s)
            await asyncio.sleep(SWEEP_S)

    def _find_silent(self) -> None:
        """Log each cell once when it has reported nothing for too long, and once when it reports again."""
        for cell in self._router.cells.by_name:
            why = self._router.silence(cell)
            if why and cell not in self.silent:
                self.silent[cell] = why
                _log.warning("cell_reports_nothing", cell=cell, reason=why)
            elif not why and self.silent.pop(cell, None) is not None:
                _log.info("cell_reports_again", cell=cell)

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
