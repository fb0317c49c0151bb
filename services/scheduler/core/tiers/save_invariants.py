"""Invariants of saves, of neighbours, and of device locks that no request holds, from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import ancestors
from services.scheduler.core.cache.unsaved import MOST_UNSAVED
from services.scheduler.core.require import require
from shared.ids import split_digests

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker


def check_saves(state: CellState) -> None:
    """Raise InvariantViolated if saves, the storages' counts of them and their deadlines contradict one another."""
    saving: dict[str, dict[bytes, int]] = {}
    late: dict[str, int] = {}
    for save in state.saves.values():
        name = f"save {save.save_id}"
        require(save.storage_id in state.storages, f"{name} has no storage")
        require(save.is_late != (save.timer_id in state.timers), f"{name} has a wrong deadline")
        require(not save.worker_id or save.worker_id in state.workers, f"{name} reads a worker that is gone")
        require(bool(save.worker_id) == bool(save.node), f"{name} reads a device only in part")
        late[save.storage_id] = late.get(save.storage_id, 0) + save.is_late
        for chunk in split_digests(save.chunks):
            known = saving.setdefault(save.storage_id, {})
            require(chunk not in known, f"a chunk of {name} is in two saves")
            known[chunk] = save.save_id
    for hidden_save in state.hidden_saves.values():
        late[hidden_save.storage_id] = late.get(hidden_save.storage_id, 0) + hidden_save.is_late
    for storage in state.storages.values():
        require(storage.disk.saving == saving.get(storage.storage_id, {}), f"{storage.storage_id} saves other chunks")
        require(
            storage.disk.late_saves == late.get(storage.storage_id, 0), f"{storage.storage_id} miscounts late saves"
        )
        require(len(storage.disk.unsaved) <= MOST_UNSAVED, f"too much waits to be saved to {storage.storage_id}")
        require(
            storage.disk.unsaved.keys() <= state.tree.nodes.keys(),
            f"{storage.storage_id} is to save a node that is gone",
        )


def check_neighbours(state: CellState) -> None:
    """Raise InvariantViolated if a worker knows or reads another as a neighbour that is not one."""
    for worker in state.workers.values():
        near = [
            other.worker_id for other in state.workers.values() if other.node == worker.node and other is not worker
        ]
        require(
            all(name in near for name in worker.moves.neighbours), f"{worker.worker_id} knows a neighbour that is none"
        )
        for load in (load for batch in worker.work.batches for load in batch.loads if load.neighbour_id):
            require(
                load.neighbour_id in worker.moves.neighbours, f"{worker.worker_id} reads {load.neighbour_id} unmapped"
            )
            require(not load.storage_id, f"a load of {worker.worker_id} has two sources")
            require(worker.worker_id in state.tree.nodes[load.node].loading, "a load that is over locks a neighbour")
    for timer_id, reads in state.late_reads.items():
        require(timer_id in state.timers, "what a lost worker was reading is locked for ever")
        require(all(read.neighbour_id in state.workers for read in reads), "a neighbour that is gone is read")


def locks_beside_requests(state: CellState, worker: Worker) -> dict[int, int]:
    """Return, by node, the locks of saves and of neighbours that load, or were lost while they did.

    Does not change the state.
    """
    held = [save.node for save in state.saves.values() if save.worker_id == worker.worker_id and save.node]
    for other in state.workers.values():
        for batch in other.work.batches:
            held += [load.node for load in batch.loads if load.neighbour_id == worker.worker_id]
    for reads in state.late_reads.values():
        held += [read.node for read in reads if read.neighbour_id == worker.worker_id]
    locks: dict[int, int] = {}
    for node_id in held:
        for node in ancestors(state.tree, state.tree.nodes[node_id]):
            locks[node.id] = locks.get(node.id, 0) + 1
    return locks
