"""A fold beside the schedulers of a cell: it publishes nothing to the cell, and never takes the lead.

It begins where a standby would (:mod:`services.scheduler.restore`), with the same code as the active scheduler, and
begins anew where that one did.
"""

from __future__ import annotations

import asyncio
import time

from services.scheduler.fold import Fold, SkipMissed, StepFailed
from services.scheduler.fold_release import fold_release
from services.scheduler.kv_events.holdings import Holdings
from services.scheduler.kv_events.publisher import Publisher
from services.scheduler.kv_events.wire import Batch
from services.scheduler.leadership import read_tail
from services.scheduler.restore import YIELD_EVERY, Start, find_active_start
from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.errors import TransportError, Unavailable

RETRY_S = 1.0
LOOK_S = 2.0
"""Time between checks whether the active scheduler began anew."""

LOOK_PAUSE = 4
"""Pause between comparisons of the tree, in times of the last one's duration: a large tree leaves time to fold."""

MOST_EVENTS = 256
"""Most events of one batch."""

_log = logs.get_logger("kv-events")


async def follow(bus: Bus, publisher: Publisher, interval_s: float) -> None:
    """Fold until cancelled, and publish changes every ``interval_s`` seconds, less often for a large tree."""
    holdings = Holdings()
    while True:
        start = await _find_start(bus)
        if start is None:
            await asyncio.sleep(RETRY_S)
            continue
        holdings.forget()
        publisher.begin_anew()
        tasks = [
            asyncio.create_task(_fold(bus, start.fold), name="fold"),
            asyncio.create_task(_publish(start.fold, holdings, publisher, interval_s), name="publish"),
            asyncio.create_task(_watch(bus, start), name="watch"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (TransportError, Unavailable, SkipMissed, StepFailed) as error:
            _log.warning("left_behind", position=start.fold.position, reason=error.message)
            await asyncio.sleep(RETRY_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _find_start(bus: Bus) -> Start | None:
    try:
        tail = await read_tail(bus)
        if tail is None:
            _log.info("no_scheduler_yet")
            return None
        if tail.release != fold_release():
            _log.warning("another_release", folded_by=tail.release, reason="the active scheduler is of another release")
            return None
        return await find_active_start(bus, folded_from=tail.folded_from)
    except (Unavailable, TransportError) as error:
        _log.warning("not_restored", reason=error.message)
        return None


async def _fold(bus: Bus, fold: Fold) -> None:
    async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=fold.position + 1):
        fold.apply(message)
        if message.seq % YIELD_EVERY == 0:
            await asyncio.sleep(0)


async def _publish(fold: Fold, holdings: Holdings, publisher: Publisher, interval_s: float) -> None:
    told, pause_s = -1, interval_s
    while True:
        if publisher.is_everything_wanted:
            holdings.forget()
            publisher.begin_anew()
            told = -1
        if fold.position != told:
            told, begun_s = fold.position, time.monotonic()
            events = holdings.changes(fold.state)
            pause_s = max(interval_s, LOOK_PAUSE * (time.monotonic() - begun_s))
            for first in range(0, len(events), MOST_EVENTS):
                await publisher.publish(Batch(ts=time.time(), events=events[first : first + MOST_EVENTS]))
        await asyncio.sleep(pause_s)


async def _watch(bus: Bus, start: Start) -> None:
    """Return when the active scheduler's state is not the one that is folded here."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            tail = await read_tail(bus)
        except (Unavailable, TransportError):
            continue  # The fold itself finds out whether the stream goes on.
        if tail is not None and (tail.release != fold_release() or tail.folded_from > start.seq):
            _log.warning("begins_anew", folded_from=tail.folded_from)
            return
