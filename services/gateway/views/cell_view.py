"""The report of the cell's status for operators. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from services.gateway.openai_schema.cell import CellReport
from services.gateway.views.cache_view import pool_view
from services.gateway.views.cell_flows import flows_view, savings_view
from services.gateway.views.tenant_view import tenant_view
from shared.chunks import chunk_tokens
from shared.messages.status import CellStatus


def cell_view(
    status: CellStatus, owners: Mapping[str, str], age_s: float = 0.0, *, models: Sequence[str] = (), now_ms: int = 0
) -> CellReport:
    """Return the report of ``status``, which this gateway received ``age_s`` ago, at ``now_ms`` of Unix time.

    It is for an operator who may see the tenants in ``owners``. ``models`` are the names that the gateway serves.
    """
    report = msgspec.convert(status, CellReport, from_attributes=True)
    return msgspec.structs.replace(
        report,
        age_ms=round(max(0.0, age_s) * 1000, 1),
        pools=[pool_view(pool) for pool in status.pools],
        tenants=tenant_view(status, owners) if owners else [],
        models=list(models),
        now_ms=now_ms,
        chunk_tokens=chunk_tokens(status.page_size),
        flows=flows_view(status),
        savings=savings_view(status),
    )
