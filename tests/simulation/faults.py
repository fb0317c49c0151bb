"""What can happen to a cell from outside, one function a kind. Each happens to whoever there is, or to nobody."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from shared.codec import decode_input
from shared.messages import cell_events, requests, storage_events, worker_events
from shared.messages.base import pack_int32
from tests.simulation.process import Process
from tests.simulation.releases import RELEASES
from tests.simulation.scenario import Fault
from tests.stateful.model_pages import namespace

if TYPE_CHECKING:
    from tests.simulation.cell import Cell
    from tests.simulation.contents import Copy
    from tests.simulation.scheduler_process import SchedulerProcess
    from tests.simulation.storage_process import StorageProcess
    from tests.simulation.worker_process import WorkerProcess


def happen(cell: Cell, fault: Fault) -> None:
    """Let a fault happen now."""
    cell.seen[f"fault_{fault.kind}"] += 1
    _KINDS[fault.kind](cell, fault)


def _crash(cell: Cell, process: Process | None, fault: Fault) -> None:
    if process is not None:
        process.end()
        cell.restart(process, fault.lasts_us)


def _freeze(cell: Cell, process: Process | None, fault: Fault) -> None:
    if process is not None:
        process.freeze()
        cell.clock.after(fault.lasts_us, process.thaw)


def _cut_off(cell: Cell, process: Process | None, fault: Fault) -> None:
    """A partition, and not a freeze: the process works on, and nobody hears of it."""
    if process is not None and not process.is_cut_off:
        process.cut_off()
        cell.clock.after(fault.lasts_us, process.reconnect)


def _replace(cell: Cell, process: Process | None, fault: Fault) -> None:
    """It stands still, and before it goes on another has its name."""
    if process is not None:
        process.freeze()
        cell.clock.after(fault.lasts_us // 2, lambda: cell.replace(process))
        cell.clock.after(fault.lasts_us, process.thaw)


def _drain(cell: Cell, process: WorkerProcess | StorageProcess | None, fault: Fault) -> None:
    if process is None:
        return
    process.drain()
    _restart_when_ended(cell, process, fault.lasts_us)


def _restart_when_ended(cell: Cell, process: Process, after_us: int) -> None:
    """A worker that drains ends after its step."""
    if process.is_running:
        cell.clock.after(1_000, lambda: _restart_when_ended(cell, process, after_us))
    else:
        cell.restart(process, after_us)


def _worker(cell: Cell, fault: Fault) -> WorkerProcess | None:
    alive = [worker for worker in cell.workers.values() if worker.is_running and not worker.is_frozen]
    return alive[fault.target % len(alive)] if alive else None


def _storage(cell: Cell, fault: Fault) -> StorageProcess | None:
    alive = [storage for storage in cell.storages.values() if storage.is_running and not storage.is_frozen]
    return alive[fault.target % len(alive)] if alive else None


def _gateway(cell: Cell, fault: Fault) -> Process | None:
    gateway = cell.gateways[fault.target % len(cell.gateways)]
    return gateway if gateway.is_running and not gateway.is_frozen else None


def _scheduler(cell: Cell) -> SchedulerProcess | None:
    return cell.scheduler if cell.scheduler.is_running and not cell.scheduler.is_frozen else None


def _scheduler_crash(cell: Cell, fault: Fault) -> None:
    """Which snapshot its successor finds is the target: the last, the ones before it, or none."""
    scheduler = _scheduler(cell)
    if scheduler is not None:
        scheduler.end()
        cell.clock.after(fault.lasts_us, lambda: cell.start_scheduler(snapshots_back=fault.target % 4))


def _scheduler_is_replaced(cell: Cell, fault: Fault) -> None:
    """It stands still or is cut off, another takes its place, and then it goes on: there are two until it learns it."""
    scheduler = _scheduler(cell)
    if scheduler is None:
        return
    if fault.target % 3:
        _freeze(cell, scheduler, fault)
    else:
        _cut_off(cell, scheduler, fault)
    back = fault.target % 4
    cell.clock.after(fault.lasts_us // 2, lambda: cell.start_scheduler(snapshots_back=back))


def _scheduler_is_upgraded(cell: Cell, fault: Fault) -> None:
    """The scheduler is stopped or killed, and after a while another release is started; leases keep them apart."""
    scheduler = _scheduler(cell)
    if scheduler is None:
        return
    cell.release = next(release for release in RELEASES if release != scheduler.release)
    for other in cell.schedulers:
        if other is scheduler and fault.target % 2:
            other.stop()
        elif other.is_running:
            other.end()
    cell.clock.after(fault.lasts_us, cell.start_scheduler)


def _broker_is_away(cell: Cell, fault: Fault) -> None:
    """Nobody hears of anybody. Everybody reconnects in an order of chance, once it is back."""
    if cell.is_broker_away:
        return
    cell.is_broker_away = True
    for process in cell.processes():
        process.cut_off()

    def come_back() -> None:
        cell.is_broker_away = False
        for process in cell.processes():
            cell.clock.after(cell.chance.randint(0, 500_000), process.reconnect)

    cell.clock.after(fault.lasts_us, come_back)


def _clock_is_set(cell: Cell, fault: Fault) -> None:
    """The broker's clock goes on from another time, so far away as a fault lasts. What it was is never set right."""
    cell.inputs.ahead_ns = (fault.lasts_us if fault.target % 2 else -fault.lasts_us) * 1_000


def _rot(cell: Cell, fault: Fault, held: list[Copy]) -> None:
    """One copy rots, or all do."""
    if held and fault.target % 3:
        held[fault.target % len(held)].is_corrupt = True
    else:
        for copy in held:
            copy.is_corrupt = True


def _host_rots(cell: Cell, fault: Fault) -> None:
    storage = _storage(cell, fault)
    if storage is not None and storage.pool is not None:
        _rot(cell, fault, list(storage.pool.memory.values()))


def _hidden_rots(cell: Cell, fault: Fault) -> None:
    storage = _storage(cell, fault)
    if storage is not None and storage.hidden_pool is not None:
        _rot(cell, fault, list(storage.hidden_pool.memory.values()))


def _disk_rots(cell: Cell, fault: Fault) -> None:
    for disk in cell.disks.values():
        for chunks in (disk.kv, disk.hidden):
            _rot(cell, fault, [copies[0] for copies in chunks.held.values()])


def _chunks_vanish(cell: Cell, fault: Fault) -> None:
    """Somebody deletes files under a storage's hands."""
    for disk in cell.disks.values():
        for chunks in (disk.kv, disk.hidden):
            for name in list(chunks.held)[fault.target % 3 :: 2]:
                del chunks.held[name]


def _disk_is_scrubbed(cell: Cell, fault: Fault) -> None:
    """An operator has a storage read all its chunks: those that are not what was written are quarantined."""
    storage = _storage(cell, fault)
    if storage is not None:
        storage.scrub()


def _disk_fails(cell: Cell, fault: Fault) -> None:
    for disk in cell.disks.values():
        disk.is_failing = True
        cell.clock.after(fault.lasts_us, partial(setattr, disk, "is_failing", False))


def _storage_stalls(cell: Cell, fault: Fault) -> None:
    storage = _storage(cell, fault)
    if storage is not None:
        storage.stalled_to_ns = cell.clock.now_ns + fault.lasts_us * 1_000


def _remote_is_away(cell: Cell, fault: Fault) -> None:
    cell.is_remote_away = True
    cell.clock.after(fault.lasts_us, lambda: setattr(cell, "is_remote_away", False))


def _chunk_raises(cell: Cell, fault: Fault) -> None:
    worker = _worker(cell, fault)
    if worker is not None:
        worker.fails_next_chunk = True


def _flush(cell: Cell, fault: Fault) -> None:
    tiers = (("device",), ("host",), ("device", "host"), ("disk",), ("remote", "disk"), ("device", "host", "disk"))
    cell.ask(cell_events.FlushCache(call_id="flush", tiers=tiers[fault.target % len(tiers)]))


def _pin(cell: Cell, fault: Fault) -> None:
    known = list(cell.submitted.values())
    if known:
        submit = known[fault.target % len(known)]
        pin_id = f"pin-{fault.target % 3}"
        ttl_ms = fault.lasts_us // 1_000
        message = cell_events.PinPrefix(
            pin_id=pin_id, namespace=submit.namespace, tokens=submit.prompt, ttl_ms=max(1, ttl_ms)
        )
        cell.ask(message)


def _unpin(cell: Cell, fault: Fault) -> None:
    cell.ask(cell_events.UnpinPrefix(pin_id=f"pin-{fault.target % 3}"))


def _submitted_again(cell: Cell, fault: Fault) -> None:
    """The same request comes again, after the stream has forgotten its id; or another gateway uses the id."""
    running = [request.submit for request in cell.state.requests.values()]
    if running:
        submit = running[fault.target % len(running)]
        gateway = cell.gateways[fault.target % len(cell.gateways)].name if fault.target % 2 else submit.gateway_id
        cell.ask(structs.replace(submit, gateway_id=gateway))


def _old_message(cell: Cell, fault: Fault) -> None:
    """An input that is over comes again, but for those with which a process or a request begins."""
    begins = (
        cell_events.SchedulerStarted,
        worker_events.WorkerJoined,
        storage_events.StorageJoined,
        requests.SubmitRequest,
    )
    messages = cell.inputs.messages[-1 - fault.target % 60 :]
    message = decode_input(messages[0].data)
    if not isinstance(message, begins) and not isinstance(message, cell_events.TimerFired):
        cell.ask(message)


def _configured(cell: Cell, fault: Fault) -> None:
    """Settings change under way: those of the scenario, with some of them the other way round."""
    config = cell.scenario.config
    changes = (
        {"host_tier": False},
        {"disk_writes": "off"},
        {"restoring": "kv"},
        {"restoring": "recompute"},
        {"neighbour_loads": not config.neighbour_loads},
        {"policy": "lru"},
        {"importance_caching": not config.importance_caching},
        {"fair_share": not config.fair_share},
        {"promotion": "recency"},
    )
    changed = structs.replace(config, **changes[fault.target % len(changes)])
    cell.ask(cell_events.CellConfigured(config=changed))
    cell.clock.after(fault.lasts_us, lambda: cell.ask(cell_events.CellConfigured(config=config)))


def _namespace_flushed(cell: Cell, fault: Fault) -> None:
    salt = "other" if fault.target % 2 else ""
    cell.ask(cell_events.FlushCache(call_id="flush", namespace=namespace(salt)))


def _unknown_prefix_pinned(cell: Cell, fault: Fault) -> None:
    tokens = pack_int32(range(fault.target % 50))
    cell.ask(cell_events.PinPrefix(pin_id="pin-unknown", namespace=namespace(), tokens=tokens, ttl_ms=2_000))


_KINDS: dict[str, Callable[[Cell, Fault], None]] = {
    "worker_crashes": lambda cell, fault: _crash(cell, _worker(cell, fault), fault),
    "worker_freezes": lambda cell, fault: _freeze(cell, _worker(cell, fault), fault),
    "worker_is_replaced": lambda cell, fault: _replace(cell, _worker(cell, fault), fault),
    "worker_drains": lambda cell, fault: _drain(cell, _worker(cell, fault), fault),
    "worker_is_cut_off": lambda cell, fault: _cut_off(cell, _worker(cell, fault), fault),
    "storage_crashes": lambda cell, fault: _crash(cell, _storage(cell, fault), fault),
    "storage_freezes": lambda cell, fault: _freeze(cell, _storage(cell, fault), fault),
    "storage_is_replaced": lambda cell, fault: _replace(cell, _storage(cell, fault), fault),
    "storage_drains": lambda cell, fault: _drain(cell, _storage(cell, fault), fault),
    "storage_is_cut_off": lambda cell, fault: _cut_off(cell, _storage(cell, fault), fault),
    "storage_stalls": _storage_stalls,
    "gateway_crashes": lambda cell, fault: _crash(cell, _gateway(cell, fault), fault),
    "gateway_freezes": lambda cell, fault: _freeze(cell, _gateway(cell, fault), fault),
    "gateway_is_cut_off": lambda cell, fault: _cut_off(cell, _gateway(cell, fault), fault),
    "scheduler_crashes": _scheduler_crash,
    "scheduler_freezes": lambda cell, fault: _freeze(cell, _scheduler(cell), fault),
    "scheduler_is_cut_off": lambda cell, fault: _cut_off(cell, _scheduler(cell), fault),
    "scheduler_is_replaced": _scheduler_is_replaced,
    "broker_is_away": _broker_is_away,
    "clock_is_set": _clock_is_set,
    "host_rots": _host_rots,
    "hidden_rots": _hidden_rots,
    "disk_rots": _disk_rots,
    "disk_fails": _disk_fails,
    "chunks_vanish": _chunks_vanish,
    "disk_is_scrubbed": _disk_is_scrubbed,
    "remote_is_away": _remote_is_away,
    "chunk_raises": _chunk_raises,
    "flush": _flush,
    "namespace_flushed": _namespace_flushed,
    "pin": _pin,
    "unpin": _unpin,
    "unknown_prefix_pinned": _unknown_prefix_pinned,
    "submitted_again": _submitted_again,
    "old_message": _old_message,
    "configured": _configured,
}

UPGRADE = "scheduler_is_upgraded"

KINDS = tuple(_KINDS)
"""Every kind of fault that may happen to any cell."""

_KINDS[UPGRADE] = _scheduler_is_upgraded
