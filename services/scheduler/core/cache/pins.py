"""Pins: prefixes that an operator wants kept, each for a time, all within a budget.

A pin holds a host lock on every node from the root to its deepest one, so that no eviction takes their copies, and the
storage keeps their chunks on its disk. It locks the nodes with copies, and more as copies are made: nodes on a device
only are cached anyway, and get a copy when they have to leave (see :func:`is_wanted`). A pin ends by its time or by an
order, and unlocks exactly what it locked. It outlives its storage, and locks copies again when they come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.kept import Pin, pinned_pages
from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import Node, ancestors, page_count
from services.scheduler.core.cache.residency import lock_host, split_node, unlock_host
from shared.chunks import chunk_names, chunk_pages
from shared.ids import split_digests
from shared.messages.base import count_int32
from shared.messages.storage_plans import PinChunks

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage
    from services.scheduler.core.step import Step
    from shared.messages.cell_events import PinPrefix, UnpinPrefix

MAX_PINS = 256
_REFUSAL_MS = 60_000
"""Time for which a refused pin is remembered, for later questions about it."""


def pin_prefix(step: Step, message: PinPrefix) -> None:
    """Keep a prefix from now on; a pin with a known id is replaced."""
    state = step.state
    known = state.pins.get(message.pin_id)
    if known is not None:
        _end(step, known)
    if len(state.pins) >= MAX_PINS:
        state.count("pins_refused")
        return
    refusal, storage_id = _fault(state, message), ""
    if not refusal:
        storage = _best_storage(state, message)
        storage_id = storage.storage_id if storage is not None else ""
        refusal = "" if storage is not None else "there is no host pool to keep it in"
    ttl_ms = min(message.ttl_ms, _REFUSAL_MS) if refusal else message.ttl_ms
    ttl_ms = max(1, ttl_ms)
    timer_id = step.set_timer(f"pin.{step.seq}", "pin", message.pin_id, ttl_ms)
    pin = Pin(
        pin_id=message.pin_id,
        storage_id=storage_id,
        namespace=message.namespace,
        prefix=b"" if refusal else message.tokens,
        expires_ns=step.time_ns + ttl_ms * 1_000_000,
        timer_id=timer_id,
        refusal=refusal,
    )
    state.pins[pin.pin_id] = pin
    state.count("pins_refused" if refusal else "pins_set")
    if not refusal:
        _take_hold(step, pin)


def unpin_prefix(step: Step, message: UnpinPrefix) -> None:
    """End a pin before its time."""
    pin = step.state.pins.get(message.pin_id)
    if pin is None:
        step.state.count("stale_inputs")
    else:
        _end(step, pin)


def expire_pin(step: Step, pin: Pin) -> None:
    """End a pin whose time is over."""
    step.state.count("pins_expired", 0 if pin.refusal else 1)
    _end(step, pin)


def take_hold(step: Step, storage: Storage) -> None:
    """Let pins lock new copies in this host pool."""
    for pin in step.state.pins.values():
        if pin.storage_id == storage.storage_id:
            _take_hold(step, pin)


def pinned_nodes(state: CellState, storage: Storage) -> set[int]:
    """Return ids of nodes on the prefixes that pins of this storage keep, with a copy or without. Changes nothing."""
    found: set[int] = set()
    for pin in state.pins.values():
        if pin.storage_id == storage.storage_id and not pin.refusal:
            path = match_prefix(state.tree, pin.namespace, pin.prefix, _whole_pages(state, pin.prefix))
            found.update(node.id for node, _ in path)
    return found


def let_go_of_spoiled(step: Step) -> None:
    """Unlock pinned copies that failed verification, and those below, so that they can be evicted and made again."""
    state = step.state
    for pin in state.pins.values():
        held = _held(state, pin)
        spoiled = [node for node in held if pin.storage_id in node.quarantined]
        if spoiled:
            _shrink(step, pin, spoiled[-1])


def forget_hold(state: CellState, storage_id: str) -> None:
    """Forget the locks in a host pool that is gone: its pins hold nothing until copies are made in the next one."""
    for pin in state.pins.values():
        if pin.storage_id == storage_id:
            pin.node, pin.pages, pin.chunks = 0, 0, b""


def _fault(state: CellState, message: PinPrefix) -> str:
    if message.ttl_ms < 1:
        return "a pin must last for a millisecond at least"
    if len(message.tokens) % 4 or not state.tree.page_size or len(message.tokens) < state.tree.page_token_bytes:
        return "the prefix is shorter than one page"
    return ""


def _best_storage(state: CellState, message: PinPrefix) -> Storage | None:
    """Return the storage whose node holds most of the prefix; the first of equals, None without a host pool."""
    path = match_prefix(state.tree, message.namespace, message.tokens, _whole_pages(state, message.tokens))
    best: tuple[int, Storage] | None = None
    for storage in state.storages.values():
        if storage.pool is None:
            continue
        near = [worker.worker_id for worker in state.workers.values() if worker.node == storage.node]
        held = 0
        for node, pages in path:
            if storage.storage_id not in node.host and not any(name in node.device for name in near):
                break
            held += pages
        if best is None or held > best[0]:
            best = held, storage
    return None if best is None else best[1]


def _whole_pages(state: CellState, tokens: bytes) -> int:
    return count_int32(tokens) // state.tree.page_size


def _take_hold(step: Step, pin: Pin) -> None:
    """Lock copies from the end of the pin's hold downwards, as far as the budget goes."""
    state = step.state
    storage = state.storages.get(pin.storage_id)
    if storage is None or storage.pool is None or pin.refusal:
        return
    leased = state.cache_leases.locked.get(pin.storage_id, 0)
    room = int(storage.pool.total * state.config.pin_fraction) - pinned_pages(state, pin.storage_id) - leased
    before = pin.pages
    for node, pages in match_prefix(state.tree, pin.namespace, pin.prefix, _whole_pages(state, pin.prefix)):
        if node.end <= pin.pages * state.tree.page_size:
            continue  # Held already.
        if storage.storage_id not in node.host or storage.storage_id in node.quarantined:
            break
        if pages > room:
            state.count("pins_over_budget")
            break
        held = split_node(state, node, pages) if pages < page_count(state.tree, node) else node
        lock_host(held, storage.storage_id)
        room -= pages
        pin.pages += pages
        pin.node = held.id
    if pin.pages > before:
        _keep_chunks(step, storage, pin)


def _keep_chunks(step: Step, storage: Storage, pin: Pin) -> None:
    """Have the disk keep the chunks of the nodes that the pin locks."""
    state = step.state
    if not storage.disk.budget_bytes:
        return
    path = reversed(_held(state, pin))
    identities = b"".join(page_identities(state.tree, node) for node in path)
    chunks = b"".join(chunk_names(identities, chunk_pages(state.tree.page_size)))
    if chunks and chunks != pin.chunks:
        step.to_storage(storage, PinChunks(chunks=chunks[len(pin.chunks) :]))
        pin.chunks = chunks


def _shrink(step: Step, pin: Pin, top: Node) -> None:
    """Unlock ``top`` and everything below it."""
    state = step.state
    storage = state.storages[pin.storage_id]
    for node in _held(state, pin):
        above = state.tree.nodes[node.parent]
        pin.node = above.id if above.parent else 0
        pin.pages -= page_count(state.tree, node)
        is_top = node is top
        unlock_host(state, node, storage)
        if is_top:
            break
    if not pin.node:
        pin.pages = 0


def _end(step: Step, pin: Pin) -> None:
    state = step.state
    step.cancel_timer(pin.timer_id)
    del state.pins[pin.pin_id]
    storage = state.storages.get(pin.storage_id)
    if storage is None:
        return
    for node in _held(state, pin):
        unlock_host(state, node, storage)
    others = b"".join(other.chunks for other in state.pins.values() if other.storage_id == pin.storage_id)
    kept = dict.fromkeys(split_digests(others))
    freed = b"".join(name for name in split_digests(pin.chunks) if name not in kept)
    if freed:
        step.to_storage(storage, PinChunks(chunks=freed, is_pinned=False))


def _held(state: CellState, pin: Pin) -> list[Node]:
    """Return the nodes that the pin locks, lowest first. Changes nothing."""
    return ancestors(state.tree, state.tree.nodes[pin.node]) if pin.node else []
