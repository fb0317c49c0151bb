"""Reading in part, in a model cell: what a disk holds in that form, and what a model worker has of a sparse prefix.

What is computed behind a sparse prefix goes by other identities than what is exact: they begin with the request's own
name in the place of the prefix. So whoever else reads it, matches it, copies it or saves it is seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared.chunks import chunk_bytes, chunk_names, chunk_pages
from shared.ids import chain_pages, chain_root
from shared.messages import storage_events, worker_events
from shared.messages import worker_plans as plans
from shared.messages.base import pack_int32, unpack_int32
from tests.stateful.model_pages import Page, WrongKv, geometry

if TYPE_CHECKING:
    from tests.stateful.model_storage import ModelStorage
    from tests.stateful.model_worker import ModelWorker, RunningRequest

READS_FOR_ALL = 2
"""Reads in part that take from the disk what all of it has."""


def copy_in_parts(storage: ModelStorage) -> bool:
    """Make the second form of every chunk of KV on the disk, forget it of those that are gone, and say so."""
    held, kept = storage.disk.chunks, storage.sparse_disk
    added = [name for name in held if name not in kept]
    gone = [name for name in kept if name not in held]
    kept.update(dict.fromkeys(added))
    for name in gone:
        del kept[name]
    said: dict[str, Any] = {"storage_id": storage.storage_id, "incarnation": storage.incarnation, "form": "sparse"}
    if added:
        storage.outbox.append(storage_events.ChunksListed(**said, chunks=b"".join(added)))
    if gone:
        storage.outbox.append(storage_events.ChunksDropped(**said, chunks=b"".join(gone)))
    return bool(added or gone)


def check_order(request: RunningRequest, order: plans.SparsePrefix, page_size: int) -> None:
    """What must be true of every sparse prefix, whatever led to it."""
    admit = request.admit
    assert order.importance.ratio > 0
    assert order.depth <= order.start < order.end == admit.cached_tokens < len(request.tokens)
    assert order.start % page_size == 0
    table = request.pages[order.start // page_size : order.end // page_size]
    assert table == [-1] * len(table), "a page for what is not loaded"
    assert request.pages.count(-1) == len(table)
    room = len(unpack_int32(order.pages)) * page_size
    assert room >= order.importance.ratio * (order.end - order.start), "no room for what is chosen"
    tokens = pack_int32(request.tokens[: order.end])
    identities = chain_pages(chain_root(order.namespace), tokens, page_size * 4)
    names = chunk_names(identities, chunk_pages(page_size))
    first = order.depth // (chunk_pages(page_size) * page_size)
    assert b"".join(names[first:]) == order.chunks, "other chunks than those of the prompt"


def lossy_root(request: RunningRequest) -> bytes:
    """What stands for everything before the first page behind a sparse prefix."""
    return f"lossy {request.admit.request_id} {request.admit.attempt}".encode()


def read_in_part(worker: ModelWorker, request: RunningRequest) -> worker_events.SparseLoaded | None:
    """Read the sparse prefix of a request into its pages; None where a chunk of it is gone or has rotted."""
    order = request.admit.sparse
    assert order is not None
    storage = worker.cell.storages.get(order.storage_id)
    names = [order.chunks[start : start + 16] for start in range(0, len(order.chunks), 16)]
    if storage is None or worker.fails_sparse_reads:
        return None
    for name in names:
        pages = storage.disk.chunks.get(name)
        if name not in storage.sparse_disk or pages is None or any(page.is_corrupt for page in pages):
            return None
    for number in unpack_int32(order.pages):
        worker.memory[number] = Page(lossy_root(request), [])
    worker.sparse_tokens += order.end - order.start
    return worker_events.SparseLoaded(
        request_id=request.admit.request_id,
        attempt=request.admit.attempt,
        shares=bytes(64 + name[0] % 64 for name in names),
        disk_bytes=len(names) * chunk_bytes(geometry(worker.cell.page_size)) // READS_FOR_ALL,
        read_us=10 * len(names),
    )


def check_chosen(worker: ModelWorker, request: RunningRequest) -> None:
    """Attention is about to read what was chosen: nobody else has written there."""
    order = request.admit.sparse
    for number in unpack_int32(order.pages) if order is not None else ():
        page = worker.memory.get(number)
        if page is None or page.before != lossy_root(request):
            raise WrongKv(f"{worker.worker_id} page {number} holds {page} in the place of what was chosen")
