"""Hidden leases: pages of a node's hidden pool in which a worker saves what a request's KV can be restored from.

A request that computes something new gets one when it is admitted, for whole chunks behind those kept already, and
more pages with its decode room (HCache 4.2.2). The worker answers once, when the sequence leaves it; the chunks that it
sealed until then are saved (:mod:`hidden_saves`). A lease that could not be given whole is not extended: hidden states
computed beyond it are lost. A lease that is not answered in time after its request left is taken back, as are those
of a worker that is lost: their later readers verify them.

It is for chunks in a row that the request computes whole and that are neither kept nor being saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.heat import hotness
from services.scheduler.core.cache.identities import ChunkNames
from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, ancestors, page_count
from services.scheduler.core.hidden.hidden_form import can_restore, is_worth_keeping
from services.scheduler.core.hidden.hidden_in_flight import OpenHiddenLease
from services.scheduler.core.hidden.hidden_saves import close_lease, give_back_hidden, save_hidden
from services.scheduler.core.tiers.catalogue import is_hidden_kept
from services.scheduler.core.tiers.saves import may_save
from shared.chunks import chunk_names, chunk_pages, chunk_tokens
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, chain_pages, chain_root, split_digests
from shared.messages.worker_plans import HiddenLease

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from shared.messages.worker_events import HiddenSaved


def open_lease(step: Step, request: Request, worker: Worker) -> HiddenLease | None:
    """Open a lease for a request that was just admitted; None where it is not worth it or has no room for a chunk."""
    state = step.state
    storage = _storage_to_save_to(state, request, worker)
    if storage is None or storage.hidden.pool is None:
        return None
    names = names_of_chunks(state, request)
    first = first_new_chunk(state, storage, request, names)
    end = end_of_new_chunks(state, storage, request, names, first)
    if end <= first:
        return None
    each = chunk_pages(state.tree.page_size)
    chunks = min(end - first, room_for_lease(storage, each, held=0))
    pages = storage.hidden.pool.allocate(chunks * each) if chunks > 0 else None
    if pages is None:
        state.count("hidden_leases_without_room")
        return None
    lease = OpenHiddenLease(
        lease_id=state.next_lease,
        storage_id=storage.storage_id,
        worker_id=worker.worker_id,
        namespace=request.submit.namespace,
        key_id=request.submit.key_id,
        depth=first * chunk_tokens(state.tree.page_size),
        parent=names[first - 1] if first else chain_root(request.submit.namespace),
        pages=pages,
        request_id=request.request_id,
    )
    state.next_lease += 1
    state.leases[lease.lease_id] = lease
    request.hidden.lease = lease.lease_id
    _claim(storage, lease, [names[index] for index in range(first, min(first + chunks, names.count))])
    state.count("hidden_leases")
    return HiddenLease(
        lease_id=lease.lease_id,
        storage_id=storage.storage_id,
        depth=lease.depth,
        pages=pages,
        parent=lease.parent,
    )


def more_hidden_pages(step: Step, request: Request, granted: int) -> bytes:
    """Return more pages (packed) for chunks that a request can complete since it got ``granted`` more device pages."""
    state = step.state
    lease = state.leases.get(request.hidden.lease)
    if lease is None:
        return b""
    storage, each = state.storages[lease.storage_id], chunk_pages(state.tree.page_size)
    held = len(lease.pages) // PAGE_NUMBER_BYTES // each
    end = lease.depth // chunk_tokens(state.tree.page_size) + held
    if storage.hidden.pool is None or end < chunks_to_come(state, request, granted):
        return b""
    missing = chunks_to_come(state, request) - end
    chunks = min(missing, room_for_lease(storage, each, held))
    pages = storage.hidden.pool.allocate(chunks * each) if chunks > 0 else None
    if pages is None:
        state.count("hidden_leases_without_room", int(missing > 0))
        return b""
    lease.pages += pages
    return pages


def leave_lease(step: Step, request: Request, tokens: bytes, computed: int, *, is_good: bool) -> None:
    """Leave the lease of a request that leaves its worker; KV of the first ``computed`` of ``tokens`` was computed.

    Chunks completed since its admission are claimed, too, as far as its lease reaches, so that their KV is not saved.
    Unless ``is_good``, nothing of the lease is saved.
    """
    state = step.state
    lease = state.leases.get(request.hidden.lease)
    request.hidden.lease = 0
    if lease is None:
        return
    storage = state.storages[lease.storage_id]
    lease.request_id = ""
    if not is_good:
        lease.call_off()
    timer_id = f"lease.{lease.lease_id}"
    lease.timer_id = step.set_timer(timer_id, "hidden_lease", str(lease.lease_id), state.config.save_deadline_ms)
    if lease.is_called_off:
        _disclaim(storage, lease)
        return
    _claim(storage, lease, _completed(state, lease, tokens, computed))
    lease.value = _value(state, lease, tokens)


def hidden_saved(step: Step, worker: Worker, message: HiddenSaved) -> None:
    """Settle a lease that the worker is done with: sealed chunks are saved, the other pages are free."""
    state = step.state
    lease = state.leases.get(message.lease_id)
    if lease is None or lease.worker_id != worker.worker_id:
        state.count("stale_inputs")
        return
    storage, request = state.storages[lease.storage_id], state.requests.get(lease.request_id)
    if request is not None:
        if request.is_poisoned:
            lease.call_off()
        lease.value = _value(state, lease, request.tokens)
    close_lease(step, lease)
    is_sound = _is_sound(state, lease, message)
    if not is_sound:
        state.count("malformed_inputs")
    state.count("hidden_leases_answered")
    save_hidden(step, storage, lease, message.tokens if is_sound and not lease.is_called_off else b"")


def expire_lease(step: Step, lease: OpenHiddenLease) -> None:
    """Take back a lease whose worker did not answer in time after the sequence had left it."""
    step.state.count("hidden_leases_expired")
    _take_back(step, lease)


def drop_leases_of_worker(step: Step, worker: Worker) -> None:
    """Take back the leases of a worker that is gone: the contents of its pages stay unknown."""
    for lease in [lease for lease in step.state.leases.values() if lease.worker_id == worker.worker_id]:
        _take_back(step, lease)


def _storage_to_save_to(state: CellState, request: Request, worker: Worker) -> Storage | None:
    """Return the storage to which a request's hidden states are to be saved; None where they are not.

    Only chunks on a disk are known afterwards, so without a disk hidden states could not be found again.
    """
    config = state.config
    is_wanted = config.disk_writes != "off" and config.restoring != "kv" and request.submit.cache.write
    # Restoring would have to project with the adapter, too.
    is_plain = request.sparse.span is None and not request.submit.adapter
    storage = state.storage_of(worker) if is_wanted and is_plain else None
    if storage is None or storage.hidden.handle is None or not storage.disk.budget_bytes or not may_save(storage):
        return None
    if not can_restore(worker, storage.hidden.handle.geometry) or not is_worth_keeping(state, storage):
        return None
    return storage


def _completed(state: CellState, lease: OpenHiddenLease, tokens: bytes, computed: int) -> list[bytes]:
    """Return the names of chunks of a lease that were completed and are not claimed by it yet."""
    size, each = chunk_tokens(state.tree.page_size), chunk_pages(state.tree.page_size)
    known = len(lease.names) // DIGEST_BYTES
    start = lease.depth + known * size
    end = min(lease.depth + len(lease.pages) // PAGE_NUMBER_BYTES * state.tree.page_size, computed // size * size)
    above = lease.names[-DIGEST_BYTES:] or lease.parent
    span = tokens[start * TOKEN_BYTES : max(start, end) * TOKEN_BYTES]
    return chunk_names(chain_pages(above, span, state.tree.page_token_bytes), each)


def _claim(storage: Storage, lease: OpenHiddenLease, names: list[bytes]) -> None:
    """Claim chunks that follow the lease's own, up to the first that another lease has."""
    for name in names:
        if name in storage.hidden.saving:
            return
        storage.hidden.saving[name] = lease.lease_id
        lease.names += name


def _disclaim(storage: Storage, lease: OpenHiddenLease) -> None:
    """Let others save the lease's chunks."""
    for name in split_digests(lease.names):
        if storage.hidden.saving.get(name) == lease.lease_id:
            del storage.hidden.saving[name]
    lease.names = b""


def _value(state: CellState, lease: OpenHiddenLease, tokens: bytes) -> float:
    """Return the hotness of the deepest node of a sequence; 0 where the tree has nothing of it."""
    path = match_prefix(state.tree, lease.namespace, tokens, len(tokens) // state.tree.page_token_bytes)
    return hotness(state, path[-1][0]) if path else 0.0


def _is_sound(state: CellState, lease: OpenHiddenLease, message: HiddenSaved) -> bool:
    """Return whether an answer is about whole chunks of the leased pages, and the tokens that they were leased for."""
    size, each = chunk_tokens(state.tree.page_size), chunk_pages(state.tree.page_size)
    has_room = 0 <= message.chunks <= len(lease.pages) // PAGE_NUMBER_BYTES // each
    if not has_room or len(message.tokens) != message.chunks * size * TOKEN_BYTES:
        return False
    names = chunk_names(chain_pages(lease.parent, message.tokens, state.tree.page_token_bytes), each)
    known = split_digests(lease.names)
    return all(name == expected for name, expected in zip(names, known, strict=False))


def _take_back(step: Step, lease: OpenHiddenLease) -> None:
    close_lease(step, lease)
    give_back_hidden(step.state, step.state.storages[lease.storage_id], lease.pages)


_LARGEST_SHARE = 4
"""One request gets at most one in so many pages of a hidden pool, or a single chunk."""


def names_of_chunks(state: CellState, request: Request) -> ChunkNames:
    """Return the names of the whole chunks of a request's tokens."""
    tree = state.tree
    nodes = reversed(ancestors(tree, tree.nodes[request.node])) if request.node else ()
    path = [(node, page_count(tree, node)) for node in nodes]
    tokens = request.tokens
    return ChunkNames(tree, request.submit.namespace, tokens, path, len(tokens) // tree.page_token_bytes)


def first_new_chunk(state: CellState, storage: Storage, request: Request, names: ChunkNames) -> int:
    """Return the first chunk that the request computes whole and that is neither kept nor being saved.

    It is behind the last hole of the run that the request is restored from: a worker captures tokens in a row, and
    tokens restored between two holes do not pass its model.
    """
    known = request.planned if request.hidden.run is None else max(request.planned, request.hidden.run.goal)
    first = -(-known // chunk_tokens(state.tree.page_size))
    while first < names.count and _is_kept(storage, names[first]):
        first += 1
    return first


def _is_kept(storage: Storage, name: bytes) -> bool:
    return is_hidden_kept(storage, name) or name in storage.disk.chunks or name in storage.disk.saving


def end_of_new_chunks(state: CellState, storage: Storage, request: Request, names: ChunkNames, first: int) -> int:
    """Return the index behind the last chunk that the request can complete, up to one that another saves.

    ``first`` where that is behind the prompt: the tokens before it are not known yet, so there is no chunk.
    """
    if first > names.count:
        return first
    end = chunks_to_come(state, request)
    for index in range(first, min(end, names.count)):
        if names[index] in storage.hidden.saving:
            return index
    return end


def chunks_to_come(state: CellState, request: Request, less: int = 0) -> int:
    """Return the number of whole chunks, from the root, that fit the request's device pages without ``less`` of them.

    The last token of the longest answer is sampled and never computed.
    """
    room = (len(request.pages) // PAGE_NUMBER_BYTES - less) * state.tree.page_size
    return min(room, request.max_tokens_total - 1) // chunk_tokens(state.tree.page_size)


def room_for_lease(storage: Storage, each: int, held: int) -> int:
    """Return for how many more chunks a lease of ``held`` chunks may take pages of the hidden pool."""
    pool = storage.hidden.pool
    if pool is None:
        return 0
    most = max(1, pool.total // _LARGEST_SHARE // each)
    return min(pool.free // each, most - held)
