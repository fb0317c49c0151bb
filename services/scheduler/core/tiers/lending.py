"""Host memory and disks of other nodes, from which a waiting request's prefix may be read.

Storages that share by the same engine read one another's host pools (``StorageJoined.shares``). Such a fetch is ordered
like a fetch from the disk; the lender is told nothing, and its copies are locked until the fetch is over. KV of callers
with a key of their own stays out of it, because host memory, and the network path from it, is not encrypted.

For requests that wait on another node, a node first fetches chunks that only its disk has into its own host memory, and
then lends them as any others there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.cache.residency import lock_host, unlock_host
from services.scheduler.core.rates import (
    disk_bytes_per_us,
    has_compute_speed,
    lender_bytes_per_us,
    load_us,
    recompute_us,
)
from services.scheduler.core.tiers.under_way import NOWHERE
from shared.chunks import chunk_pages, chunk_tokens
from shared.messages.base import pack_int32
from shared.messages.storage_plans import Lender

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.cache.identities import ChunkNames
    from services.scheduler.core.cache.prefix_tree import Node, Path
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.tiers.under_way import Fetch


@dataclass(frozen=True, slots=True)
class Loan:
    """Pages of ``path`` that are in the host pool of ``lender``, from the first that is needed up to chunk ``end``."""

    lender: Storage
    path: Path
    end: int


@dataclass(frozen=True, slots=True)
class HeldLoan:
    """A loan whose copies are locked, from the node that begins ``depth`` tokens below the root down to ``node``."""

    node: int
    depth: int
    order: Lender


def may_borrow(state: CellState, storage: Storage) -> bool:
    """Return whether there is another storage whose host pool this one can read. Does not change the state."""
    return any(lends_to(other, storage) for other in state.storages.values())


def lends_to(other: Storage, storage: Storage) -> bool:
    """Return whether ``storage`` can read the host pool of ``other``, on another node. Does not change the state."""
    return (
        bool(other.shares)
        and other.storage_id != storage.storage_id
        and other.shares == storage.shares
        and other.node != storage.node
        and other.pool is not None
        and not other.is_released
    )


def find_loan(
    state: CellState, request: Request, storage: Storage, path: Path, names: ChunkNames, covered_pages: int, most: int
) -> Loan | None:
    """Return the longest run of chunks behind the covered pages that one other storage has in host memory.

    It has at most ``most`` chunks, all whole. Of equals it is the storage's that joined first; None where no storage
    has the next chunk whole. Does not change the state.
    """
    if not may_be_lent(request, storage):
        return None
    best: Loan | None = None
    least = covered_pages // names.pages_each
    for lender, reached in _reaches(state, storage, path, covered_pages):
        end = min(names.count, least + most, reached)
        if end > (least if best is None else best.end):
            best = Loan(lender, path, end)
    return best


def lies_elsewhere(state: CellState, request: Request, worker: Worker, path: Path, covered_pages: int) -> bool:
    """Return whether a request that is next may wait for a loan of the KV behind its covered pages.

    Another node must have it in host memory, and the request's wait for fetches must not be over. Does not change the
    state.
    """
    storage = state.storage_of(worker)
    if storage is None or request.patience.is_fetch_over or not may_be_lent(request, storage):
        return False
    least = max(1, state.config.min_prefetch_tokens)
    reached = max((end for _, end in _reaches(state, storage, path, covered_pages)), default=0)
    return (reached * chunk_pages(state.tree.page_size) - covered_pages) * state.tree.page_size >= least


def borrowing(state: CellState, request: Request, worker: Worker, path: Path, covered: int) -> tuple[int, float]:
    """Return (tokens behind ``covered`` others that other nodes can lend, µs until they are on the device).

    (0, 0.0) where there are too few. Does not change the state.
    """
    storage, geometry = state.storage_of(worker), state.geometry
    if storage is None or geometry is None or not may_be_lent(request, storage):
        return 0, 0.0
    page_size = state.tree.page_size
    ends = [end for _, end in _reaches(state, storage, path, covered // page_size)]
    tokens = max(ends, default=0) * chunk_tokens(page_size) - covered
    if tokens < max(1, state.config.min_prefetch_tokens):
        return 0, 0.0
    return tokens, tokens * geometry.token_bytes / lender_bytes_per_us(storage) + load_us(state, worker, tokens)


def is_worth_borrowing(
    state: CellState, worker: Worker, storage: Storage, covered: int, tokens: int, on_disk: int
) -> bool:
    """Return whether borrowing ``tokens`` behind ``covered`` others beats computing and the node's own disk.

    The disk has ``on_disk`` of them. Computing is weighed as :func:`beats_computing` says. Does not change the state.
    """
    geometry = state.geometry
    if geometry is None:
        return False
    rate = lender_bytes_per_us(storage)
    if on_disk >= tokens and disk_bytes_per_us(storage) > rate:
        return False
    return beats_computing(state, worker, covered, tokens, tokens * geometry.token_bytes / rate)


def beats_computing(state: CellState, worker: Worker, covered: int, tokens: int, needed_us: float) -> bool:
    """Return whether ``tokens`` behind ``covered`` others are to be brought in ``needed_us`` instead of computed.

    They are, too, where no speed of computing is known, and where ``restoring`` names one means: then nothing is
    weighed, as for what the node's own disk has. Does not change the state.
    """
    if state.config.restoring != "planned" or not has_compute_speed(state, worker):
        return True
    return needed_us < recompute_us(state, worker, covered, tokens)


def find_on_disks(
    state: CellState, request: Request, storage: Storage, names: ChunkNames, first: int, most: int
) -> tuple[Storage, int] | None:
    """Return another storage whose disk has chunk ``first``, and the end of its run of chunks from there.

    None where the own disk has that chunk, or no other. The run is of at most ``most`` chunks; of several, the longest
    is returned. Does not change the state.
    """
    if not may_be_lent(request, storage) or first >= names.count or names[first] in storage.disk.chunks:
        return None
    best: tuple[Storage, int] | None = None
    for lender in state.storages.values():
        if not lends_to(lender, storage) or lender.fetching.late:
            continue
        end, chunks = first, lender.disk.chunks
        while end < min(names.count, first + most) and names[end] in chunks:
            end += 1
        if end > (first if best is None else best[1]):
            best = lender, end
    return best


def raising(state: CellState, request: Request, worker: Worker, names: ChunkNames, covered: int) -> tuple[int, float]:
    """Return (tokens behind ``covered`` others on another node's disk, µs until they are on the worker's device).

    (0, 0.0) where there are too few. Does not change the state.
    """
    storage, size = state.storage_of(worker), chunk_tokens(state.tree.page_size)
    found = None
    if storage is not None:
        found = find_on_disks(state, request, storage, names, covered // size, names.count)
    if storage is None or found is None:
        return 0, 0.0
    lender, end = found
    tokens = end * size - covered
    if tokens < max(1, state.config.min_prefetch_tokens):
        return 0, 0.0
    return tokens, raising_us(state, lender, storage, tokens) + load_us(state, worker, tokens)


def raising_us(state: CellState, lender: Storage, storage: Storage, tokens: int) -> float:
    """Return the time in µs until ``tokens`` of a lender's disk are in a storage's host memory.

    The disk and then the network are counted one after the other. Does not change the state.
    """
    nbytes = 0 if state.geometry is None else tokens * state.geometry.token_bytes
    return nbytes / disk_bytes_per_us(lender) + nbytes / lender_bytes_per_us(storage)


def hold_loan(state: CellState, loan: Loan, covered_page: int, first_page: int, end_page: int) -> HeldLoan:
    """Lock the lender's copies of pages [covered_page, end_page) for a fetch that begins with ``first_page``."""
    name, page_size = loan.lender.storage_id, state.tree.page_size
    pages = pack_int32([NOWHERE] * (covered_page - first_page))
    held: list[Node] = []
    for node, start, end in _within(loan.path, covered_page, end_page):
        above = node.depth // page_size
        pages += node.host_pages(name)[(start - above) * PAGE_NUMBER_BYTES : (end - above) * PAGE_NUMBER_BYTES]
        lock_host(node, name)
        held.append(node)
    order = Lender(storage_id=name, incarnation=loan.lender.incarnation, pages=pages)
    return HeldLoan(held[-1].id, held[0].depth, order)


def let_go(state: CellState, held: HeldLoan) -> None:
    """Undo :func:`hold_loan`, because no fetch was ordered."""
    _unlock(state, held.order.storage_id, held.node, held.depth)


def end_loan(state: CellState, fetch: Fetch) -> None:
    """Release the lender's copies of a fetch that is over. Repeats are harmless."""
    if fetch.lent_node:
        node, fetch.lent_node = fetch.lent_node, 0
        _unlock(state, fetch.lender_id, node, fetch.lent_from)


def forget_lender(state: CellState, storage: Storage) -> None:
    """Forget a storage that is lost with its copies: nothing is locked there, and its readers find out."""
    for fetch in state.fetches.values():
        if fetch.lender_id == storage.storage_id:
            fetch.lent_node = 0


def lent_nodes(state: CellState, node_id: int, depth: int) -> Iterator[Node]:
    """Yield the nodes whose copies a fetch reads, deepest first. Does not change the state.

    They may have been cut since. None is left where one above them failed verification and went with all below it.
    """
    node = state.tree.nodes.get(node_id)
    while node is not None and node.parent and node.depth >= depth:
        yield node
        node = state.tree.nodes[node.parent]


def _unlock(state: CellState, lender_id: str, node_id: int, depth: int) -> None:
    for node in list(lent_nodes(state, node_id, depth)):
        unlock_host(state, node, state.storages[lender_id])


def may_be_lent(request: Request, storage: Storage) -> bool:
    """Return whether a storage may have KV of a request from other nodes. Does not change the state."""
    return bool(storage.shares) and not request.submit.key_id and not request.prefetch.is_loan_over


def _reaches(state: CellState, storage: Storage, path: Path, covered_pages: int) -> Iterator[tuple[Storage, int]]:
    """Yield (lender, end of its whole chunks of ``path`` behind the covered pages, in chunks from the root)."""
    each = chunk_pages(state.tree.page_size)
    for lender in state.storages.values():
        if lends_to(lender, storage):
            yield lender, end_of_copies(lender, path, covered_pages) // each


def end_of_copies(storage: Storage, path: Path, first_page: int) -> int:
    """Return the end of the pages of ``path`` from ``first_page`` on with a sound copy in a storage's host memory.

    ``first_page`` where it has none. Does not change the state.
    """
    name, position, reached = storage.storage_id, 0, first_page
    for node, pages in path:
        if position + pages > first_page:
            if position > reached or name not in node.host or name in node.quarantined:
                break
            reached = position + pages
        position += pages
    return reached


def _within(path: Path, first_page: int, end_page: int) -> Iterator[tuple[Node, int, int]]:
    """Yield (node, first page, end) of the parts of a path within [first_page, end_page)."""
    position = 0
    for node, pages in path:
        start, end = max(position, first_page), min(position + pages, end_page)
        if start < end:
            yield node, start, end
        position += pages
