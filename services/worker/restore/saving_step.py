"""Saving within one step: the rows that its forward passes have taken, which count whole, in part or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.restore.attention_inputs import AttentionInputs
from services.worker.restore.snapshot_ring import Snapshot
from shared import logs

_log = logs.get_logger("worker")


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows ``[first_row, first_row + rows)`` of a pass are tokens of one sequence from ``position`` on."""

    sequence_id: str
    first_row: int
    rows: int
    position: int


@dataclass(frozen=True, slots=True)
class Taken:
    """Rows that one pass has taken: ``rows`` of sequences, one behind the other in ``snapshot``."""

    rows: Sequence[SavedRows]
    snapshot: Snapshot


TakeRows = Callable[[Sequence[SavedRows], list[str]], Taken | None]


class SavingStep:
    """The saving of one step.

    Made by :meth:`~services.worker.restore.two_stage.TwoStageSaver.step`, for the computing thread.
    """

    def __init__(self, take: TakeRows) -> None:
        """Begin with no rows; ``take`` makes the snapshot of each pass.

        It gets the pass's rows and a list, to which it adds the sequences whose saving ends here, and returns None
        where nothing is saved.
        """
        self.taken: list[Taken] = []
        self.stopped: list[str] = []  # Sequences whose saving ends here.
        self.dropped: set[str] = set()
        self.is_void = False
        self._take = take

    @contextmanager
    def around(
        self,
        rows: Sequence[SavedRows],
        inputs: AttentionInputs | None,
        pool: DevicePool | None = None,
        slots: torch.Tensor | None = None,
    ) -> Iterator[None]:
        """Run one forward pass within this block; take its ``rows`` whose sequences are being saved.

        ``inputs`` give hidden states; K and V come from ``slots`` of ``pool`` (int64 [T], one a row of the pass) when
        the block ends.
        """
        taken = self._take(rows, self.stopped)
        if taken is None:
            yield
            return
        self.taken.append(taken)
        snapshot = taken.snapshot
        if inputs is not None and snapshot.layers:
            with inputs.given_to(snapshot, snapshot.layers):
                yield
        else:
            yield
        if pool is not None and slots is not None:
            self._take_kv(snapshot, pool, slots)

    def is_whole(self, taken: Taken) -> bool:
        """Return whether a pass has given all that was asked of it, or is not wanted any more."""
        return taken.snapshot.is_whole or all(each.sequence_id in self.dropped for each in taken.rows)

    def void(self) -> None:
        """Discard all that this step has taken."""
        self.is_void = True

    def drop(self, sequence_ids: Iterable[str]) -> None:
        """Discard the rows taken of these sequences, which are not right."""
        self.dropped.update(sequence_ids)

    def _take_kv(self, snapshot: Snapshot, pool: DevicePool, slots: torch.Tensor) -> None:
        """Take the KV of a pass that has succeeded by now, so that a failure here costs saving alone."""
        try:
            snapshot.take_kv(pool, slots)
        except Exception as error:
            _log.warning("hidden_not_saved", reason=f"{type(error).__name__}: {error}")
            self.void()


def runs_of(kept: Sequence[SavedRows]) -> list[slice]:
    """Return runs of the pass's rows.

    Adjacent rows are one run, so that a pass that saves all of its rows is one plain copy.
    """
    runs: list[slice] = []
    for each in kept:
        if runs and runs[-1].stop == each.first_row:
            runs[-1] = slice(runs[-1].start, each.first_row + each.rows)
        else:
            runs.append(slice(each.first_row, each.first_row + each.rows))
    return runs
