"""The gateway's view of its cell, and whether the gateway is ready. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.context_limit import ContextLimit
from shared.messages.status import AdapterStatus, CellStatus, Degradation
from shared.messages.worker_events import KernelFacts
from shared.same_model import difference

FRESH_S = 3.0
"""The scheduler publishes its status twice a second; after six missed ones it counts as away."""


@dataclass(slots=True)
class CellView:
    """The last status of the cell, and when it came, in seconds of the caller's clock."""

    model_fingerprint: str
    kernels: KernelFacts | None = None  # Part of the fingerprint.
    status: CellStatus | None = None
    heard_s: float = 0.0
    is_draining: bool = False

    def hear(self, status: CellStatus, now_s: float) -> None:
        """Replace the last status by one that arrived at ``now_s``."""
        self.status, self.heard_s = status, now_s

    def reasons_not_ready(self, now_s: float, *, is_connected: bool) -> list[str]:
        """Return why requests would not be answered now; empty when they would be. Does not change the state."""
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
            told = difference("this gateway", self.kernels, self.status.kernels)
            reasons.append(told or "the cell serves another model than this gateway")
        return reasons

    def degraded(self, now_s: float) -> tuple[Degradation, ...]:
        """Return the configured features that the cell lacks, by the scheduler's last status.

        The result is empty while the scheduler is silent.
        """
        status = self.fresh_status(now_s)
        return status.degraded if status is not None else ()

    def fresh_status(self, now_s: float) -> CellStatus | None:
        """Return the last status, or None if it is older than :data:`FRESH_S`."""
        return self.status if now_s - self.heard_s <= FRESH_S else None

    def takes_bases(self) -> bool:
        """Return whether the last scheduler heard accepts a prompt as a base and a tail.

        An older release refuses such a prompt.
        """
        return self.status is not None and self.status.takes_bases

    def takes_compact(self) -> bool:
        """Return whether the last scheduler heard accepts a prompt in compact form. An older release refuses it."""
        return self.status is not None and self.status.takes_compact

    def context_limit(self, own: int) -> ContextLimit:
        """Return the context bound: the model's ``own``, or the cell's where its pools hold less."""
        status = self.status
        if status is None or not 0 < status.max_context < own:
            return ContextLimit(own)
        pools = [pool.total * status.page_size for pool in status.pools if pool.tier == "device"]
        if status.page_bytes and status.max_context in pools:
            return ContextLimit(own, status.max_context, status.page_size, status.page_bytes)
        return ContextLimit(
            status.max_context
        )  # Workers accept a shorter context than this gateway read from the model.

    def adapters(self) -> tuple[AdapterStatus, ...]:
        """Return the LoRA adapters that requests may name, loaded or being loaded, by the last status."""
        return self.status.adapters if self.status is not None else ()

    def adapter(self, name: str) -> AdapterStatus | None:
        """Return the adapter of this name, or None."""
        return next((adapter for adapter in self.adapters() if adapter.name == name), None)

    def worker_ids(self) -> list[str]:
        """Return the ids of the workers in the last status; empty before the first one."""
        return [worker.worker_id for worker in self.status.workers] if self.status is not None else []
