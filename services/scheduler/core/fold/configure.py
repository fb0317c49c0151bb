"""What operators order: settings are taken over, each within its bounds, and a flush drops what nothing uses."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.eviction import POLICIES, make_policy
from services.scheduler.core.cache.eviction_orders import renew_orders
from services.scheduler.core.cache.heat import parse
from services.scheduler.core.cache.hotness.tracking import fit_widths
from services.scheduler.core.cache.insertion import forget_importance
from services.scheduler.core.cache.pins import pinned_nodes
from services.scheduler.core.cache.prefix_tree import Node, descendants_first
from services.scheduler.core.cache.residency import (
    DEVICE,
    HOST,
    drop_device,
    drop_host,
    is_device_evictable,
    is_host_evictable,
)
from services.scheduler.core.hidden.hidden_form import parse_form
from services.scheduler.core.queue.schedules import SCHEDULES
from services.scheduler.core.restoring.fetches import cancel_fetches
from services.scheduler.core.tiers.saves import forget_taken
from shared.errors import ConfigError
from shared.messages.storage_plans import DropChunks

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step
    from shared.messages.cell_events import CellConfig, FlushCache


_LEAST_ONE = (
    "aging_requests",
    "defer_deadline_ms",
    "queue_window",
    "max_batch_tokens",
    "max_running",
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
_LEAST_ZERO = ("admission_frequency", "promotion_tokens", "defer_tokens", "max_queued_per_tenant")
_WIDTHS = {"fingerprint_bits": (4, 32), "clock_bits": (2, 16), "frequency_bits": (2, 32), "depth_bits": (2, 32)}
_RANKING = ("admission", "promotion", "hotness_expression")  # What indexes of candidates rank by, or exist for.
_EXPRESSIONS = ("eviction_expression", "hotness_expression")


def configure(step: Step, config: CellConfig) -> None:
    """Apply a configuration; never fails.

    An unknown policy or schedule, a bad expression or a bad layer mix is counted and leaves the old one in force; a
    number is moved to the nearest one that can work, so that a zero that would stall becomes 1. The pools' policies
    begin anew when they are made from other settings than before, or when the hotness filter's values change their
    meaning.
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
        renew_orders(state)
    if has_new_widths or any(getattr(old, name) != getattr(state.config, name) for name in _RANKING):
        state.candidates.clear()
    if old.importance_caching and not state.config.importance_caching:
        forget_importance(state)


def _within_bounds(state: CellState, config: CellConfig) -> CellConfig:
    """The configuration with every setting one that can work."""
    # The bound stands first: max() then returns it in place of a NaN.
    changes: dict[str, int | float | str] = {name: min(1.0, max(0.0, getattr(config, name))) for name in _FRACTIONS}
    changes |= {name: max(1, getattr(config, name)) for name in _LEAST_ONE}
    changes |= {name: max(0, getattr(config, name)) for name in _LEAST_ZERO}
    changes["load_compute_ratio"] = max(0.0, config.load_compute_ratio)  # A snapshot would return 0 as 0.0.
    changes |= {name: min(most, max(least, getattr(config, name))) for name, (least, most) in _WIDTHS.items()}
    if config.schedule not in SCHEDULES:
        state.count("unknown_schedules")
        changes["schedule"] = state.config.schedule
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


def flush(step: Step, message: FlushCache) -> None:
    """Drop every unlocked page of the named tiers and namespace that no pin is for, without backing anything up."""
    lower = tuple(tier for tier in _LOWER_TIERS if tier in message.tiers)
    if lower:
        _flush_lower(step, message.namespace, lower)
    tree = step.state.tree
    roots = [message.namespace] if message.namespace else list(tree.roots)
    for namespace in roots:
        root_id = tree.roots.get(namespace)
        if root_id is None:
            continue
        order = [node.id for node in descendants_first(tree, tree.nodes[root_id]) if node.parent]
        if DEVICE in message.tiers:
            _flush_device(step, order)
        if HOST in message.tiers:
            _flush_host(step, order)


def _flush_lower(step: Step, namespace: str, tiers: tuple[str, ...]) -> None:
    """Have the storages delete chunks; the catalogue follows when they say that they did."""
    cancel_fetches(step, namespace)
    for storage in step.state.storages.values():
        if storage.disk.budget_bytes or storage.disk.has_remote:
            forget_taken(step.state, storage)
            step.to_storage(storage, DropChunks(namespace=namespace, tiers=tiers))


def _flush_device(step: Step, order: list[int]) -> None:
    state = step.state
    # What a pin waits for gets its copy when it is evicted. Dropped without one, there would be nothing to keep.
    awaited: defaultdict[str, set[int]] = defaultdict(set)
    for storage in state.storages.values():
        awaited[storage.node] |= pinned_nodes(state, storage)
    for node_id in order:
        for worker in state.workers.values():
            node = state.tree.nodes.get(node_id)
            if node is None or not is_device_evictable(state, node, worker.worker_id):
                continue
            if node_id not in awaited[worker.node] or _has_copy(state, node, worker):
                state.count("flushed_pages_device", drop_device(state, node, worker, "flushed"))


def _has_copy(state: CellState, node: Node, worker: Worker) -> bool:
    return any(storage.node == worker.node and storage.storage_id in node.host for storage in state.storages.values())


def _flush_host(step: Step, order: list[int]) -> None:
    state = step.state
    for node_id in order:
        for storage in state.storages.values():
            node = state.tree.nodes.get(node_id)
            if node is not None and is_host_evictable(node, storage.storage_id):
                state.count("flushed_pages_host", drop_host(state, node, storage, "flushed"))
