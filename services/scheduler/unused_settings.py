"""Settings that have no effect in this cell, as degradations: its workers, its storages or its model stand in the way.

Like :mod:`services.scheduler.shortfalls` a part of the cell's status that decides nothing; it follows from the state.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from services.scheduler import core
from shared.messages.status import CellStatus, Degradation


def with_unused_settings(status: CellStatus, state: core.CellState) -> CellStatus:
    """Return the status with features among its degradations that were asked for and that this cell cannot have."""
    found = (*_forms(state), *_parts(state))
    return msgspec.structs.replace(status, degraded=(*status.degraded, *found)) if found else status


def _forms(state: core.CellState) -> Iterator[Degradation]:
    for storage in state.storages.values():
        if fault := core.form_obstacle(state, storage):
            yield Degradation(
                component=storage.storage_id,
                what="hidden form",
                reason=f"prefixes are kept as KV: {fault}",
                setting="--hidden-form",
            )


def _parts(state: core.CellState) -> Iterator[Degradation]:
    """Yield what keeps sparse copies from being read, for the storages that were asked to keep some."""
    for storage in state.storages.values():
        if not (storage.sparse.is_kept or storage.sparse.is_left_out):
            continue
        workers = [worker for worker in state.workers.values() if worker.node == storage.node]
        for worker in workers:
            if worker.reads_no_parts:
                reason = f"prefixes are read whole: {worker.reads_no_parts}"
                yield Degradation(component=worker.worker_id, what="importance", reason=reason, setting="--sparse")
        if storage.sparse.is_left_out and not all(worker.reads_no_parts for worker in workers):
            reason = "it keeps no copies to be read in part, as no worker read any when it began: restart it"
            yield Degradation(component=storage.storage_id, what="importance", reason=reason, setting="--sparse")
