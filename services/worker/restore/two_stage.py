"""Two-stage saving of hidden states (HCache section 4.2.2): a snapshot within the step, pieces beside it.

The computing thread never waits. Rows without room are not saved: the sequence's saving stops there, the rows saved
before stay good, and the counts tell how often that happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from services.worker.restore.assembler import PieceAssembler
from services.worker.restore.pieces import PieceRows, PieceTaker
from services.worker.restore.saving_step import SavedRows, SavingStep, Taken, runs_of
from services.worker.restore.snapshot_ring import SnapshotRing
from shared import logs
from shared.chunks import CHUNK_TOKENS

MAX_SNAPSHOTS = 256
"""Most passes whose rows wait for the second stage; with the ring's bytes and the sequences it bounds that stage's
queue.
"""

_log = logs.get_logger("worker")


@dataclass(slots=True)
class SavingCounts:
    """Counts since the start. Stops count sequences; the last two fields are written by the saving thread alone."""

    rows: int = 0  # Rows taken into snapshots.
    failed_steps: int = 0
    refused: int = 0  # Sequences never begun: too many at a time.
    stopped_no_room: int = 0  # No room in the ring, or too many snapshots waiting.
    stopped_gap: int = 0  # The next rows were not the next tokens.
    pieces: int = 0
    stopped_not_taken: int = 0


class TwoStageSaver:
    """Saves the sequences that have begun. ``begin``, ``step`` and ``end`` are for the computing thread."""

    def __init__(
        self,
        ring: SnapshotRing,
        taker: PieceTaker,
        *,
        max_sequences: int,
        piece_tokens: int = CHUNK_TOKENS,
        submit: Callable[[Callable[[], None]], object] | None = None,
        counts: SavingCounts | None = None,
    ) -> None:
        """Prepare; ``submit`` runs work one at a time in order; by default a thread of its own.

        ``counts`` are continued.
        """
        self.counts = SavingCounts() if counts is None else counts
        self._ring, self._taker = ring, taker
        self._max_sequences = max_sequences
        self._next: dict[str, int] = {}  # The next position of each sequence that is being saved.
        self._assembler = PieceAssembler(ring.units, ring.row_bytes, piece_tokens)  # The saving thread's.
        self._not_taken: set[str] = set()  # Written by the saving thread; the computing thread only reads.
        self._held = threading.Lock()
        self._snapshots = self._sequences = 0  # Sequences whose end the saving thread has not handled yet.
        self._threads: ThreadPoolExecutor | None = None
        if submit is None:
            self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hidden")
            submit = self._threads.submit
        self._submit = submit

    def begin(self, sequence_id: str, position: int) -> bool:
        """Save this sequence from ``position`` on; return False when it is being saved already or too many are."""
        with self._held:
            has_room = self._sequences < self._max_sequences
            if sequence_id in self._next or not has_room:
                self.counts.refused += 1
                return False
            self._sequences += 1
        self._next[sequence_id] = position
        self._submit(lambda: self._assembler.begin(sequence_id, position))
        return True

    def end(self, sequence_id: str) -> None:
        """End a finished, preempted or cancelled sequence: its tail becomes a piece. Unknown ones are ignored."""
        if self._next.pop(sequence_id, None) is not None:
            self._submit(lambda: self._end(sequence_id))

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is being saved."""
        return not self._next

    @contextmanager
    def step(self) -> Iterator[SavingStep]:
        """Run the forward passes of one step within this block, each within :meth:`SavingStep.around`.

        Rows that they take are saved when the block ends and nothing of it was voided. So all that may void a pass must
        be known in here, the end of the loads that it attended to as well: KV that fails verification makes wrong
        hidden states. Rows of a voided pass may come again.
        """
        step = SavingStep(self._take)
        try:
            yield step
        except BaseException:
            step.void()
            raise
        finally:
            self._settle(step)

    def close(self) -> None:
        """End all sequences and return when all pieces have been handed on."""
        for sequence_id in list(self._next):
            self.end(sequence_id)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    # -- the computing thread ---------------------------------------------------------------------------------

    def _take(self, rows: Sequence[SavedRows], stopped: list[str]) -> Taken | None:
        """Return a snapshot for those rows that are to be saved, in the order of the pass; None if there are none.

        Their sequences move on at once, so that the step's next pass continues them. One that must stop here goes to
        ``stopped``: its end waits for the rows that earlier passes have taken of it.
        """
        room = self._ring.room_rows
        with self._held:
            if self._snapshots >= MAX_SNAPSHOTS:
                room = 0
        kept: list[SavedRows] = []
        for each in rows:
            part = self._part(each, room, stopped)
            if part is not None:
                self._next[part.sequence_id] += part.rows
                kept.append(part)
                room -= part.rows
        snapshot = self._ring.take(runs_of(kept)) if kept else None
        if snapshot is None:
            return None
        with self._held:
            self._snapshots += 1
        return Taken(kept, snapshot)

    def _part(self, each: SavedRows, room: int, stopped: list[str]) -> SavedRows | None:
        """Return the part of these rows that is saved, if any: from the next position on, as far as there is room."""
        sequence_id = each.sequence_id
        position = self._next.get(sequence_id)
        if position is None or sequence_id in stopped:
            return None
        if sequence_id in self._not_taken:
            stopped.append(sequence_id)
            return None
        if each.position > position:
            self.counts.stopped_gap += 1
            stopped.append(sequence_id)
            return None
        known = position - each.position  # Rows before the sequence's beginning, or computed again.
        count = min(each.rows - known, room)
        if count < each.rows - known:
            self.counts.stopped_no_room += 1
            stopped.append(sequence_id)
        if count < 1:
            return None
        return replace(each, first_row=each.first_row + known, rows=count, position=position)

    def _settle(self, step: SavingStep) -> None:
        """Hand over the rows that the step has taken, and end the sequences that stopped in it.

        Sequences whose rows are void go back to the positions of these rows.
        """
        is_void = step.is_void or not all(step.is_whole(taken) for taken in step.taken)
        if step.taken and is_void:
            self.counts.failed_steps += 1
        back: dict[str, int] = {}
        for taken in step.taken:
            good = [not is_void and each.sequence_id not in step.dropped for each in taken.rows]
            for each, is_good in zip(taken.rows, good, strict=True):
                if is_good:
                    self.counts.rows += each.rows
                else:
                    back.setdefault(each.sequence_id, each.position)
            self._submit(partial(self._assemble, taken, good))
        self._next.update(back)
        for sequence_id in step.stopped:
            self.end(sequence_id)

    # -- the saving thread ------------------------------------------------------------------------------------

    def _assemble(self, taken: Taken, good: Sequence[bool]) -> None:
        """Assemble rows of one pass into pieces."""
        kept = [each for each, is_good in zip(taken.rows, good, strict=True) if is_good]
        try:
            taken.snapshot.wait()
            start = 0
            for each, is_good in zip(taken.rows, good, strict=True):
                rows = taken.snapshot.rows[:, start : start + each.rows]
                start += each.rows
                if is_good and each.sequence_id not in self._not_taken:
                    for piece in self._assembler.append(each.sequence_id, rows):
                        self._hand_on(piece)
        except Exception as error:  # An error of the device or the store: none of these rows can be relied on.
            _log.warning("hidden_not_saved", reason=f"{type(error).__name__}: {error}")
            self._not_taken.update(each.sequence_id for each in kept)
            self.counts.stopped_not_taken += len(kept)
        finally:
            self._ring.give_back_oldest()
            with self._held:
                self._snapshots -= 1

    def _end(self, sequence_id: str) -> None:
        try:
            tail = self._assembler.end(sequence_id)
            if tail is not None:
                self._hand_on(tail)
        finally:
            self._not_taken.discard(sequence_id)
            with self._held:
                self._sequences -= 1
            self._taker.end(sequence_id)

    def _hand_on(self, piece: PieceRows) -> None:
        if piece.sequence_id in self._not_taken:
            return
        if self._taker.take(piece):
            self.counts.pieces += 1
        else:
            self._not_taken.add(piece.sequence_id)
            self.counts.stopped_not_taken += 1
