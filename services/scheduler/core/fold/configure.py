"""Operators' orders: settings are applied, each within its bounds, and a flush drops unlocked pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.eviction import POLICIES, make_policy
from services.scheduler.core.cache.eviction_orders import begin_renewal, go_on_renewing
from services.scheduler.core.cache.heat import parse
from services.scheduler.core.cache.hotness.tracking import fit_widths
from services.scheduler.core.cache.insertion import forget_importance
from services.scheduler.core.cache.pins import pinned_nodes
from services.scheduler.core.cache.residency import (
    DEVICE,
    HOST,
    copies_of,
    drop_device,
    drop_host,
    is_device_evictable,
    is_host_evictable,
)
from services.scheduler.core.hidden.hidden_form import parse_form
from services.scheduler.core.queue.schedules import SCHEDULES
from services.scheduler.core.restoring.fetches import cancel_fetches
from services.scheduler.core.tiers.host_admission import ADMISSIONS, BUILT_IN_ADMISSIONS
from services.scheduler.core.tiers.saves import forget_taken
from services.scheduler.core.tiers.under_way import Flush
from shared.errors import ConfigError
from shared.messages.storage_plans import DropChunks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step
    from shared.messages.cell_events import CellConfig, FlushCache


_LEAST_ONE = (
    "aging_requests",
    "defer_deadline_ms",
    "queue_window",
    "max_queued",
    "max_queued_tokens",
    "batches_ahead",
    "lease_tokens",
    "min_host_load_tokens",
    "max_attempts",
    "backup_deadline_ms",
    "save_deadline_ms",
    "prefetch_deadline_ms",
    "fetch_deadline_ms",
    "min_prefetch_tokens",
)
_FRACTIONS = ("reserve_fraction", "prefetch_fraction", "pin_fraction")
_LEAST_ZERO = (
    "admission_frequency",
    "promotion_tokens",
    "defer_tokens",
    "max_queued_per_tenant",
    "max_batch_tokens",
    "max_running",
)
_WIDTHS = {"fingerprint_bits": (4, 32), "clock_bits": (2, 16), "frequency_bits": (2, 32), "depth_bits": (2, 32)}
_RANKING = ("admission", "promotion", "hotness_expression")  # Settings that the indexes of candidates depend on.
_EXPRESSIONS = ("eviction_expression", "hotness_expression")


def configure(step: Step, config: CellConfig) -> None:
    """Apply a configuration; never fails.

    An unknown policy, schedule or admission, a bad expression or a bad layer mix is counted and leaves the old one in
    force; a number is moved to the nearest one that can work, so that a zero that would stall becomes 1. The pools'
    policies begin anew when they are made from other settings than before, or when the hotness filter's values change
    their meaning; in a large tree the old ones stay in force until the new ones know all nodes.
    """
    state = step.state
    old, old_policy = state.config, make_policy(state.policy, 0, state.config)
    state.config, state.is_configured = _within_bounds(state, config), True
    if config.policy in POLICIES:
        state.policy = config.policy
    else:
        state.count("unknown_policies")
    has_new_widths = fit_widths(state, state.config)
    if has_new_widths or make_policy(state.policy, 0, state.config) != old_policy:
        begin_renewal(state)
        go_on_renewing(step)
    if has_new_widths or any(getattr(old, name) != getattr(state.config, name) for name in _RANKING):
        state.candidates.clear()
    if old.importance_caching and not state.config.importance_caching:
        forget_importance(state)


def _within_bounds(state: CellState, config: CellConfig) -> CellConfig:
    """Return the configuration with every setting within its bounds."""
    # The bound stands first: max() then returns it in place of a NaN.
    changes: dict[str, int | float | str] = {name: min(1.0, max(0.0, getattr(config, name))) for name in _FRACTIONS}
    changes |= {name: max(1, getattr(config, name)) for name in _LEAST_ONE}
    changes |= {name: max(0, getattr(config, name)) for name in _LEAST_ZERO}
    changes["load_compute_ratio"] = max(0.0, config.load_compute_ratio)  # A snapshot would return 0 as 0.0.
    changes |= {name: min(most, max(least, getattr(config, name))) for name, (least, most) in _WIDTHS.items()}
    if config.schedule not in SCHEDULES:
        state.count("unknown_schedules")
        changes["schedule"] = state.config.schedule
    if config.admission not in ADMISSIONS and config.admission not in BUILT_IN_ADMISSIONS:
        state.count("unknown_admissions")
        changes["admission"] = state.config.admission
    for name in _EXPRESSIONS:
        try:
            parse(getattr(config, name))
        except ConfigError:
            state.count("bad_expressions")
            changes[name] = getattr(state.config, name)
    try:
        parse_form(config.hidden_form)
    except ConfigError:
        state.count("bad_hidden_forms")
        changes["hidden_form"] = state.config.hidden_form
    return msgspec.structs.replace(config, **changes)


_LOWER_TIERS = ("disk", "remote")


FLUSH_UNITS = 1 << 15
"""Work of one step of a flush: the number of nodes it visits, or 1/16 as many that it drops (20 to 50 ms)."""

FLUSH_PAUSE_MS = 20
_UNITS_DROPPED, _CHILDREN_A_UNIT = 16, 16
_TIMER = "flush"


def flush(step: Step, message: FlushCache) -> None:
    """Drop every unlocked page of the named tiers and namespace without a pin or lease, and back nothing up.

    A large tree is flushed a slice at a time: a node that is locked when its turn comes stays, and one that came since
    may.
    """
    lower = tuple(tier for tier in _LOWER_TIERS if tier in message.tiers)
    if lower:
        _flush_lower(step, message.namespace, lower)
    state = step.state
    roots = [message.namespace] if message.namespace else list(state.tree.roots)
    is_under_way = bool(state.flushes)
    for root_id in (state.tree.roots[name] for name in roots if name in state.tree.roots):
        for tier in (DEVICE, HOST):
            coming = Flush(tier, [root_id])
            if tier in message.tiers and coming not in state.flushes:
                state.flushes.append(coming)
    if not is_under_way:
        go_on_flushing(step)


def go_on_flushing(step: Step) -> None:
    """Do one step's work of the flushes; a timer goes on with the rest."""
    state = step.state
    units = FLUSH_UNITS
    while state.flushes and units > 0:
        units -= _flush_some(step, state.flushes[0], units)
        if not state.flushes[0].left:
            del state.flushes[0]
    if state.flushes:
        step.set_timer(_TIMER, "flush", "", FLUSH_PAUSE_MS)


def _flush_some(step: Step, flush: Flush, most: int) -> int:
    """Flush some nodes of one tier of a namespace, children before their parent; return units of work."""
    nodes, left = step.state.tree.nodes, flush.left
    units = 0
    # Nodes that a pin waits for are copied to the host when they are evicted; dropping one without a copy loses it.
    awaited = _awaited(step.state) if flush.tier == DEVICE else {}
    while left and units < most:
        node_id = left.pop()
        node = nodes.get(abs(node_id))
        units += 1
        if node is None:
            continue
        if node_id > 0 and node.children:
            left.append(-node_id)
            left.extend(reversed(node.child_ids))
            units += len(node.child_ids) // _CHILDREN_A_UNIT
        elif node.parent:
            drop = _flush_device if flush.tier == DEVICE else _flush_host
            units += _UNITS_DROPPED * drop(step, node, awaited)
    return units


def _flush_lower(step: Step, namespace: str, tiers: tuple[str, ...]) -> None:
    """Have the storages delete chunks; the catalogue changes when they report that they did."""
    cancel_fetches(step, namespace)
    for storage in step.state.storages.values():
        if storage.disk.budget_bytes or storage.disk.has_remote:
            forget_taken(step.state, storage)
            step.to_storage(storage, DropChunks(namespace=namespace, tiers=tiers))


def _awaited(state: CellState) -> dict[str, set[int]]:
    """Return, by machine, the ids of nodes that pins of its storages want copies of."""
    awaited: dict[str, set[int]] = {}
    if state.pins:
        for storage in state.storages.values():
            awaited.setdefault(storage.node, set()).update(pinned_nodes(state, storage))
    return awaited


def _flush_device(step: Step, node: Node, awaited: Mapping[str, set[int]]) -> int:
    """Drop a node from the devices that it may leave; return from how many."""
    state = step.state
    dropped = 0
    for name in list(node.device):
        worker = state.workers.get(name)
        if worker is None or not is_device_evictable(state, node, name):
            continue
        is_awaited = node.id in awaited.get(worker.node, ()) or node.id in state.cache_leases.nodes
        if not is_awaited or _has_copy(state, node, worker):
            state.count("flushed_pages_device", drop_device(state, node, worker, "flushed"))
            dropped += 1
    return dropped


def _has_copy(state: CellState, node: Node, worker: Worker) -> bool:
    return any(storage.node == worker.node and storage.storage_id in node.host for storage in state.storages.values())


def _flush_host(step: Step, node: Node, _awaited: Mapping[str, set[int]]) -> int:
    """Drop a node's host copies that may be dropped; return how many."""
    state = step.state
    dropped = 0
    for name in list(copies_of(state, node)):
        if is_host_evictable(state, node, name):
            state.count("flushed_pages_host", drop_host(state, node, state.storages[name], "flushed"))
            dropped += 1
    return dropped
