"""How a simulated storage saves chunks, some time after which it may keep them a second time to be read in part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.chunks import chunk_pages
from shared.compact_messages import whole_save
from shared.messages import storage_events, storage_plans
from shared.messages.base import unpack_int32
from shared.messages.pools import HIDDEN
from tests.simulation.contents import Page, WrongContent, pieces
from tests.stateful.model_saves import check_save

if TYPE_CHECKING:
    from tests.simulation.storage_process import StorageProcess


def save(storage: StorageProcess, told: storage_plans.SaveOrder) -> None:
    """Read the pages of an order, write the chunks that are whole, and answer."""
    size = storage.cell.scenario.shape.page_size
    is_compact, order = isinstance(told, storage_plans.SaveTokens), whole_save(told, size)
    check_save(order, size, storage.cell.submitted.values())
    pages = _read(storage, order)
    identities = pieces(order.identities)
    # What was read of a device is kept only if the cell still counted on this storage when it had been read.
    may_keep = not order.worker_id or storage.is_confirmed()
    storage.cell.seen["saves_withheld"] += not may_keep
    rates = storage.cell.scenario.rates
    is_ok = may_keep and not storage.disk.is_failing and storage.chance.random() >= rates.bad_saves
    is_partial = storage.chance.random() < rates.bad_saves
    saved, dropped, each = [], [], chunk_pages(size)
    chunks = storage.disk.form(order.form)
    for start in range(0, len(pages), each):
        whole = [page for page in pages[start : start + each] if page is not None]
        if not is_ok or len(whole) < each or (is_partial and start):
            continue
        name = identities[start + each - 1]
        if chunks.room:
            dropped += chunks.put(name, whole, identities[start : start + each])
            saved.append(name)
        if storage.cell.scenario.shape.has_remote and not storage.cell.is_remote_away:
            storage.cell.remote.form(order.form).put(name, whole, identities[start : start + each])
    kept = [name for name in saved if name in chunks.held]
    is_all = is_compact and len(kept) * each == len(pages)
    storage.tell(
        storage_events.ChunksSaved,
        save_id=order.save_id,
        chunks=b"" if is_all else b"".join(kept),
        is_all=is_all,
        dropped=b"".join(dropped),
        error="" if is_ok else "made to fail",
        nbytes=512 * len(saved),
        seconds=0.001,
    )
    if order.form == "kv":
        storage.forget_parts(dropped)
        if storage.cell.scenario.shape.keeps_sparse:
            storage.later(storage.chance.randint(100, 100_000), lambda: _keep_parts(storage, saved))


def _read(storage: StorageProcess, order: storage_plans.SaveChunks) -> list[Page | None]:
    """The pages of an order as they are now; None where one cannot be had."""
    pool = storage.hidden_pool if order.form == HIDDEN else storage.pool
    device = storage.devices.get((order.worker_id, order.worker_incarnation))
    places = zip(unpack_int32(order.host_pages), unpack_int32(order.device_pages), strict=True)
    pages: list[Page | None] = []
    for (host, theirs), identity in zip(places, pieces(order.identities), strict=True):
        if host < 0:
            pages.append(storage.device_page(device, theirs, identity))
            continue
        copy = pool.memory.get(host) if pool is not None else None
        if copy is not None and copy.is_good(identity):
            pages.append(copy.page)
            continue
        if storage.is_listed and not (copy is not None and copy.is_corrupt):
            raise WrongContent(f"host page {host} of {storage.name} holds {copy}, and not what is to be saved")
        pages.append(None)
    return pages


def _keep_parts(storage: StorageProcess, names: list[bytes]) -> None:
    """Chunks that are still there can be read in part from now on."""
    made = [name for name in names if name in storage.disk.kv.held and name not in storage.disk.sparse]
    storage.disk.sparse |= dict.fromkeys(made)
    if made:
        storage.tell(storage_events.ChunksListed, chunks=b"".join(made), form="sparse")
