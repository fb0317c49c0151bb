"""Fetches of KV, disk or object store to host pool: how much of a run there is room for, and the order for it.

Fetches in flight, and fetched pages of requests that still wait, may take ``prefetch_fraction`` of the pool, or one
request's KV: more would be evicted before its turn. Pages fetched for requests behind the one that is next take no room
from it: it would have to compute at once, while they can still have them fetched again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.cache.residency import HOST, host_pool, lock_host, unlock_host
from services.scheduler.core.rates import queued_bytes
from services.scheduler.core.tiers.host_admission import displace_colder, take_host_pages
from services.scheduler.core.tiers.lending import hold_loan, let_go
from services.scheduler.core.tiers.under_way import NOWHERE, Fetch, leased_pages
from shared.ids import TOKEN_BYTES
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.storage_plans import FetchChunks

if TYPE_CHECKING:
    from services.scheduler.core.cache.identities import ChunkNames
    from services.scheduler.core.cache.prefix_tree import Path
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import Storage
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.lending import HeldLoan, Loan


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The tokens of a fetch, packed int32 from the root on, and the key that encrypts their KV at rest."""

    namespace: str
    tokens: bytes
    key_id: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class KvRun:
    """Chunks [first, end) of a sequence that may be fetched as KV; its first ``covered_pages`` pages need not be."""

    names: ChunkNames
    first: int
    end: int
    covered_pages: int
    predicted_us: float = 0.0  # Time until the KV is on the device; 0 where it is unknown.


def begin_fetch(
    step: Step,
    request: Request,
    storage: Storage,
    path: Path,
    run: KvRun,
    *,
    is_next: bool = False,
    loan: Loan | None = None,
) -> bool:
    """Order a run, or as many of its chunks as there is room for; return False where requests wait for room.

    With a ``loan`` it is read from the lender, else from the storage's own disk or object store.

    A run that only its owner's quota has no room for is not ordered, and True is returned: no other request waits
    behind it. Pages that requests before this one count on stay; pages fetched for other requests take room, unless the
    request ``is_next``.
    """
    state = step.state
    owner, pool = state.tree.owner_of(request.submit.namespace), f"{HOST}/{storage.storage_id}"
    each, page_size = run.names.pages_each, state.tree.page_size
    first_page = run.first * each
    wanted = _pages_wanted(path, storage, first_page, run.end * each, run.covered_pages)
    room = int(host_pool(storage).total * state.config.prefetch_fraction) - storage.fetching.pages
    if not is_next:
        room -= sum(storage.fetching.ahead.values()) - storage.fetching.ahead.get(request.request_id, 0)
    most = state.quotas.most_pages(owner, pool)
    allowed = room if most is None else min(room, most)
    end = run.first + _cut_to_room(wanted, each, allowed)
    if (end * each - run.covered_pages) * page_size < max(1, state.config.min_prefetch_tokens):
        state.count("fetches_without_room")
        return allowed < room
    held = None if loan is None else hold_loan(state, loan, run.covered_pages, first_page, end * each)
    leased = _take_pages(step, storage, path, sum(wanted), owner, "" if is_next else request.request_id)
    if leased is None:
        if held is not None:
            let_go(state, held)
        state.count("fetches_without_room")
        return state.quotas.excess(owner, pool, sum(wanted)) > 0
    taken = iter(unpack_int32(leased))
    pages = pack_int32([next(taken) if is_wanted else NOWHERE for is_wanted in wanted])
    _order(step, sequence_of(request), storage, pages, run, end, request=request, held=held)
    return True


def begin_warming(
    step: Step,
    sequence: TokenSequence,
    storage: Storage,
    path: Path,
    run: KvRun,
    value: float,
    *,
    loan: Loan | None = None,
) -> int:
    """Order a run that no request waits for, or as many of its chunks as fetches have room for.

    With a ``loan`` it is read from the lender. It evicts only copies worth no more than ``value``. Returns how many
    pages it brings; 0 where nothing was ordered.
    """
    state = step.state
    each = run.names.pages_each
    first_page = run.first * each
    wanted = _pages_wanted(path, storage, first_page, run.end * each, run.covered_pages)
    room = int(host_pool(storage).total * state.config.prefetch_fraction) - storage.fetching.pages
    end = run.first + _cut_to_room(wanted, each, room - sum(storage.fetching.ahead.values()))
    if not sum(wanted):
        return 0
    held = None if loan is None else hold_loan(state, loan, run.covered_pages, first_page, end * each)
    way = dict.fromkeys(node.id for node, _ in path)
    owner = state.tree.owner_of(sequence.namespace)
    leased = displace_colder(step, storage, sum(wanted), value, way, owner)
    if leased is None:
        if held is not None:
            let_go(state, held)
        state.count("warmings_refused")
        return 0
    state.count("warmings_started")
    taken = iter(unpack_int32(leased))
    pages = pack_int32([next(taken) if is_wanted else NOWHERE for is_wanted in wanted])
    _order(step, sequence, storage, pages, run, end, held=held)
    return sum(wanted)


def sequence_of(request: Request) -> TokenSequence:
    """Return a request's tokens so far, prompt and output. Does not change the state."""
    submit = request.submit
    return TokenSequence(submit.namespace, request.tokens, submit.key_id, submit.trace)


def _cut_to_room(wanted: bytearray, each: int, room: int) -> int:
    """Cut a run's wanted pages, ``each`` per chunk, to as many chunks as bring ``room`` pages; return how many."""
    chunks, needed = len(wanted) // each, sum(wanted)
    while chunks > 0 and needed > room:
        chunks -= 1
        needed -= sum(wanted[chunks * each :])
        del wanted[chunks * each :]
    return chunks


def _pages_wanted(path: Path, storage: Storage, start: int, end: int, covered: int) -> bytearray:
    """Return a 1 for each page of [start, end) to be fetched; a 0 for covered pages and those with a host copy."""
    wanted = bytearray(b"\x01") * (end - start)
    wanted[: covered - start] = bytes(max(0, covered - start))
    position = 0
    for node, pages in path:
        if storage.storage_id in node.host and storage.storage_id not in node.quarantined:
            low, high = max(position, start), min(position + pages, end)
            if low < high:
                wanted[low - start : high - start] = bytes(high - low)
        position += pages
    return wanted


def _take_pages(step: Step, storage: Storage, path: Path, pages: int, owner: int, behind: str) -> bytes | None:
    """Return host pages for a fetch, or None; the copies that the fetch continues are not evicted for it."""
    held = [node for node, _ in path if storage.storage_id in node.host]
    for node in held:
        lock_host(node, storage.storage_id)
    leased = take_host_pages(step, storage, pages, owner, behind)
    for node in reversed(held):
        unlock_host(step.state, node, storage)
    return leased


def _order(
    step: Step,
    sequence: TokenSequence,
    storage: Storage,
    pages: bytes,
    run: KvRun,
    end: int,
    *,
    request: Request | None = None,
    held: HeldLoan | None = None,
) -> None:
    """Note a fetch in the state and send it. ``request`` waits for it; without one no request does."""
    state = step.state
    each, page_size = run.names.pages_each, state.tree.page_size
    fetch_id = state.next_fetch
    state.next_fetch += 1
    deadline_ms = state.config.fetch_deadline_ms
    names = [run.names[index] for index in range(run.first, end)]
    fetch = Fetch(
        fetch_id=fetch_id,
        storage_id=storage.storage_id,
        namespace=sequence.namespace,
        tokens=sequence.tokens[: end * each * page_size * TOKEN_BYTES],
        depth=run.first * each * page_size,
        pages=pages,
        timer_id=step.set_timer(f"fetch.{fetch_id}", "fetch", str(fetch_id), deadline_ms),
        waiters={} if request is None else {request.request_id: None},
        names=b"".join(names),
        queued_bytes=queued_bytes(state, storage),
        predicted_us=run.predicted_us if end == run.end else 0.0,
        is_warming=request is None,
        lender_id=held.order.storage_id if held is not None else "",
        lent_node=held.node if held is not None else 0,
        lent_from=held.depth if held is not None else 0,
    )
    state.fetches[fetch_id] = fetch
    storage.fetching.chunks.update(dict.fromkeys(names, fetch_id))
    storage.fetching.pages += leased_pages(pages)
    if request is not None:
        request.prefetch.fetch, request.prefetch.end = fetch_id, end * each * page_size
        request.prefetch.brought_from = (
            request.prefetch.brought_from if request.prefetch.brought_to else run.covered_pages * page_size
        )
        state.count("restorations_planned_kv")
    state.count("fetches_started")
    if held is not None:
        state.count("loans_started")
    order = FetchChunks(
        fetch_id=fetch_id,
        namespace=fetch.namespace,
        depth=fetch.depth,
        identities=run.names.identities(run.first * each, end * each),
        host_pages=pages,
        deadline_ms=deadline_ms,
        key_id=sequence.key_id,
        trace=sequence.trace,
        quota=state.quotas.disk_quota(state.tree.owner_of(fetch.namespace)),
        lender=held.order if held is not None else None,
    )
    step.to_storage(storage, order)
