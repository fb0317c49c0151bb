"""Invariants that hold between steps, checked from scratch. For tests; slow in proportion to the whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.adapters import find, is_coming
from services.scheduler.core.cache.digests import extend
from services.scheduler.core.cache.holdings import EMPTY_MAP, lists_of, with_lists
from services.scheduler.core.cache.labels import child_of
from services.scheduler.core.cache.leasing import check_cache_leases
from services.scheduler.core.cache.prefix_tree import (
    IDENTITY_BYTES,
    Node,
    ancestors,
    head_of,
    page_count,
)
from services.scheduler.core.cache.prompt_blocks import check_blocks
from services.scheduler.core.cache.residency import DEVICE, HOST, host_pool
from services.scheduler.core.hidden.hidden_invariants import check_hidden, hidden_pages
from services.scheduler.core.kept_texts import check_texts
from services.scheduler.core.lifecycle import ADMITTED, RequestState
from services.scheduler.core.members.drain import check_drain, check_node_drains
from services.scheduler.core.queue.placement import has_adapter, takes_requests
from services.scheduler.core.queue.queue_invariants import check_queues
from services.scheduler.core.quotas.quota_invariants import check_quotas
from services.scheduler.core.require import require
from services.scheduler.core.restoring.fetch_invariants import check_fetches, pages_of_fetches
from services.scheduler.core.sparse.sparse_invariants import check_sparse
from services.scheduler.core.tiers.lending import lent_nodes
from services.scheduler.core.tiers.loads import copies_up
from services.scheduler.core.tiers.save_invariants import check_neighbours, check_saves, locks_beside_requests
from services.scheduler.core.waiting.fair_share import waiting_at
from shared.ids import TOKEN_BYTES
from shared.messages.base import unpack_int32

if TYPE_CHECKING:
    from services.scheduler.core.cache.page_pool import PagePool
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.tiers.under_way import Transfer


def check_invariants(state: CellState) -> None:
    """Raise InvariantViolated if anything in the state contradicts anything else."""
    _check_tree(state)
    _check_lost(state)
    for worker in state.workers.values():
        _check_device_pool(state, worker)
        _check_locks(state, worker)
        _check_worker(state, worker)
        check_drain(state, worker)
        check_texts(worker.worker_id, worker.texts)
    for storage in state.storages.values():
        if storage.pool is not None:
            _check_host_pool(state, storage)
        if storage.hidden.pool is not None:
            _check_pool(f"hidden pool of {storage.storage_id}", storage.hidden.pool, hidden_pages(state, storage))
            require(not storage.hidden.pool.cached, f"{storage.storage_id} caches pages in its hidden pool")
    check_node_drains(state)
    _check_transfers(state)
    check_fetches(state)
    check_saves(state)
    check_hidden(state)
    check_sparse(state)
    check_neighbours(state)
    check_quotas(state)
    _check_requests(state)
    check_queues(state)
    _check_pins(state)
    check_cache_leases(state)
    check_blocks(state.blocks, state.tree)
    _check_timers(state)
    _check_hotness(state)
    require(state.renewal is None or "renew" in state.timers, "a change of policy would never be done")
    coming = state.renewal.orders if state.renewal is not None else {}
    for name, order in (*state.orders.items(), *coming.items()):
        fault = order.check()
        require(not fault, f"{state.policy} of {name}: {fault}")


def _check_tree(state: CellState) -> None:
    tree = state.tree
    reachable = 0
    for node in tree.nodes.values():
        if not node.parent:
            require(tree.roots.get(node.namespace) == node.id, f"root {node.id} is not its namespace's")
            require(bool(node.children), f"root {node.id} has no children")
        reachable += len(node.child_ids)
        for child_id in node.child_ids:
            child = tree.nodes.get(child_id)
            require(child is not None and child.parent == node.id, f"child {child_id} of {node.id} is elsewhere")
            require(child is not None and child_of(tree, node, child.tokens, 0) is child, f"{child_id} is not found")
        if node.parent:
            _check_node(state, node)
    require(reachable + len(tree.roots) == len(tree.nodes), "a node is not its parent's child")


def _check_lost(state: CellState) -> None:
    """Check that a lost pool that is not struck yet has no successor, and will be struck."""
    require(not state.lost or "strike" in state.timers, "lost pools would never be struck")
    require(bool(state.lost) or not state.arriving, "a worker waits to join although no pool is lost")
    for key in state.lost:
        tier, _, name = key.partition("/")
        require(tier != DEVICE or name not in state.workers, f"{name} has joined while its earlier pool is lost")
        storage = state.storages.get(name) if tier == HOST else None
        require(storage is None or storage.pool is None, f"{name} has a pool, and one that is lost")
        require(key not in state.orders, f"there is a policy for the lost pool {key}")


def _check_node(state: CellState, node: Node) -> None:
    tree = state.tree
    name = f"node {node.id}"
    pages = page_count(tree, node)
    require(pages > 0 and node.size == pages * tree.page_size, f"{name} is not a span of whole pages")
    is_left = any(node.id in pool.left for pool in state.lost.values())
    require(bool(node.device or node.loading or node.host) or is_left, f"{name} is in no pool")
    parent = tree.nodes[node.parent]
    require(node.depth == parent.end, f"{name} begins elsewhere")
    require(node.digest == extend(parent.end_digest, head_of(tree, node.tokens)), f"{name} has another digest")
    require(node.end_digest == extend(parent.end_digest, node.tokens), f"{name} has another digest at its end")
    maps = (node.locks, node.host_locks, node.below)
    require(all(held or held is EMPTY_MAP for held in maps), f"{name} keeps an empty dictionary of its own")
    is_number = isinstance(node.children, int)
    require(is_number == (len(node.child_ids) < 2), f"{name} keeps a dictionary of fewer than two children")
    lists = lists_of(node.record, node.pools)
    require(all(len(each) == pages * 4 for each in lists), f"{name} has a wrong number of pages")
    require(node.record == with_lists(node.record, lists), f"the pages of {name} are not in their shortest form")
    for worker_id in (*node.device, *node.loading):
        is_known = worker_id in state.workers or f"{DEVICE}/{worker_id}" in state.lost
        require(is_known, f"{name} is on the unknown device {worker_id}")
    for worker_id in node.device:
        require(worker_id not in node.loading, f"{name} is loading where it is already")
        require(not parent.parent or worker_id in parent.device, f"{name} is on {worker_id} without its parent")
    for worker_id in node.loading:
        above = not parent.parent or worker_id in parent.device or worker_id in parent.loading
        require(above, f"{name} is loading to {worker_id} without its parent")
    for storage_id in node.host:
        is_known = storage_id in state.storages or f"{HOST}/{storage_id}" in state.lost
        require(is_known, f"{name} is in the unknown host pool {storage_id}")
    require(all(owner in node.host for owner in node.quarantined), f"{name} has no copy to quarantine")
    require(len(node.identities) in (0, pages * IDENTITY_BYTES), f"{name} has a wrong number of identities")
    require(len(node.backup_pages) in (0, pages * 4), f"{name} has a wrong number of pages under backup")
    below: dict[str, int] = {}
    for child_id in node.child_ids:
        child = tree.nodes[child_id]
        for worker_id in (*child.device, *child.loading):
            below[worker_id] = below.get(worker_id, 0) + 1
    require(below == node.below, f"{name} miscounts its children on devices")


def _check_pool(name: str, pool: PagePool, owned: list[bytes]) -> None:
    """Check that each page is free or owned exactly once."""
    require(len(pool.free_map) == pool.total, f"{name} has a map of another size")
    seen = bytearray(pool.free_map)
    require(pool.free == sum(seen), f"{name} miscounts its free pages")
    require(not any(seen[: pool.lowest]), f"{name} has a free page below its lowest")
    for pages in (unpack_int32(held) for held in owned):
        for page in pages:
            require(0 <= page < pool.total, f"{name} has no page {page}")
            require(not seen[page], f"{name}: page {page} is owned twice")
            seen[page] = 1
    require(all(seen), f"{name} lost a page")


def _check_device_pool(state: CellState, worker: Worker) -> None:
    name = f"pool of {worker.worker_id}"
    owned, cached, locked = [], 0, 0
    for node in state.tree.nodes.values():
        held = node.device_pages(worker.worker_id) if worker.worker_id in node.device else b""
        owned.append(held)
        if worker.worker_id in node.loading:
            owned.append(node.loading_pages(worker.worker_id))
        cached += len(held) // 4
        locked += len(held) // 4 if node.locks.get(worker.worker_id) else 0
    owned += [state.requests[request_id].own_pages for request_id in worker.work.running]
    _check_pool(name, worker.pool, owned)
    require(worker.pool.cached == cached, f"{name} miscounts its cached pages")
    require(worker.pool.locked == locked, f"{name} miscounts its locked pages")
    if not worker.work.running and not worker.work.batches:
        promoted = sum(page_count(state.tree, node) for _, nodes in copies_up(state, worker) for node in nodes)
        require(worker.pool.leased == promoted, f"{name} has leased pages at idle")
        is_read = bool(locks_beside_requests(state, worker))
        require(worker.pool.locked == 0 or is_read, f"{name} has locked pages at idle")


def _check_host_pool(state: CellState, storage: Storage) -> None:
    name = f"pool of {storage.storage_id}"
    pool = host_pool(storage)
    owned, cached = [], 0
    for node in state.tree.nodes.values():
        held = node.host_pages(storage.storage_id) if storage.storage_id in node.host else b""
        owned.append(held)
        cached += len(held) // 4
        if node.transfer and state.transfers[node.transfer].storage_id == storage.storage_id:
            owned.append(node.backup_pages)
    transfers = [item for item in state.transfers.values() if item.storage_id == storage.storage_id]
    late = sum(transfer.is_late for transfer in transfers)
    require(storage.late_backups == late, f"{storage.storage_id} has another number of late backups")
    owned += [transfer.held for transfer in transfers]
    fetched = pages_of_fetches(state, storage)
    owned.append(fetched)
    _check_pool(name, pool, owned)
    require(pool.cached == cached, f"{name} miscounts its cached pages")
    if not transfers:
        require(pool.leased == len(fetched) // 4, f"{name} has leased pages without a transfer")


def _check_locks(state: CellState, worker: Worker) -> None:
    """Check that each device lock has its user: a running request, a save, or a neighbour's load."""
    locks = locks_beside_requests(state, worker)
    for request_id in worker.work.running:
        node_id = state.requests[request_id].node
        if node_id:
            for node in ancestors(state.tree, state.tree.nodes[node_id]):
                locks[node.id] = locks.get(node.id, 0) + 1
    for node in state.tree.nodes.values():
        held = node.locks.get(worker.worker_id, 0)
        require(held == locks.get(node.id, 0), f"node {node.id} has {held} locks of {worker.worker_id}")
        require(
            not held or worker.worker_id in node.device or worker.worker_id in node.loading,
            "a node is locked where it is not resident",
        )
        require(worker.worker_id not in node.locks or held > 0, f"node {node.id} keeps an empty lock")


def _check_worker(state: CellState, worker: Worker) -> None:
    loading: dict[int, int] = {}
    for _, nodes in copies_up(state, worker):
        for node in nodes:
            loading[node.id] = loading.get(node.id, 0) + 1
    for node in state.tree.nodes.values():
        expected = 1 if worker.worker_id in node.loading else 0
        require(loading.get(node.id, 0) == expected, f"node {node.id} is loading for {loading.get(node.id, 0)} copies")
    require(
        worker.moves.leaving == _pages_leaving(state, worker), f"{worker.worker_id} miscounts the pages under backup"
    )
    for wait in worker.lease_waits:
        require(wait.request_id in worker.work.running, f"{wait.request_id} waits for a lease and does not run")


def _pages_leaving(state: CellState, worker: Worker) -> int:
    """Return the number of unlocked pages of this worker's nodes in backups whose deadline has not passed."""
    name = worker.worker_id
    nodes = [
        state.tree.nodes[node_id]
        for transfer in state.transfers.values()
        if transfer.worker_id == name and not transfer.is_late and not transfer.stays
        for node_id in transfer.nodes
    ]
    return sum(page_count(state.tree, node) for node in nodes if name in node.device and name not in node.locks)


def _check_transfers(state: CellState) -> None:
    members: dict[int, int] = {}
    host_locks: dict[tuple[int, str], int] = {}
    for transfer in state.transfers.values():
        require(transfer.storage_id in state.storages, f"transfer {transfer.transfer_id} has no storage")
        for node_id in transfer.nodes:
            node = state.tree.nodes.get(node_id)
            require(node is not None and transfer.worker_id in node.device, f"node {node_id} left under a backup")
            members[node_id] = transfer.transfer_id
        _check_order(state, transfer)
    for worker in state.workers.values():
        for storage_id, nodes in copies_up(state, worker):
            for node in nodes if storage_id else ():
                host_locks[node.id, storage_id] = host_locks.get((node.id, storage_id), 0) + 1
    for fetch in state.fetches.values():
        for node in lent_nodes(state, fetch.lent_node, fetch.lent_from) if fetch.lent_node else ():
            host_locks[node.id, fetch.lender_id] = host_locks.get((node.id, fetch.lender_id), 0) + 1
    for pin in state.pins.values():
        for node in ancestors(state.tree, state.tree.nodes[pin.node]) if pin.node else ():
            host_locks[node.id, pin.storage_id] = host_locks.get((node.id, pin.storage_id), 0) + 1
    for node_id, entry in state.cache_leases.nodes.items():
        for storage_id in entry.storages:
            host_locks[node_id, storage_id] = host_locks.get((node_id, storage_id), 0) + 1
    for node in state.tree.nodes.values():
        require(
            node.transfer == members.get(node.id, 0), f"node {node.id} names another backup than the one that lists it"
        )
        require(bool(node.transfer) or not node.backup_pages, f"node {node.id} keeps pages of a backup that is over")
        for storage_id, held in node.host_locks.items():
            if f"{HOST}/{storage_id}" in state.lost:
                continue  # Struck with the node's copy there.
            require(held > 0 and held == host_locks.pop((node.id, storage_id), 0), f"host locks of node {node.id}")
            require(storage_id in node.host, f"node {node.id} has a host lock and no copy")
    require(not host_locks, "a copy up reads a host copy without a lock")


def _check_pins(state: CellState) -> None:
    """Check that each pin counts the pages that it locks, and that together they fit the pool."""
    for pin in state.pins.values():
        path = ancestors(state.tree, state.tree.nodes[pin.node]) if pin.node else []
        require(pin.pages == sum(page_count(state.tree, node) for node in path), f"pin {pin.pin_id} miscounts")
        tokens = b"".join(node.tokens for node in reversed(path))
        require(pin.prefix.startswith(tokens), f"pin {pin.pin_id} holds other tokens")
        require(pin.timer_id in state.timers, f"pin {pin.pin_id} would never end")
    for storage in state.storages.values():
        if storage.pool is not None:
            held = sum(pin.pages for pin in state.pins.values() if pin.storage_id == storage.storage_id)
            require(held <= storage.pool.total, f"pins hold more than {storage.storage_id} has")


def _check_order(state: CellState, transfer: Transfer) -> None:
    """Check that in a backup a node stands behind its children, which leave first."""
    place = {node_id: index for index, node_id in enumerate(transfer.nodes)}
    for node_id in transfer.nodes:
        above = state.tree.nodes[node_id].parent
        require(place.get(above, len(place)) > place[node_id], f"node {above} would leave before its child {node_id}")


def _check_requests(state: CellState) -> None:
    """Check that each request is in exactly one place, and that its pages fit its state."""
    places: dict[str, int] = {}
    for worker in state.workers.values():
        for request_id in (*waiting_at(worker), *worker.work.running):
            places[request_id] = places.get(request_id, 0) + 1
            require(state.requests[request_id].worker_id == worker.worker_id, f"{request_id} is at another worker")
        for request_id in worker.work.running:
            require(state.requests[request_id].state in ADMITTED, f"{request_id} runs without being admitted")
    for request_id in state.unplaced:
        places[request_id] = places.get(request_id, 0) + 1
    for name in state.unplaced:
        adapter = state.requests[name].submit.adapter
        require(not takes_requests(state, adapter), f"{name} is unplaced though there are workers")
    _check_adapters(state)
    queued = tokens = 0
    for request in state.requests.values():
        name = request.request_id
        expected = 0 if request.state is RequestState.RESUMING else 1
        require(places.get(name, 0) == expected, f"{name} is in {places.get(name, 0)} places")
        _check_last_match(state, request)
        if request.state is RequestState.WAITING:
            queued, tokens = queued + 1, tokens + request.token_count
        if request.state not in ADMITTED:
            require(not request.pages and not request.node, f"{name} owns pages and does not run")
            continue
        _check_page_table(state, request.request_id)
    require((queued, tokens) == (state.queued, state.queued_tokens), "the queue is miscounted")


def _check_adapters(state: CellState) -> None:
    """Check that each adapter counts its requests, is kept only for them or a name, and is where it is needed."""
    counts = dict.fromkeys(state.adapters, 0)
    for request in state.requests.values():
        if request.submit.adapter:
            counts[request.submit.adapter] += 1
            worker = state.workers.get(request.worker_id)
            require(
                worker is None or has_adapter(worker, request.submit.adapter), f"{request.request_id} lacks its adapter"
            )
    names: list[str] = []
    for digest, adapter in state.adapters.items():
        require(adapter.requests == counts[digest], f"adapter {digest} miscounts its requests")
        is_used = adapter.names or adapter.requests or adapter.displaced_from or is_coming(state, digest)
        require(bool(is_used), f"adapter {digest} is kept without a request or a name")
        require(not (adapter.names and adapter.displaced_from), f"adapter {digest} has a name and has lost it")
        names += adapter.names
    require(len(names) == len(set(names)), "two adapters have one name")
    for name, replacement in state.replacements.items():
        before = find(state, name)
        require(before is not None and before.digest != replacement.digest, f"{name} is given to what has it")
        require(bool(replacement.faults) or replacement.digest in state.adapters, f"what is to get {name} is dropped")
    for worker in state.workers.values():
        require(worker.adapters.keys() <= state.adapters.keys(), f"{worker.worker_id} keeps an adapter without use")


def _check_last_match(state: CellState, request: Request) -> None:
    """Check that the node where the last match ended, if it lives, is on the path of the request's tokens."""
    node = state.tree.nodes.get(request.match.node)
    if node is not None:
        path = b"".join(above.tokens for above in reversed(ancestors(state.tree, node)))
        length = request.match.tokens * TOKEN_BYTES
        is_known = length <= len(path) and request.submit.prompt[:length] == path[:length]
        require(is_known, f"{request.request_id} remembers a match of other tokens")


def _check_page_table(state: CellState, request_id: str) -> None:
    """Check that the shared front of a page table is what the tree holds on the request's path."""
    request = state.requests[request_id]
    path = ancestors(state.tree, state.tree.nodes[request.node]) if request.node else []
    held = b"".join(
        (node.device_pages if request.worker_id in node.device else node.loading_pages)(request.worker_id)
        for node in reversed(path)
    )
    require(request.pages[: request.shared * 4] == held, f"{request_id} and the tree disagree on its pages")
    tokens = b"".join(node.tokens for node in reversed(path))
    sequence_tokens = request.tokens
    require(sequence_tokens.startswith(tokens), f"{request_id} holds a path of other tokens")
    require(request.computed <= request.planned <= request.token_count, f"{request_id} computed more than planned")


def _check_timers(state: CellState) -> None:
    for timer_id, timer in state.timers.items():
        if timer.kind == "strike":
            require(bool(state.lost), f"timer {timer_id} is for no lost pool")
        elif timer.kind == "flush":
            require(bool(state.flushes), f"timer {timer_id} is for no flush")
        elif timer.kind == "renew":
            require(state.renewal is not None, f"timer {timer_id} is for no change of policy")
        elif timer.kind == "pin":
            require(state.pins[timer.subject].timer_id == timer_id, f"timer {timer_id} is for no pin")
        elif timer.kind == "cache_lease":
            lease = state.cache_leases.leases[int(timer.subject)]
            require(lease.timer_id == timer_id, f"timer {timer_id} is for no lease")
        elif timer.kind == "adapter":
            require(bool(state.adapters[timer.subject].displaced_from), f"timer {timer_id} is for no displaced adapter")
        elif timer.kind == "save":
            is_known = int(timer.subject) in state.saves or int(timer.subject) in state.hidden_saves
            require(is_known, f"timer {timer_id} is for no save")
        elif timer.kind == "hidden_lease":
            require(state.leases[int(timer.subject)].timer_id == timer_id, f"timer {timer_id} is for no lease")
        elif timer.kind == "hidden_fetch":
            require(int(timer.subject) in state.hidden_fetches, f"timer {timer_id} is for no fetch of hidden states")
        elif timer.kind == "reads":
            require(timer_id in state.late_reads, f"timer {timer_id} is for no late reads")
        elif timer.kind == "drain":
            drain = state.workers[timer.subject].drain
            require(drain is not None and drain.timer_id == timer_id, f"timer {timer_id} is for no drain")
        elif timer.kind == "hand_over":
            require(state.handing[timer.subject].timer_id == timer_id, f"timer {timer_id} is for no node that drains")
        elif timer.kind == "hand_again":
            is_known = state.handing[timer.subject].pause_timer == timer_id
            require(is_known, f"timer {timer_id} is for no node that pauses")
        elif timer.kind == "fetch":
            require(int(timer.subject) in state.fetches, f"timer {timer_id} is for no fetch")
        elif timer.kind == "backup":
            require(int(timer.subject) in state.transfers, f"timer {timer_id} is for no transfer")
        else:
            request = state.requests.get(timer.subject)
            known = request is not None and timer_id in (
                request.deadline_timer,
                request.patience.timer,
                request.patience.fetch_timer,
                request.resume_timer,
            )
            require(known, f"timer {timer_id} is for no request")


def _check_hotness(state: CellState) -> None:
    """Check that the filter counts its entries right and knows every node, unless it once overflowed."""
    hotness = state.hotness
    require(hotness.occupied == hotness.count_entries(), "the hotness filter miscounts its entries")
    if "hotness_overflows" not in state.counters:
        for node in state.tree.nodes.values():
            require(
                not node.parent or hotness.lookup(node.digest)[0] > 0,
                f"the hotness filter does not know node {node.id}",
            )
