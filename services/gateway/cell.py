"""What the gateway knows of its cell, and whether it may call itself ready. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.status import CellStatus

FRESH_S = 3.0
"""The scheduler says its status twice a second; after six missed ones it counts as away."""


@dataclass(slots=True)
class CellView:
    """The last status and when it came, in seconds of the caller's clock."""

    model_fingerprint: str
    status: CellStatus | None = None
    heard_s: float = 0.0
    is_draining: bool = False

    def hear(self, status: CellStatus, now_s: float) -> None:
        """Take a status in."""
        self.status, self.heard_s = status, now_s

    def reasons_not_ready(self, now_s: float, *, is_connected: bool) -> list[str]:
        """Why requests would not be answered now; empty when they would. Does not mutate."""
        reasons = []
        if self.is_draining:
            reasons.append("the gateway is shutting down")
        if not is_connected:
            reasons.append("the message broker is not connected")
        if self.status is None:
            reasons.append("the scheduler has not been heard of")
        elif now_s - self.heard_s > FRESH_S:
            reasons.append(f"the scheduler was last heard of {now_s - self.heard_s:.1f} s ago")
        elif not self.status.workers:
            reasons.append("no worker has joined")
        elif all(worker.draining for worker in self.status.workers):
            reasons.append("every worker is about to leave")
        elif self.status.model and self.status.model != self.model_fingerprint:
            reasons.append("the cell serves another model than this gateway")
        return reasons

    def fresh_status(self, now_s: float) -> CellStatus | None:
        """The last status, if the scheduler has been heard of lately."""
        return self.status if now_s - self.heard_s <= FRESH_S else None

    def max_context(self, own: int) -> int:
        """The context bound: the model's, or the cell's where its pools hold less."""
        cell = self.status.max_context if self.status is not None else 0
        return min(own, cell) if cell > 0 else own

    def worker_ids(self) -> list[str]:
        return [worker.worker_id for worker in self.status.workers] if self.status is not None else []
