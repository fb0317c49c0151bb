"""Operators' views of a cell: its status as published, with each tenant's load, and the listing of cached nodes.

Nothing here decides or changes the state.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from services.scheduler.core.adapters import lasting_fault, room_wait
from services.scheduler.core.cache.prefix_tree import Node, PrefixTree, ancestors, namespace_of, page_count
from services.scheduler.core.cache.residency import DEVICE, HOST, copies_of, devices_of
from services.scheduler.core.queue.placement import has_adapter
from services.scheduler.core.waiting.waits import transient_nodes
from shared.messages.base import count_int32
from shared.messages.pools import HIDDEN
from shared.messages.status import (
    OWNERS_TOLD,
    AdapterReplacement,
    AdapterStatus,
    CachedNode,
    CacheListing,
    CellStatus,
    LeaseStatus,
    ListCache,
    OwnerBytes,
    PinStatus,
    PoolStatus,
    RestorationStatus,
    StorageBudget,
    TenantLoad,
    WorkerStatus,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.cache.kept import Pin
    from services.scheduler.core.cache.page_pool import PagePool
    from services.scheduler.core.quotas.quota_accounts import Account
    from services.scheduler.core.speed_fit import MethodError
    from services.scheduler.core.state import CellState, Storage, Worker


def status(state: CellState, scheduler_id: str) -> CellStatus:
    """Return the cell's present status. Does not change the state."""
    pools = [_device(worker.worker_id, worker.pool) for worker in state.workers.values()]
    pools += [
        _host(storage.storage_id, storage.pool) for storage in state.storages.values() if storage.pool is not None
    ]
    pools += [
        _hidden_pool(storage, storage.hidden.pool)
        for storage in state.storages.values()
        if storage.hidden.pool is not None
    ]
    page_size = state.tree.page_size
    in_queue, in_flight = transient_nodes(state)
    return CellStatus(
        scheduler_id=scheduler_id,
        epoch=state.epoch,
        seq=state.last_seq,
        model=state.model,
        kernels=state.kernels,
        page_size=page_size,
        queued=state.queued,
        running=sum(len(worker.work.running) for worker in state.workers.values()),
        max_queued=state.config.max_queued,
        max_context=max(
            (min(worker.max_context, worker.pool.total * page_size) for worker in _serving(state)), default=0
        ),
        workers=tuple(
            WorkerStatus(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                running=len(worker.work.running),
                waiting=worker.line.queue.size + len(worker.line.deferred),
                draining=worker.drain is not None,
                device=worker.device,
            )
            for worker in state.workers.values()
        ),
        storages=tuple(state.storages),
        storage_incarnations={storage.storage_id: storage.incarnation for storage in state.storages.values()},
        pools=tuple(pools),
        counters=dict(state.counters),
        nodes=len(state.tree.nodes) - len(state.tree.roots),
        saves=len(state.saves) + len(state.hidden_saves),
        pins=sum(not pin.refusal for pin in state.pins.values()),
        pinned_pages=sum(pin.pages for pin in state.pins.values()),
        cache_leases=len(state.cache_leases.leases),
        leased_pages=state.cache_leases.pages,
        chunks=sum(len(storage.disk.chunks) for storage in state.storages.values()),
        hidden_chunks=sum(len(storage.hidden.chunks) for storage in state.storages.values()),
        sparse_chunks=sum(len(storage.sparse.chunks) for storage in state.storages.values()),
        fetches=len(state.fetches) + len(state.hidden_fetches),
        deferred=sum(len(worker.line.deferred) for worker in state.workers.values()),
        in_queue_nodes=in_queue,
        in_flight_nodes=in_flight,
        restorations=tuple(_restoration(kind, found) for kind, found in state.predictions.by_kind.items()),
        deferred_for_fetch=sum(
            state.requests[request_id].wait.fetch > 0
            for worker in state.workers.values()
            for request_id in worker.line.deferred
        ),
        unplaced=len(state.unplaced),
        tenant_loads=tenant_loads(state),
        owner_bytes=owner_bytes(state),
        dtype=state.geometry.dtype if state.geometry is not None else "",
        page_bytes=state.geometry.page_bytes if state.geometry is not None else 0,
        budgets=tuple(
            StorageBudget(
                storage_id=storage.storage_id,
                host=storage.host_bytes,
                awaits_pool=storage.is_pool_requested and storage.pool is None,
                disk=storage.disk.budget_bytes,
                has_remote=storage.disk.has_remote,
            )
            for storage in state.storages.values()
        ),
        takes_bases=state.config.prefix_caching,
        takes_compact=True,
        adapters=tuple(_adapters(state)),
    )


def _adapters(state: CellState) -> Iterator[AdapterStatus]:
    """Yield one status for each name, in the order in which adapters came."""
    for adapter in state.adapters.values():
        workers, faults, room_waits = _held(state, adapter.digest)
        for name in adapter.names:
            yield AdapterStatus(
                name=name,
                digest=adapter.digest,
                path=adapter.path,
                workers=workers,
                faults=faults,
                requests=adapter.requests,
                room_waits=room_waits,
                replacement=_replacement(state, name),
            )


def _replacement(state: CellState, name: str) -> AdapterReplacement | None:
    told = state.replacements.get(name)
    if told is None:
        return None
    if told.faults:
        return AdapterReplacement(digest=told.digest, faults=dict(told.faults))
    workers, faults, room_waits = _held(state, told.digest)
    return AdapterReplacement(digest=told.digest, workers=workers, faults=faults, room_waits=room_waits)


def _held(state: CellState, digest: str) -> tuple[tuple[str, ...], dict[str, str], dict[str, str]]:
    """Return the workers that have an adapter, and the faults and the waits for room of others."""
    workers = state.workers.values()
    loaded = tuple(worker.worker_id for worker in workers if has_adapter(worker, digest))
    faults = {worker.worker_id: fault for worker in workers if (fault := lasting_fault(state, worker, digest))}
    room_waits = {worker.worker_id: wait for worker in workers if (wait := room_wait(state, worker, digest))}
    return loaded, faults, room_waits


def _serving(state: CellState) -> list[Worker]:
    """Return the workers that new requests go to, or all workers where all drain."""
    return [worker for worker in state.workers.values() if worker.drain is None] or list(state.workers.values())


def _restoration(kind: str, found: MethodError) -> RestorationStatus:
    return RestorationStatus(
        kind=kind,
        count=found.observations,
        predicted_seconds=found.predicted_us / 1e6,
        observed_seconds=found.observed_us / 1e6,
        bias=found.bias,
        error=found.magnitude,
    )


def _device(owner: str, pool: PagePool) -> PoolStatus:
    return PoolStatus(
        owner=owner, tier="device", total=pool.total, free=pool.free, cached=pool.cached, leased=pool.leased
    )


def _host(owner: str, pool: PagePool) -> PoolStatus:
    return PoolStatus(
        owner=owner, tier="host", total=pool.total, free=pool.free, cached=pool.cached, leased=pool.leased
    )


def _hidden_pool(storage: Storage, pool: PagePool) -> PoolStatus:
    return PoolStatus(
        owner=storage.storage_id,
        tier=HIDDEN,
        total=pool.total,
        free=pool.free,
        cached=pool.cached,
        leased=pool.leased,
        form=storage.hidden.handle.geometry.form if storage.hidden.handle is not None else "",
    )


def tenant_loads(state: CellState) -> tuple[TenantLoad, ...]:
    """Return running and waiting requests of every tenant that has any.

    The largest ``OWNERS_TOLD`` are listed; those beyond count as tenant "".
    """
    running: dict[str, int] = {}
    for worker in state.workers.values():
        for request_id in worker.work.running:
            tenant = state.requests[request_id].submit.tenant
            running[tenant] = running.get(tenant, 0) + 1
    loads = [
        TenantLoad(tenant=tenant, running=running.get(tenant, 0), waiting=state.tenants.get(tenant, 0))
        for tenant in dict.fromkeys((*running, *state.tenants))
    ]
    if len(loads) > OWNERS_TOLD:
        loads.sort(key=lambda load: -(load.running + load.waiting))
        loads, rest = loads[:OWNERS_TOLD], loads[OWNERS_TOLD:]
        running_rest, waiting_rest = sum(load.running for load in rest), sum(load.waiting for load in rest)
        loads.append(TenantLoad(tenant="", running=running_rest, waiting=waiting_rest))
    return tuple(loads)


def owner_bytes(state: CellState) -> tuple[OwnerBytes, ...]:
    """Return bytes on devices and in host memory by owner; disks are not known here.

    The first row, with owner "", is pages without an owner. Bytes count as for quotas: pages being loaded or copied for
    an owner are its own already, and no other's.
    """
    if state.geometry is None:
        return ()
    page_bytes = state.geometry.page_bytes
    owners = [
        OwnerBytes(
            owner=account.name,
            device=_pages(account, DEVICE) * page_bytes,
            host=_pages(account, HOST) * page_bytes,
        )
        for account in state.quotas.accounts.values()
        if account.pages
    ]
    if len(owners) > OWNERS_TOLD:
        owners = sorted(owners, key=lambda one: -(one.device + one.host))[:OWNERS_TOLD]
    device = sum(worker.pool.cached for worker in state.workers.values()) * page_bytes
    host = sum(storage.pool.cached for storage in state.storages.values() if storage.pool is not None) * page_bytes
    rest = OwnerBytes(
        owner="",
        device=max(0, device - sum(one.device for one in owners)),
        host=max(0, host - sum(one.host for one in owners)),
    )
    return (rest, *owners)


def _pages(account: Account, tier: str) -> int:
    return sum(pages for pool, pages in account.pages.items() if pool.startswith(f"{tier}/"))


MOST_NODES = 1024
MOST_IDS = 16_384
"""Ids that are visited for one page, so that a page holds up the fold for milliseconds however large the tree is."""
_HEAD_TOKENS = 16


def list_cache(state: CellState, call: ListCache) -> CacheListing:
    """Return one page of the listing: nodes by id (the order in which they were made), and all pins.

    Ids are counted up, for sorting would touch every node. Those that are gone or of other namespaces are passed over,
    at most ``MOST_IDS``, so a page may be short, or empty, before the end. ``host_tokens`` and the like are not added
    up here: a node has the same length on each tier that has it. Does not change the state.
    """
    tree = state.tree
    most = min(max(1, call.max_nodes), MOST_NODES)
    first = max(0, call.after) + 1
    end = min(first + MOST_IDS, tree.next_id)
    pinned = _pins_by_node(state)
    nodes: list[CachedNode] = []
    last = first - 1
    for last in range(first, end):
        node = tree.nodes.get(last)
        if node is not None and node.parent and call.namespace in ("", namespace_of(tree, node)):
            nodes.append(_describe(state, node, pinned))
            if len(nodes) == most:
                break
    pins = tuple(_pin(state, pin) for pin in state.pins.values() if call.namespace in ("", pin.namespace))
    leases = tuple(islice(_leases(state, call.namespace), max(0, min(call.max_leases, MOST_NODES))))
    next_after = last if last + 1 < tree.next_id else 0
    return CacheListing(nodes=tuple(nodes), pins=pins, leases=leases, next_after=next_after)


def _leases(state: CellState, namespace: str) -> Iterator[LeaseStatus]:
    """Yield the cache leases of a namespace; "" is all."""
    for lease in state.cache_leases.leases.values():
        if namespace in ("", lease.namespace):
            yield LeaseStatus(
                tenant=lease.tenant,
                namespace=lease.namespace,
                key=lease.key,
                tokens=state.tree.nodes[lease.node].end if lease.node else 0,
                ttl_ms=lease.ttl_ms,
                expires_ns=lease.expires_ns,
            )


def _describe(state: CellState, node: Node, pinned: dict[int, list[str]]) -> CachedNode:
    tree = state.tree
    return CachedNode(
        id=node.id,
        parent=node.parent if tree.nodes[node.parent].parent else 0,
        namespace=namespace_of(tree, node),
        depth=node.depth,
        tokens=node.size,
        hits=node.hits,
        head=node.tokens_between(0, _HEAD_TOKENS),
        device=dict.fromkeys(devices_of(state, node), page_count(tree, node)),
        host=dict.fromkeys(copies_of(state, node), page_count(tree, node)),
        disk=_chunks_by_storage(tree, node, {name: found.disk.chunks for name, found in state.storages.items()}),
        hidden=_chunks_by_storage(tree, node, {name: found.hidden.chunks for name, found in state.storages.items()}),
        pins=tuple(pinned.get(node.id, ())),
    )


def _chunks_by_storage(tree: PrefixTree, node: Node, disks: dict[str, dict[bytes, None]]) -> dict[str, int]:
    """Return, by storage, how many chunks ending in this node its disk has; {} without identities."""
    if not node.identities:
        return {}
    names = node.chunks_ending(tree.page_size)
    found = {storage_id: sum(name in chunks for name in names) for storage_id, chunks in disks.items() if chunks}
    return {storage_id: held for storage_id, held in found.items() if held}


def _pins_by_node(state: CellState) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for pin in state.pins.values():
        for node in ancestors(state.tree, state.tree.nodes[pin.node]) if pin.node else ():
            found.setdefault(node.id, []).append(pin.pin_id)
    return found


def _pin(state: CellState, pin: Pin) -> PinStatus:
    return PinStatus(
        pin_id=pin.pin_id,
        namespace=pin.namespace,
        tokens=count_int32(pin.prefix),
        held_tokens=pin.pages * state.tree.page_size,
        pages=pin.pages,
        expires_ns=pin.expires_ns,
        refusal=pin.refusal,
    )
