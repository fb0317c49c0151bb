"""CellConfigured: take over settings, each within its bounds."""

from __future__ import annotations

import msgspec

from services.scheduler.core.eviction import POLICIES
from services.scheduler.core.hosts import request_missing_pools
from services.scheduler.core.residency import renew_orders
from services.scheduler.core.state import count
from services.scheduler.core.turn import Turn
from shared.messages.cell_events import CellConfig

_LEAST_ONE = ("max_batch_tokens", "max_running", "batches_ahead", "lease_tokens", "max_attempts", "backup_deadline_ms")


def configure(turn: Turn, config: CellConfig) -> None:
    """Apply a configuration. An unknown policy leaves the old one in force; a zero that would stall becomes 1."""
    state = turn.state
    least = {name: max(1, getattr(config, name)) for name in _LEAST_ONE}
    reserve = min(1.0, max(0.0, config.reserve_fraction))
    state.config = msgspec.structs.replace(config, reserve_fraction=reserve, **least)
    if config.policy not in POLICIES:
        count(state, "unknown_policies")
    elif config.policy != state.policy:
        state.policy = config.policy
        renew_orders(state)
    request_missing_pools(turn)
