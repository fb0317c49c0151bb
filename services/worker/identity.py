"""Identity of this process in the cell."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.worker_events import DeviceFacts, KernelFacts


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One incarnation of one worker. ``model`` is the model's fingerprint, ``kernels`` those that are part of it.

    ``reads_no_parts`` is why it reads no parts of prefixes; "" where it does.
    """

    worker_id: str
    incarnation: str
    node: str
    model: str
    device: DeviceFacts | None = None
    kernels: KernelFacts | None = None
    reads_no_parts: str = ""
