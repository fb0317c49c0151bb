"""State leases: pages of a node's state pool in which a worker saves what a request's KV can be restored from."""

from __future__ import annotations

from services.scheduler.core.state import Worker, count
from services.scheduler.core.turn import Turn
from shared.messages.worker_events import StateSaved


def state_saved(turn: Turn, worker: Worker, message: StateSaved) -> None:
    """The worker is done with a lease."""
    lease = turn.state.leases.get(message.lease_id)
    if lease is None or lease.worker_id != worker.worker_id:
        count(turn.state, "stale_inputs")
        return
