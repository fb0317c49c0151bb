"""Two-stage saving of hidden states (HCache section 4.2.2): a snapshot within the step, pieces beside it.

The computing thread never waits. What there is no room for is not saved: the sequence stops there, what was saved of it
before stays good, and the counts tell how often that happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from services.worker.restore.assembler import PieceAssembler
from services.worker.restore.attention_inputs import AttentionInputs
from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.snapshot_ring import Snapshot, SnapshotRing
from shared import logs

MAX_SNAPSHOTS = 256
"""Steps whose rows wait for the second stage; with the ring's bytes and the sequences it bounds that stage's queue."""

_log = logs.get_logger("worker")


class PieceTaker(Protocol):
    """Where full pieces go."""

    def take(self, piece: HiddenPiece) -> bool:
        """Called by the saving thread. False when there is no room: the rest of the sequence is not saved."""


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows ``[first_row, first_row + rows)`` of a step are tokens of one sequence from ``position`` on."""

    sequence_id: str
    first_row: int
    rows: int
    position: int


@dataclass(slots=True)
class SavingCounts:
    """Since the start. Stops count sequences; the last two fields are written by the saving thread alone."""

    rows: int = 0  # Taken into snapshots.
    failed_steps: int = 0
    refused: int = 0  # Never begun: too many sequences at a time.
    stopped_no_room: int = 0  # In the ring, or too many snapshots waiting.
    stopped_gap: int = 0  # The next rows were not the next tokens.
    pieces: int = 0
    stopped_not_taken: int = 0


class TwoStageSaver:
    """Saves the sequences that have begun. ``begin``, ``step`` and ``end`` are for the computing thread."""

    def __init__(
        self,
        shape: HiddenShape,
        ring: SnapshotRing,
        taker: PieceTaker,
        *,
        layers: Sequence[int],
        max_sequences: int,
        submit: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """``layers`` are those of ``ring``. ``submit`` runs work one at a time in order; by default a thread of its
        own.
        """
        self.counts = SavingCounts()
        self._shape, self._ring, self._taker = shape, ring, taker
        self._layers = tuple(layers)
        self._max_sequences = max_sequences
        self._next: dict[str, int] = {}  # The position that comes next, by sequence that is being saved.
        self._assembler = PieceAssembler(self._layers, shape.row_bytes)  # The saving thread's.
        self._not_taken: set[str] = set()  # The saving thread's; the computing thread only looks.
        self._held = threading.Lock()
        self._snapshots = self._sequences = 0  # That the saving thread has yet to see the end of.
        self._threads: ThreadPoolExecutor | None = None
        if submit is None:
            self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hidden")
            submit = self._threads.submit
        self._submit = submit

    def begin(self, sequence_id: str, position: int) -> bool:
        """Save this sequence from ``position`` on. False when it is being saved already or too many are."""
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
        """The sequence is finished, preempted or cancelled: its tail becomes a piece. Others are left alone."""
        if self._next.pop(sequence_id, None) is not None:
            self._submit(lambda: self._end(sequence_id))

    def is_saving(self, sequence_id: str) -> bool:
        """Whether further rows of it would be saved."""
        return sequence_id in self._next

    @contextmanager
    def step(self, inputs: AttentionInputs, rows: Sequence[SavedRows]) -> Iterator[None]:
        """Within this block runs one forward pass, whose ``rows`` are saved if their sequences are.

        If the block raises, nothing of it is saved and its rows may come again. So whatever voids the pass must raise
        in here, the end of the loads that it attended to as well: KV that fails verification makes wrong hidden states.
        """
        kept, snapshot = self._take(rows)
        if snapshot is None:
            yield
            return
        is_whole = False
        try:
            with inputs.given_to(snapshot, self._layers):
                yield
            is_whole = snapshot.layers_taken == len(self._layers)
        finally:
            if is_whole:
                for each in kept:
                    self._next[each.sequence_id] += each.rows
                    self.counts.rows += each.rows
            else:
                self.counts.failed_steps += 1
            self._submit(lambda: self._assemble(snapshot, kept if is_whole else ()))

    def close(self) -> None:
        """End all sequences and return when all pieces have been handed on."""
        for sequence_id in list(self._next):
            self.end(sequence_id)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _take(self, rows: Sequence[SavedRows]) -> tuple[list[SavedRows], Snapshot | None]:
        """Whose rows there is room for, in the order of the step, and room for them."""
        room = self._ring.room_rows
        with self._held:
            if self._snapshots >= MAX_SNAPSHOTS:
                room = 0
        kept: list[SavedRows] = []
        for each in rows:
            position = self._next.get(each.sequence_id)
            if position is None or each.sequence_id in self._not_taken:
                continue
            if each.position != position:
                self.counts.stopped_gap += 1
                self.end(each.sequence_id)
            elif each.rows > room:
                self.counts.stopped_no_room += 1
                self.end(each.sequence_id)
            else:
                kept.append(each)
                room -= each.rows
        snapshot = self._ring.take(_runs(kept)) if kept else None
        if snapshot is not None:
            with self._held:
                self._snapshots += 1
        return kept, snapshot

    def _assemble(self, snapshot: Snapshot, kept: Sequence[SavedRows]) -> None:
        """The saving thread's: rows of one step into pieces."""
        try:
            snapshot.wait()
            start = 0
            for each in kept:
                if each.sequence_id not in self._not_taken:
                    for piece in self._assembler.append(each.sequence_id, snapshot.rows[:, start : start + each.rows]):
                        self._hand_on(piece)
                start += each.rows
        except Exception as error:  # Of the device: nothing of these sequences can be counted on from here.
            _log.warning("hidden_states_not_saved", reason=f"{type(error).__name__}: {error}")
            self._not_taken.update(each.sequence_id for each in kept)
            self.counts.stopped_not_taken += len(kept)
        finally:
            self._ring.give_back_oldest()
            with self._held:
                self._snapshots -= 1

    def _end(self, sequence_id: str) -> None:
        tail = self._assembler.end(sequence_id)
        if tail is not None and sequence_id not in self._not_taken:
            self._hand_on(tail)
        self._not_taken.discard(sequence_id)
        with self._held:
            self._sequences -= 1

    def _hand_on(self, piece: HiddenPiece) -> None:
        if piece.sequence_id in self._not_taken:
            return
        if self._taker.take(piece):
            self.counts.pieces += 1
        else:
            self._not_taken.add(piece.sequence_id)
            self.counts.stopped_not_taken += 1


def _runs(kept: Sequence[SavedRows]) -> list[slice]:
    """Runs of the step's rows; neighbours are one run, so that a step that saves all of its rows is one plain copy."""
    runs: list[slice] = []
    for each in kept:
        if runs and runs[-1].stop == each.first_row:
            runs[-1] = slice(runs[-1].start, each.first_row + each.rows)
        else:
            runs.append(slice(each.first_row, each.first_row + each.rows))
    return runs
