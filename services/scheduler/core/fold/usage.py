"""What each tenant has in the queue, at workers and in the cache, for the cell's status. Nothing here mutates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.residency import DEVICE, HOST
from shared.messages.status import OWNERS_TOLD, OwnerBytes, TenantLoad

if TYPE_CHECKING:
    from services.scheduler.core.quotas.quota_accounts import Account
    from services.scheduler.core.state import CellState


def tenant_loads(state: CellState) -> tuple[TenantLoad, ...]:
    """Running and waiting requests of every tenant that has any; those beyond ``OWNERS_TOLD`` count as tenant ""."""
    running: dict[str, int] = {}
    for worker in state.workers.values():
        for request_id in worker.running:
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
    """Bytes on devices and in host memory by owner, and what is nobody's; disks are not known here.

    As quotas count them: what is being loaded or copied for an owner is its own already, and nobody else's.
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
