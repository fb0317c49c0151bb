"""LoRA adapters of the cell: every worker loads them, and runs only requests whose adapters it has loaded.

An adapter is known by the digest of its files, which is a part of its requests' namespaces. Callers find it by name:
where a name is given to another adapter, later requests use other KV, and running requests go on with the adapter that
they began with.

An order that names the adapter it replaces takes effect in two steps: every worker loads the other one, and only then
does the name move. Until then, and if a worker cannot load it, the name means what it meant. Gateways learn of the move
from the next status, so for a few seconds requests for the displaced adapter are accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.adapters import MOST_ADAPTERS, is_adapter_name
from shared.ids import is_digest
from shared.messages.worker_plans import AttachAdapter, DetachAdapter

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step
    from shared.messages.cell_events import LoadAdapter, UnloadAdapter
    from shared.messages.worker_events import AdapterAttached

GRACE_MS = 5_000
"""Time for which requests for a displaced adapter are accepted. Gateways get a status twice a second, and count the
scheduler as away after three seconds without one."""


class Adapter(msgspec.Struct):
    """A LoRA adapter of the cell; it is dropped once nothing of the following is left of it."""

    digest: str
    path: str
    names: list[str] = []  # Names that callers may ask for.
    requests: int = 0  # Live requests that use it.
    displaced_from: str = ""  # A name that a replacement took from it; for a while it still gets requests.


class HeldAdapter(msgspec.Struct):
    """An adapter at a worker that was told to load it; still loading where it is not loaded and has no ``fault``."""

    attach_id: int  # Names the AttachAdapter order that the worker has to answer.
    is_loaded: bool = False
    fault: str = ""
    lacks_room: bool = False  # With a fault: it is loaded again when an adapter leaves the worker.


class Replacement(msgspec.Struct):
    """An adapter that gets a name of another once every worker has loaded it.

    With ``faults``, by worker, it did not. The record stays until the next order for the name.
    """

    digest: str
    faults: dict[str, str] = {}


def load(step: Step, message: LoadAdapter) -> None:
    """Give a name to an adapter, and have every worker without it load it; workers that failed try again.

    A malformed message, a new name beyond MOST_ADAPTERS, or one that expects another adapter than the name has, is
    counted and changes nothing else.
    """
    state, name = step.state, message.name
    if not is_adapter_name(name) or not message.path or not is_digest(message.digest):
        state.count("malformed_inputs")
        return
    before = find(state, name)
    is_full = before is None and sum(len(adapter.names) for adapter in state.adapters.values()) >= MOST_ADAPTERS
    if is_full or not _is_expected(message, before):
        state.count("adapters_refused")
        return
    adapter = state.adapters.setdefault(message.digest, Adapter(digest=message.digest, path=message.path))
    adapter.path = message.path
    earlier = state.replacements.pop(name, None)
    if before is not None and before is not adapter and message.expects is not None:
        state.replacements[name] = Replacement(digest=adapter.digest)
    elif before is not adapter:
        _give_name(step, adapter, name)
        if before is not None:
            before.names.remove(name)
            _drop_unused(step, before)
    _forget(step, earlier)
    for worker in state.workers.values():
        _attach(step, worker, adapter)


def unload(step: Step, message: UnloadAdapter) -> None:
    """Take a name away. An adapter without a name leaves the workers when the last request with it has ended."""
    state, name = step.state, message.name
    adapter, replacement = find(state, name), state.replacements.get(name)
    if message.digest and (adapter is None or adapter.digest != message.digest):
        if replacement is not None and replacement.digest == message.digest:
            _forget(step, state.replacements.pop(name))
        return
    if adapter is None:
        return
    state.count("adapters_unloaded")
    state.replacements.pop(name, None)
    adapter.names.remove(name)
    _drop_unused(step, adapter)
    _forget(step, replacement)
    for displaced in [each for each in state.adapters.values() if each.displaced_from == name]:
        step.cancel_timer(_timer(displaced))
        end_grace(step, displaced)


def go_on_replacing(step: Step) -> None:
    """Move each name whose next adapter every worker has loaded; give up one that a worker cannot load.

    Workers that are about to leave do not count. Without any other, names wait for one to join.
    """
    state = step.state
    for name, replacement in list(state.replacements.items()):
        if replacement.faults:
            continue
        adapter = state.adapters[replacement.digest]
        workers = [worker for worker in state.workers.values() if worker.drain is None]
        faults = {each.worker_id: lasting_fault(state, each, adapter.digest) for each in workers}
        replacement.faults = {worker_id: fault for worker_id, fault in faults.items() if fault}
        if replacement.faults:
            _drop_unused(step, adapter)
        elif workers and all(_is_loaded(each, adapter.digest) for each in workers):
            _move_name(step, name, adapter)


def end_grace(step: Step, adapter: Adapter) -> None:
    """Accept no more requests for an adapter that has lost its name to a replacement."""
    adapter.displaced_from = ""
    _drop_unused(step, adapter)


def attach_all(step: Step, worker: Worker) -> None:
    """Have a worker that joined load every adapter of the cell."""
    for adapter in step.state.adapters.values():
        _attach(step, worker, adapter)


def _attach(step: Step, worker: Worker, adapter: Adapter) -> None:
    """Have a worker load an adapter, unless it has it or is loading it."""
    held = worker.adapters.get(adapter.digest)
    if held is not None and not held.fault:
        return
    state = step.state
    worker.adapters[adapter.digest] = HeldAdapter(attach_id=state.next_attach)
    order = AttachAdapter(
        attach_id=state.next_attach,
        digest=adapter.digest,
        path=adapter.path,
        replaces=_displaced_by(state, adapter.digest),
    )
    step.to_worker(worker, order)
    state.next_attach += 1


def attached(step: Step, worker: Worker, message: AdapterAttached) -> bool:
    """Note that a worker has loaded an adapter or failed to. Return False for an answer to an outdated order."""
    state = step.state
    held = worker.adapters.get(message.digest)
    if held is None or held.attach_id != message.attach_id:
        state.count("stale_inputs")
        return False
    held.is_loaded, held.fault = not message.fault, message.fault
    held.lacks_room = bool(message.fault) and message.lacks_room
    state.count("adapters_failed" if message.fault else "adapters_attached")
    return True


def adapter_left(step: Step, digest: str) -> None:
    """Note the end of a request with this adapter; workers drop it if that was the last use of one without a name."""
    adapter = step.state.adapters[digest]
    adapter.requests -= 1
    _drop_unused(step, adapter)


def _drop_unused(step: Step, adapter: Adapter) -> None:
    """Have workers forget an adapter that has no use any more, and load what had no room beside it."""
    state = step.state
    if adapter.names or adapter.requests or adapter.displaced_from or is_coming(state, adapter.digest):
        return
    del state.adapters[adapter.digest]
    for worker in state.workers.values():
        if worker.adapters.pop(adapter.digest, None) is None:
            continue
        step.to_worker(worker, DetachAdapter(digest=adapter.digest))
        for digest in [digest for digest, held in worker.adapters.items() if held.lacks_room]:
            _attach(step, worker, state.adapters[digest])


def find(state: CellState, name: str) -> Adapter | None:
    """Return the adapter of a caller's name."""
    return next((adapter for adapter in state.adapters.values() if name in adapter.names), None)


def is_served(state: CellState, digest: str) -> bool:
    """Return whether requests for the adapter are accepted: it has a name, or had one a moment ago.

    A gateway learns up to half a second later, or more while it waits for a new scheduler, that a name was given away.
    """
    adapter = state.adapters.get(digest)
    return adapter is not None and bool(adapter.names or adapter.displaced_from)


def is_coming(state: CellState, digest: str) -> bool:
    """Return whether the adapter is being loaded to get a name of another."""
    return any(each.digest == digest and not each.faults for each in state.replacements.values())


def fault_everywhere(state: CellState, digest: str) -> str:
    """Return why no worker can load an adapter; "" while one has it or may still load it, or none takes requests."""
    workers = [worker for worker in state.workers.values() if worker.drain is None]
    faults = [fault for worker in workers if (fault := lasting_fault(state, worker, digest))]
    return faults[0] if faults and len(faults) == len(workers) else ""


def lasting_fault(state: CellState, worker: Worker, digest: str) -> str:
    """Return why a worker could not load an adapter; "" where it has or loads it, or waits for room."""
    held = worker.adapters.get(digest)
    return held.fault if held is not None and not room_wait(state, worker, digest) else ""


def room_wait(state: CellState, worker: Worker, digest: str) -> str:
    """Return why a worker cannot load an adapter yet, though it will when others have left; "" otherwise."""
    held = worker.adapters.get(digest)
    if held is None or not held.lacks_room:
        return ""
    leaving = [
        state.adapters[each].requests
        for each, other in worker.adapters.items()
        if other.is_loaded and not state.adapters[each].names and not is_coming(state, each)
    ]
    if not leaving:
        return ""
    which = "an unloaded adapter still has" if len(leaving) == 1 else f"{len(leaving)} unloaded adapters still have"
    return f"{held.fault}, and {which} {sum(leaving)} requests"


def _displaced_by(state: CellState, digest: str) -> str:
    """Return an adapter that this one is to take the last name from, or ""."""
    for name, replacement in state.replacements.items():
        if replacement.digest == digest and not replacement.faults:
            before = find(state, name)
            if before is not None and before.names == [name]:
                return before.digest
    return ""


def _is_expected(message: LoadAdapter, before: Adapter | None) -> bool:
    """Return whether the name has what the order expects, or has this adapter already."""
    now = before.digest if before is not None else ""
    return message.expects is None or now in (message.expects, message.digest)


def _give_name(step: Step, adapter: Adapter, name: str) -> None:
    adapter.names.append(name)
    step.state.count("adapters_loaded")
    if adapter.displaced_from:
        adapter.displaced_from = ""
        step.cancel_timer(_timer(adapter))


def _move_name(step: Step, name: str, adapter: Adapter) -> None:
    before = find(step.state, name)
    del step.state.replacements[name]
    _give_name(step, adapter, name)
    if before is None:  # A replacement is forgotten together with the name.
        return
    step.state.count("adapters_moved")
    before.names.remove(name)
    if not before.names:
        before.displaced_from = name
        step.set_timer(_timer(before), "adapter", before.digest, GRACE_MS)


def _forget(step: Step, replacement: Replacement | None) -> None:
    """Let go of an adapter that gets a name no more."""
    adapter = step.state.adapters.get(replacement.digest) if replacement is not None else None
    if adapter is not None:
        _drop_unused(step, adapter)


def _timer(adapter: Adapter) -> str:
    return f"adapter.{adapter.digest}"


def _is_loaded(worker: Worker, digest: str) -> bool:
    held = worker.adapters.get(digest)
    return held is not None and held.is_loaded
