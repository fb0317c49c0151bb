"""LoRA adapters of the cell: every worker loads them, and runs only requests whose adapters it has loaded.

An adapter is known by the digest of its files, which is a part of its requests' namespaces. Callers find it by name:
where a name is given to another adapter, later requests use other KV, and running requests go on with the adapter that
they began with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.adapters import is_adapter_name
from shared.ids import is_digest
from shared.messages.worker_plans import AttachAdapter, DetachAdapter

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step
    from shared.messages.cell_events import LoadAdapter, UnloadAdapter
    from shared.messages.worker_events import AdapterAttached

MOST_ADAPTERS = 256
"""Names of adapters; status and snapshots have all of them."""


class Adapter(msgspec.Struct):
    """A LoRA adapter of the cell; it is dropped once it has neither a name nor a request."""

    digest: str
    path: str
    names: list[str] = []  # Names that callers may ask for.
    requests: int = 0  # Live requests that use it.


class HeldAdapter(msgspec.Struct):
    """An adapter at a worker that was told to load it; still loading where it is not loaded and has no ``fault``."""

    attach_id: int  # Names the AttachAdapter order that the worker has to answer.
    is_loaded: bool = False
    fault: str = ""


def load(step: Step, message: LoadAdapter) -> None:
    """Give a name to an adapter, and have every worker without it load it; workers that failed try again.

    A malformed message, or a new name beyond MOST_ADAPTERS, is counted and changes nothing else.
    """
    state = step.state
    if not is_adapter_name(message.name) or not message.path or not is_digest(message.digest):
        state.count("malformed_inputs")
        return
    before = _find(state, message.name)
    if before is None and sum(len(adapter.names) for adapter in state.adapters.values()) >= MOST_ADAPTERS:
        state.count("adapters_refused")
        return
    adapter = state.adapters.setdefault(message.digest, Adapter(digest=message.digest, path=message.path))
    adapter.path = message.path
    if before is not adapter:
        adapter.names.append(message.name)
        state.count("adapters_loaded")
        if before is not None:
            _take_name(step, before, message.name)
    for worker in state.workers.values():
        _attach(step, worker, adapter)


def unload(step: Step, message: UnloadAdapter) -> None:
    """Take a name away. An adapter without a name leaves the workers when the last request with it has ended."""
    adapter = _find(step.state, message.name)
    if adapter is not None:
        step.state.count("adapters_unloaded")
        _take_name(step, adapter, message.name)


def attach_all(step: Step, worker: Worker) -> None:
    """Have a worker that joined load every adapter of the cell."""
    for adapter in step.state.adapters.values():
        _attach(step, worker, adapter)


def attached(step: Step, worker: Worker, message: AdapterAttached) -> bool:
    """Note that a worker has loaded an adapter or failed to. Return False for an answer to an outdated order."""
    state = step.state
    held = worker.adapters.get(message.digest)
    if held is None or held.attach_id != message.attach_id:
        state.count("stale_inputs")
        return False
    held.is_loaded, held.fault = not message.fault, message.fault
    state.count("adapters_failed" if message.fault else "adapters_attached")
    return True


def adapter_left(step: Step, digest: str) -> None:
    """Note the end of a request with this adapter; workers drop it if that was the last use of one without a name."""
    adapter = step.state.adapters[digest]
    adapter.requests -= 1
    _let_go(step, adapter)


def is_served(state: CellState, digest: str) -> bool:
    """Return whether the adapter has a name that callers may ask for."""
    adapter = state.adapters.get(digest)
    return adapter is not None and bool(adapter.names)


def fault_everywhere(state: CellState, digest: str) -> str:
    """Return why no worker can load an adapter; "" while one has it or may still load it, or none takes requests."""
    held = [worker.adapters.get(digest) for worker in state.workers.values() if worker.drain is None]
    faults = [each.fault for each in held if each is not None and each.fault]
    return faults[0] if faults and len(faults) == len(held) else ""


def _find(state: CellState, name: str) -> Adapter | None:
    """Return the adapter of a caller's name."""
    return next((adapter for adapter in state.adapters.values() if name in adapter.names), None)


def _take_name(step: Step, adapter: Adapter, name: str) -> None:
    adapter.names.remove(name)
    _let_go(step, adapter)


def _let_go(step: Step, adapter: Adapter) -> None:
    """Have workers forget an adapter without a name, once no request has it."""
    if adapter.names or adapter.requests:
        return
    state = step.state
    del state.adapters[adapter.digest]
    for worker in state.workers.values():
        if worker.adapters.pop(adapter.digest, None) is not None:
            step.to_worker(worker, DetachAdapter(digest=adapter.digest))


def _attach(step: Step, worker: Worker, adapter: Adapter) -> None:
    held = worker.adapters.get(adapter.digest)
    if held is not None and not held.fault:
        return
    state = step.state
    worker.adapters[adapter.digest] = HeldAdapter(attach_id=state.next_attach)
    step.to_worker(worker, AttachAdapter(attach_id=state.next_attach, digest=adapter.digest, path=adapter.path))
    state.next_attach += 1
