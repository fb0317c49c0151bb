"""The requests and cached bytes of each tenant of the file of tenants. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.openai_schema.cell import CellTenant
from services.gateway.tenants import OTHER
from shared.messages.status import CellStatus, OwnerBytes


def tenant_view(status: CellStatus, owners: Mapping[str, str]) -> list[CellTenant]:
    """Return a row for each tenant, and one for all others; ``owners`` are owners of KV by tenant (``Callers.owners``).

    Tenants with one salt have one cache, and each row shows all of it.
    """
    running, waiting = dict.fromkeys((*owners, OTHER), 0), dict.fromkeys((*owners, OTHER), 0)
    for load in status.tenant_loads:
        name = load.tenant if load.tenant in owners else OTHER
        running[name] += load.running
        waiting[name] += load.waiting
    held = {row.owner: row for row in status.owner_bytes}
    known = set(owners.values())
    others = [row for owner, row in held.items() if owner not in known]
    nothing = OwnerBytes(owner="")
    rows = {name: held.get(owner, nothing) for name, owner in owners.items()}
    rows[OTHER] = OwnerBytes(
        owner="",
        device=sum(row.device for row in others),
        host=sum(row.host for row in others),
        disk=sum(row.disk for row in others),
    )
    return [
        CellTenant(
            tenant=name,
            running=running[name],
            waiting=waiting[name],
            device_bytes=row.device,
            host_bytes=row.host,
            disk_bytes=row.disk,
        )
        for name, row in rows.items()
    ]
