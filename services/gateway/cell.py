"""What the gateway knows of its cell, and whether it may call itself ready. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.context_limit import ContextLimit
from shared.messages.status import AdapterStatus, CellStatus, Degradation

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

    def degraded(self, now_s: float) -> tuple[Degradation, ...]:
        """Return what the cell was asked for and lacks, by the scheduler's last status; empty while it is silent."""
        status = self.fresh_status(now_s)
        return status.degraded if status is not None else ()

    def fresh_status(self, now_s: float) -> CellStatus | None:
        """Return the last status, if the scheduler was heard lately."""
        return self.status if now_s - self.heard_s <= FRESH_S else None

    def takes_bases(self) -> bool:
        """Whether the scheduler that spoke last takes a prompt as a base and a tail. An older one refuses it."""
        return self.status is not None and self.status.takes_bases

    def takes_compact(self) -> bool:
        """Whether it takes a prompt in compact form. An older one refuses that, too."""
        return self.status is not None and self.status.takes_compact

    def context_limit(self, own: int) -> ContextLimit:
        """Return the context bound: the model's ``own``, or the cell's where its pools hold less."""
        status = self.status
        if status is None or not 0 < status.max_context < own:
            return ContextLimit(own)
        pools = [pool.total * status.page_size for pool in status.pools if pool.tier == "device"]
        if status.page_bytes and status.max_context in pools:
            return ContextLimit(own, status.max_context, status.page_size, status.page_bytes)
        return ContextLimit(status.max_context)  # Workers take less of the model than this gateway read of it.

    def adapters(self) -> tuple[AdapterStatus, ...]:
        """LoRA adapters that may be asked for, loaded or about to be, as far as this gateway has heard."""
        return self.status.adapters if self.status is not None else ()

    def adapter(self, name: str) -> AdapterStatus | None:
        """Return the adapter of this name."""
        return next((adapter for adapter in self.adapters() if adapter.name == name), None)

    def worker_ids(self) -> list[str]:
        return [worker.worker_id for worker in self.status.workers] if self.status is not None else []
