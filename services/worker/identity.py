"""Identity of this process in the cell."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.worker_events import DeviceFacts


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One incarnation of one worker. ``model`` is the model's fingerprint."""

    worker_id: str
    incarnation: str
    node: str
    model: str
    device: DeviceFacts | None = None
