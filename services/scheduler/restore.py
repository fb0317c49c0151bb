"""Starting where the stream is: a snapshot, then the tail of the stream.

Outputs of the tail go to the outbox, which publishes those that nobody is known to have published. Those that were
published before carry the same numbers and bytes, so targets drop them; those that died with the last scheduler
arrive now.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.scheduler import core
from services.scheduler.fold import Fold, load_state
from services.scheduler.outbox import Outbox
from services.scheduler.output_chain import Mark
from services.scheduler.quarantine import read_skips
from services.scheduler.snapshots import SnapshotStore, belongs_to_stream
from shared import logs, progress, subjects
from shared.bus.protocol import Bus
from shared.errors import InternalError

YIELD_EVERY = 32
"""Inputs of a long tail that are folded before anybody else, such as the lease, gets a turn."""

_log = logs.get_logger("restore")


@dataclass(frozen=True, slots=True)
class Restored:
    """``highest_epoch`` may exceed the state's where the state was lost."""

    fold: Fold
    start: int  # The state before the first input that was folded is that behind this one.
    highest_epoch: int
    is_lost: bool


async def restore(
    bus: Bus,
    outbox: Outbox,
    *,
    folded_from: int | None = None,
    check_invariants_every: int = 0,
) -> Restored | None:
    """Find the newest usable snapshot (or the stream's start) and fold everything stored behind it.

    With ``folded_from`` this is a standby's: it must have the very state of the active scheduler, whose release
    folds since that input. So it starts there or later, changes nothing in the bucket, and returns None where no such
    state can be had. Without, whoever restores is the active one, and begins anew where everything is lost.
    Raises TransportError when the stream is trimmed faster than it is read.
    """
    found = await _starting_point(bus, outbox, folded_from, check_invariants_every)
    if found is None:
        return None
    fold, highest_epoch, is_lost = found
    start = fold.position
    with progress.phase("reading the cell's history", unit="inputs") as advance:
        async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=start + 1, live=False):
            folded = fold.apply(message)
            if folded.input is None:
                _log.error("input_skipped", seq=message.seq, subject=message.subject, reason=folded.fault)
            await outbox.send(folded.published, message.seq, message.time_ns)
            advance(1)
            if message.seq % YIELD_EVERY == 0:
                await asyncio.sleep(0)
    progress.ready()
    _log.info("restored", snapshot_seq=start, seq=fold.position, epoch=fold.state.epoch, state_lost=is_lost)
    return Restored(fold, start, max(highest_epoch, fold.state.epoch), is_lost)


async def _starting_point(
    bus: Bus, outbox: Outbox, folded_from: int | None, check_invariants_every: int
) -> tuple[Fold, int, bool] | None:
    highest_epoch = 0
    store = SnapshotStore(bus)
    async for snapshot in store.newest_first():
        highest_epoch = max(highest_epoch, snapshot.epoch)
        if not await belongs_to_stream(bus, subjects.INPUTS_STREAM, snapshot):
            # It is of a stream that is no more, or too old to be continued; either way it never will fit.
            _log.warning("snapshot_does_not_fit_the_stream", seq=snapshot.seq)
            if folded_from is None:
                await store.delete(snapshot.seq)
            continue
        if folded_from is not None and snapshot.seq < folded_from:
            return None
        try:
            state = load_state(snapshot.state)
        except InternalError as error:
            _log.error("snapshot_unusable", seq=snapshot.seq, reason=error.message)
            continue
        skips = await read_skips(bus, snapshot.seq + 1)
        if not skips.suit(state, snapshot.seq):
            _log.warning("snapshot_unusable", seq=snapshot.seq, reason="it holds an input that is left out since")
            continue
        fold = Fold(
            state,
            position=snapshot.seq,
            time_ns=snapshot.time_ns,
            check_invariants_every=check_invariants_every,
            skips=skips.decided,
        )
        outbox.clear(Mark(snapshot.seq, snapshot.said))
        return fold, highest_epoch, False
    info = await bus.stream_info(subjects.INPUTS_STREAM)
    if info.first_seq == 1 and not folded_from:
        skips = await read_skips(bus)
        fold = Fold(core.new_state(), check_invariants_every=check_invariants_every, skips=skips.decided)
        return fold, highest_epoch, False
    if folded_from is not None:
        return None
    # The beginning is gone and no snapshot stands in for it. Folding what is left would run requests again
    # that ended long ago, so everything known is given up and the cell starts anew behind the stream's end.
    _log.error(
        "state_lost",
        first_seq=info.first_seq,
        last_seq=info.last_seq,
        consequence="requests in progress are lost, and workers and storages must join again",
    )
    fold = Fold(
        core.new_state(),
        position=info.last_seq,
        time_ns=await _time_of(bus, info.last_seq),
        check_invariants_every=check_invariants_every,
    )
    outbox.clear(Mark(fold.position))
    return fold, highest_epoch, True


async def _time_of(bus: Bus, seq: int) -> int:
    """The timestamp of an input, or 0 when it is gone."""
    async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=seq, live=False):
        return message.time_ns if message.seq == seq else 0
    return 0
