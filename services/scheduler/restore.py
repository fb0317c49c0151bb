"""Starting where the last scheduler stopped: a snapshot, then the tail of the stream.

Outputs of the tail are published again. Those that were published before carry the same numbers and bytes, so
targets drop them; those that died with the last scheduler arrive now.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler import core
from services.scheduler.fold import Fold, load_state
from services.scheduler.outbox import Outbox
from services.scheduler.snapshots import SnapshotStore, belongs_to_stream
from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.errors import InternalError
from shared.messages.cell_events import CellConfigured

_log = logs.get_logger("restore")


@dataclass(frozen=True, slots=True)
class Restored:
    """``highest_epoch`` may exceed the state's where the state was lost."""

    fold: Fold
    highest_epoch: int
    is_configured: bool  # A CellConfigured was folded, now or before the snapshot.
    is_lost: bool
    replayed: int


async def restore(bus: Bus, outbox: Outbox, *, check_invariants_every: int = 0) -> Restored:
    """Find the newest usable snapshot (or the stream's start) and fold everything stored behind it."""
    fold, highest_epoch, is_lost = await _starting_point(bus, check_invariants_every)
    start = fold.position
    is_configured = start > 0 and not is_lost
    async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=start + 1, live=False):
        folded = fold.apply(message)
        is_configured = is_configured or isinstance(folded.input, CellConfigured)
        if folded.input is None:
            _log.error("input_skipped", seq=message.seq, subject=message.subject, reason=folded.fault)
        await outbox.send(folded.published)
    await outbox.confirm()
    _log.info("restored", snapshot_seq=start, seq=fold.position, epoch=fold.state.epoch, state_lost=is_lost)
    return Restored(fold, max(highest_epoch, fold.state.epoch), is_configured, is_lost, fold.position - start)


async def _starting_point(bus: Bus, check_invariants_every: int) -> tuple[Fold, int, bool]:
    highest_epoch = 0
    store = SnapshotStore(bus)
    async for snapshot in store.newest_first():
        highest_epoch = max(highest_epoch, snapshot.epoch)
        if not await belongs_to_stream(bus, subjects.INPUTS_STREAM, snapshot):
            # It is of a stream that is no more, or too old to be continued; either way it never will fit.
            _log.warning("snapshot_does_not_fit_the_stream", seq=snapshot.seq)
            await store.delete(snapshot.seq)
            continue
        try:
            state = load_state(snapshot.state)
        except InternalError as error:
            _log.error("snapshot_unusable", seq=snapshot.seq, reason=error.message)
            continue
        fold = Fold(
            state,
            position=snapshot.seq,
            time_ns=snapshot.time_ns,
            check_invariants_every=check_invariants_every,
        )
        return fold, highest_epoch, False
    info = await bus.stream_info(subjects.INPUTS_STREAM)
    if info.first_seq == 1:
        return Fold(core.new_state(), check_invariants_every=check_invariants_every), highest_epoch, False
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
    return fold, highest_epoch, True


async def _time_of(bus: Bus, seq: int) -> int:
    """The timestamp of an input, or 0 when it is gone."""
    async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=seq, live=False):
        return message.time_ns if message.seq == seq else 0
    return 0
