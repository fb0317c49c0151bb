"""Starting where the stream is: a snapshot, then the tail of the stream.

Outputs of the tail go to the outbox, which publishes those that are not known to be published. Those that were
published before carry the same numbers and bytes, so targets drop them; those that died with the last scheduler arrive
now.

That holds only where this release folded the tail before, or none did. Another release may have decided otherwise:
targets obeyed it, and would drop what differs from it as repeated. Then everything that is known of device and host
pools is given up, and the cell begins anew (:attr:`Start.is_lost`); what disks and stores hold is announced again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.scheduler import core
from services.scheduler.fold import Fold, load_state
from services.scheduler.leadership import Tail
from services.scheduler.outbox import Outbox
from services.scheduler.quarantine import read_skips
from services.scheduler.snapshots import Snapshot, SnapshotStore, belongs_to_stream
from shared import logs, progress, subjects
from shared.bus.protocol import Bus, StreamInfo
from shared.errors import InternalError

YIELD_EVERY = 32
"""Inputs of a long tail that are folded before other tasks, such as the lead's, get a turn."""

_log = logs.get_logger("restore")


@dataclass(frozen=True, slots=True)
class Start:
    """A state to go on from, before the tail is folded. ``highest_epoch`` may exceed its own where it was lost."""

    fold: Fold
    seq: int  # The state is that behind this input.
    highest_epoch: int
    is_lost: bool = False
    said: int = 0  # Digest of all outputs up to ``seq``, see ``output_chain``.


async def find_start(bus: Bus, *, release: str, tail: Tail | None, check_invariants_every: int = 0) -> Start:
    """Return where an active scheduler of ``release`` begins; its predecessors left ``tail`` (None: there were none).

    That is the newest snapshot that may be continued, or the stream's first input; otherwise an empty state behind
    everything that was published. Snapshots of another stream are deleted.
    """
    info = await bus.stream_info(subjects.INPUTS_STREAM)
    if tail is not None and not await _is_of_stream(bus, info, tail):
        tail = None
    highest_epoch, is_of_others = 0, False
    store = SnapshotStore(bus)
    async for snapshot in store.newest_first():
        highest_epoch = max(highest_epoch, snapshot.epoch)
        if not await belongs_to_stream(bus, subjects.INPUTS_STREAM, snapshot):
            # It is of a stream that was deleted, or too old to be continued; it will never fit.
            _log.warning("snapshot_does_not_fit_the_stream", seq=snapshot.seq)
            await store.delete(snapshot.seq)
            continue
        is_of_others = is_of_others or snapshot.release != release
        if not (tail.may_be_continued(snapshot.seq, release) if tail is not None else snapshot.release == release):
            _log.warning("snapshot_cannot_be_continued", seq=snapshot.seq, release=snapshot.release)
            continue
        fold = await _fold_from(bus, snapshot, check_invariants_every)
        if fold is not None:
            return Start(fold, snapshot.seq, highest_epoch, said=snapshot.said)
    may_begin = tail.may_be_continued(0, release) if tail is not None else not is_of_others
    if info.first_seq == 1 and may_begin:
        return Start(await _first_fold(bus, check_invariants_every), 0, highest_epoch)
    return await _begin_anew(bus, info, tail, release, highest_epoch, check_invariants_every)


async def find_active_start(bus: Bus, *, folded_from: int, check_invariants_every: int = 0) -> Start | None:
    """Return where a standby begins, which must have the same state as the active scheduler, or None.

    The active scheduler's release folds since ``folded_from``, so the standby starts there or later. It changes nothing
    in the bucket. None is returned where no such state is available.
    """
    async for snapshot in SnapshotStore(bus).newest_first():
        if not await belongs_to_stream(bus, subjects.INPUTS_STREAM, snapshot):
            continue
        if snapshot.seq < folded_from:
            return None
        fold = await _fold_from(bus, snapshot, check_invariants_every)
        if fold is not None:
            return Start(fold, snapshot.seq, snapshot.epoch, said=snapshot.said)
    if folded_from or (await bus.stream_info(subjects.INPUTS_STREAM)).first_seq != 1:
        return None
    return Start(await _first_fold(bus, check_invariants_every), 0, 0)


async def fold_tail(bus: Bus, outbox: Outbox, start: Start) -> None:
    """Fold everything that is stored behind the start, and give its outputs to the outbox.

    Raises TransportError when the stream is trimmed faster than it is read.
    """
    fold = start.fold
    with progress.phase("reading the cell's history", unit="inputs") as advance:
        async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=start.seq + 1, live=False):
            folded = fold.apply(message)
            if folded.input is None:
                _log.error("input_skipped", seq=message.seq, subject=message.subject, reason=folded.fault)
            await outbox.send(folded.published, message.seq, message.time_ns)
            advance(1)
            if message.seq % YIELD_EVERY == 0:
                await asyncio.sleep(0)
    progress.ready()
    _log.info("restored", snapshot_seq=start.seq, seq=fold.position, epoch=fold.state.epoch, state_lost=start.is_lost)


async def _first_fold(bus: Bus, check_invariants_every: int) -> Fold:
    skips = await read_skips(bus)
    return Fold(core.new_state(), check_invariants_every=check_invariants_every, skips=skips.decided)


async def _fold_from(bus: Bus, snapshot: Snapshot, check_invariants_every: int) -> Fold | None:
    """Return the fold behind a snapshot; None where its state cannot be decoded, or has an input left out since."""
    try:
        state = load_state(snapshot.state)
    except InternalError as error:
        _log.error("snapshot_unusable", seq=snapshot.seq, reason=error.message)
        return None
    skips = await read_skips(bus, snapshot.seq + 1)
    if not skips.suit(state, snapshot.seq):
        _log.warning("snapshot_unusable", seq=snapshot.seq, reason="it holds an input that is left out since")
        return None
    return Fold(
        state,
        position=snapshot.seq,
        time_ns=snapshot.time_ns,
        check_invariants_every=check_invariants_every,
        skips=skips.decided,
    )


async def _begin_anew(
    bus: Bus, info: StreamInfo, tail: Tail | None, release: str, highest_epoch: int, check_invariants_every: int
) -> Start:
    """Return an empty state behind the last input that any target may have acted upon.

    Folding earlier inputs would run requests again that ended long ago, or contradict what targets obeyed.
    """
    seq = info.last_seq
    if tail is not None and tail.said_to is not None:
        seq = min(max(tail.said_to, info.first_seq - 1), info.last_seq)  # What came since was not acted upon.
    is_of_another = tail is not None and tail.release != release
    _log.error(
        "state_lost",
        because="another release folded the end of the stream" if is_of_another else "no state can be continued",
        first_seq=info.first_seq,
        last_seq=info.last_seq,
        begins_behind=seq,
        consequence="workers and storages must join again, and gateways submit requests in progress again",
    )
    state = core.new_state()
    # Numbers of outputs begin at 1 again, so no output may look like one of an earlier term.
    state.epoch = max(highest_epoch, tail.epoch if tail is not None else 0) + 1
    fold = Fold(
        state,
        position=seq,
        time_ns=await _time_of(bus, seq),
        check_invariants_every=check_invariants_every,
        skips=(await read_skips(bus, seq + 1)).decided,
    )
    return Start(fold, seq, state.epoch, is_lost=True)


async def _is_of_stream(bus: Bus, info: StreamInfo, tail: Tail) -> bool:
    """Return whether the tail is of this stream, not of one that was deleted and made anew, counting from 1 again."""
    published = tail.published
    if max(published.seq, tail.folded_from) > info.last_seq:
        return False
    return published.seq < info.first_seq or await _time_of(bus, published.seq) <= published.time_ns


async def _time_of(bus: Bus, seq: int) -> int:
    """Return the timestamp of an input, or 0 when the stream no longer has it."""
    async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=max(1, seq), live=False):
        return message.time_ns if message.seq == seq else 0
    return 0
