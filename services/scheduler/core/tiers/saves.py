"""Saves, to the tiers below host memory: ordered chunk by chunk of a path, answered by the storage, with a deadline.

A save that reads a device keeps the path that it reads locked there until the storage answers, however late that is.
Its reads of host memory need no lock: the storage reads before it carries out a later order. How much is in flight is
bounded, per storage and per device; saves without room wait in line until others are answered.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from services.scheduler.core.cache.heat import hotness
from services.scheduler.core.cache.prefix_tree import Node, Path, namespace_of
from services.scheduler.core.cache.residency import copies_of, devices_of, lock_path, unlock_path
from services.scheduler.core.cache.unsaved import MOST_UNSAVED, put_off
from services.scheduler.core.tiers.catalogue import chunks_added, chunks_gone
from services.scheduler.core.tiers.save_runs import ChunkRun, depth_in_chunks, end_in_chunks, path_to, runs_to_save
from services.scheduler.core.tiers.under_way import Save
from shared.compact_messages import chunks_saved, compact_save
from shared.ids import DIGEST_BYTES, split_digests
from shared.messages.storage_plans import SaveChunks

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from shared.messages.requests import SubmitRequest
    from shared.messages.storage_events import ChunksSaved

ORDER_CHUNKS = 64
"""Most chunks of one order."""

SAVING_CHUNKS = 512
"""Most chunks in flight to one storage: backups wait behind those that it has not read yet."""

PUT_OFF_A_TURN = 16
"""Most paths in line that are tried after one answer: each costs as much as the end of a request."""

_HELD_SHARE = 4
"""Saves lock at most a quarter of a device's pages, or a single path: requests need the rest."""

_TAKEN_REMEMBERED = 16_384


def saves_below(storage: Storage) -> bool:
    """Return whether the storage has a disk or an object store to save to."""
    return storage.disk.budget_bytes > 0 or storage.disk.has_remote


def may_save(storage: Storage) -> bool:
    """Return whether the storage may be asked to save now: it has somewhere to, and answered all saves in time."""
    return saves_below(storage) and not storage.disk.late_saves


def save_path(step: Step, storage: Storage, worker: Worker | None, path: Path, first: int = 0) -> None:
    """Have every whole chunk of a path saved, from number ``first`` on, that is neither saved nor being saved.

    ``path`` is as :func:`prefix_match.match_prefix` returns it. Pages are read from the host pool or, where they are
    not in it, from the worker. Chunks without room now are saved later.
    """
    if not path or not saves_below(storage):
        return
    left = _save_as_far_as_may_be(step, storage, worker, path, first)
    if left:
        put_off(step.state, storage, path[-1][0], left[0].first, sum(len(run.names) for run in left))


def _save_as_far_as_may_be(
    step: Step, storage: Storage, worker: Worker | None, path: Path, first: int
) -> list[ChunkRun]:
    """Save the runs that have room; return the others."""
    state = step.state
    worker_id = "" if worker is None else worker.worker_id
    runs = runs_to_save(state, path, storage, worker_id, first, ORDER_CHUNKS)
    for index, run in enumerate(runs):
        if storage.disk.late_saves or len(storage.disk.saving) + len(run.names) > SAVING_CHUNKS:
            return runs[index:]
        if not _may_hold(state, worker, run.reads):
            return runs[index:]
        _open(step, storage, worker, run)
    return []


def save_put_off(step: Step, storage: Storage) -> None:
    """Save paths that wait in line, as far as there is room now."""
    state = step.state
    if state.config.disk_writes == "off":
        storage.disk.unsaved = {}
    for _ in range(PUT_OFF_A_TURN):
        if not storage.disk.unsaved or not may_save(storage):
            return
        node_id, first = next(iter(storage.disk.unsaved.items()))
        path = path_to(state, state.tree.nodes[node_id])
        left = _save_as_far_as_may_be(step, storage, _holder_of(state, storage, path), path, first)
        if left:
            storage.disk.unsaved[node_id] = left[0].first
            return
        del storage.disk.unsaved[node_id]


def save_what_devices_hold(step: Step, storage: Storage) -> None:
    """Have a storage that can read pages from now on save KV computed without it, used last first.

    That is KV from while it was away, or from before it joined a new cell. At most as many paths as the line holds;
    chunks that have been on its disk all the time only cost a look-up.
    """
    state = step.state
    if state.config.disk_writes != "through" or not saves_below(storage):
        return
    near = {name for name, worker in state.workers.items() if worker.node == storage.node}
    ends = [
        node
        for node in state.tree.nodes.values()
        if any(name in near and name not in node.below for name in node.device)
    ]
    ends.sort(key=lambda node: node.last_use, reverse=True)
    whole = ((node, chunks) for node in ends if (chunks := end_in_chunks(state, node)))
    for node, chunks in islice(whole, MOST_UNSAVED):
        put_off(state, storage, node, 0, chunks)
    save_put_off(step, storage)


def save_leaving(step: Step, storage: Storage, node: Node) -> None:
    """Save the chunks that end in a node whose host copy is about to go, if ``disk_writes`` is "on_evict".

    The first of them may begin above the node: those pages come from host memory or a device of the storage's node.
    """
    state = step.state
    if state.config.disk_writes != "on_evict" or not may_save(storage):
        return
    first = depth_in_chunks(state, node)
    if end_in_chunks(state, node) <= first:
        return
    path = path_to(state, node)
    left = _save_as_far_as_may_be(step, storage, _holder_of(state, storage, path[:-1]), path, first)
    # The copy is gone before there is room.
    state.count("saves_refused_chunks", sum(len(run.names) for run in left))


def _holder_of(state: CellState, storage: Storage, path: Path) -> Worker | None:
    """Return a worker of the storage's node with the lowest node of a path outside its host pool, or None."""
    for above, _ in reversed(path):
        if storage.storage_id not in copies_of(state, above) or storage.storage_id in above.quarantined:
            holders = [state.workers[name] for name in devices_of(state, above)]
            near = [worker for worker in holders if worker.node == storage.node]
            return near[0] if near else None
    return None


def _may_hold(state: CellState, worker: Worker | None, reads: Node | None) -> bool:
    """Return whether saves may lock the path to this node on the worker, too."""
    if worker is None or reads is None:
        return True
    held = dict.fromkeys(save.node for save in state.saves.values() if save.worker_id == worker.worker_id and save.node)
    if not held or reads.id in held:
        return True
    held[reads.id] = None
    pages = sum(_pages_to_end(state, state.tree.nodes[node_id]) for node_id in held)
    return pages * _HELD_SHARE <= worker.pool.total


def _pages_to_end(state: CellState, node: Node) -> int:
    return node.end // state.tree.page_size


def _open(step: Step, storage: Storage, worker: Worker | None, run: ChunkRun) -> None:
    state = step.state
    save_id = state.next_save
    state.next_save += 1
    reader = worker if run.reads is not None else None
    if reader is not None and run.reads is not None:
        lock_path(state, run.reads, reader)
    timer_id = step.set_timer(f"save.{save_id}", "save", str(save_id), state.config.save_deadline_ms)
    save = Save(
        save_id,
        storage.storage_id,
        "" if reader is None else reader.worker_id,
        0 if run.reads is None else run.reads.id,
        b"".join(run.names),
        timer_id,
    )
    state.saves[save_id] = save
    storage.disk.saving |= dict.fromkeys(run.names, save_id)
    state.count("saves_started")
    namespace = namespace_of(state.tree, run.node)
    order = SaveChunks(
        save_id=save_id,
        namespace=namespace,
        depth=run.depth,
        tokens=run.tokens,
        parent=run.parent,
        identities=run.identities,
        host_pages=run.host_pages,
        device_pages=run.device_pages,
        worker_id=save.worker_id,
        worker_incarnation="" if reader is None else reader.incarnation,
        key_id=state.key_ids.get(namespace, ""),
        value=hotness(state, run.node),
        quota=state.quotas.disk_quota(state.tree.owner_of(namespace)),
    )
    step.to_storage(storage, compact_save(order) if storage.takes_compact else order)


def finish_save(step: Step, storage: Storage, save: Save, message: ChunksSaved) -> None:
    """Finish a save that the storage answered: it reads no more of it, and its disk has the chunks it reports."""
    state = step.state
    step.touch(save.worker_id)
    step.cancel_timer(save.timer_id)
    storage.disk.late_saves -= save.is_late
    if not save.is_late:
        state.count("saves_failed" if message.error else "saves_done")
    _close(state, storage, save)
    saved = chunks_saved(message, save.chunks)
    state.count("saved_chunks", len(saved) // DIGEST_BYTES)
    chunks_gone(state, storage, message.dropped)
    chunks_added(state, storage, saved)
    if not message.error and save.save_id >= storage.disk.taken_from:
        remember_taken(storage, save.chunks)


def expire_save(step: Step, save: Save) -> None:
    """Expire a save: the storage gets no further save before it answers. Pages that it may still read stay locked."""
    state = step.state
    state.count("saves_failed")
    save.expire()
    state.storages[save.storage_id].disk.late_saves += 1


def abandon_saves_of_storage(step: Step, storage: Storage) -> None:
    """Abandon the saves of a storage that is gone, and release the device pages that they read."""
    state = step.state
    for save in [save for save in state.saves.values() if save.storage_id == storage.storage_id]:
        step.cancel_timer(save.timer_id)
        step.touch(save.worker_id)
        state.count("saves_failed", 0 if save.is_late else 1)
        _close(state, storage, save)
    storage.disk.late_saves = 0
    storage.disk.taken, storage.disk.unsaved = {}, {}


def abandon_saves_of_worker(state: CellState, worker: Worker) -> None:
    """Abandon the reads of a worker that is gone with its pages and locks; chunks read by then are good."""
    for save in state.saves.values():
        if save.worker_id == worker.worker_id:
            save.worker_id, save.node = "", 0


def remember_taken(storage: Storage, names: bytes) -> None:
    """Remember chunks (16 bytes each) that the storage has somewhere, if not on its disk.

    They are not offered to it again.
    """
    taken = storage.disk.taken
    taken |= dict.fromkeys(name for name in split_digests(names) if name not in storage.disk.chunks)
    while len(taken) > _TAKEN_REMEMBERED:
        del taken[next(iter(taken))]


def forget_taken(state: CellState, storage: Storage) -> None:
    """Forget the chunks taken: chunks below the host pool are being deleted, and may be saved again."""
    storage.disk.taken, storage.disk.taken_from = {}, state.next_save


def remember_key(state: CellState, message: SubmitRequest) -> None:
    """Note whose key encrypts this request's namespace. Unused namespaces are forgotten now and then."""
    if not message.key_id or message.namespace in state.key_ids:
        return
    state.key_ids[message.namespace] = message.key_id
    state.tree.sealed[message.namespace] = None
    if len(state.key_ids) > 2 * (len(state.tree.roots) + len(state.requests)) + 64:
        used = dict.fromkeys(state.tree.roots) | dict.fromkeys(
            request.submit.namespace for request in state.requests.values()
        )
        state.key_ids = {name: key for name, key in state.key_ids.items() if name in used or name == message.namespace}
        state.tree.sealed = dict.fromkeys(state.key_ids)


def _close(state: CellState, storage: Storage, save: Save) -> None:
    """Forget a save, and unlock the path that it read."""
    del state.saves[save.save_id]
    for name in split_digests(save.chunks):
        storage.disk.saving.pop(name, None)
    worker = state.workers.get(save.worker_id)
    if worker is not None and save.node:
        unlock_path(state, state.tree.nodes[save.node], worker)
