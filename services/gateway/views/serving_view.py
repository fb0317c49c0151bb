"""The report of a cell's devices, pools and context for operators. Pure."""

from __future__ import annotations

from services.gateway.context_limit import ContextLimit
from services.gateway.openai_schema.models import Serving, ServingDevice, ServingPool
from shared.messages.pools import HIDDEN, form_name
from shared.messages.status import CellStatus, StorageBudget


def serving_view(status: CellStatus, limit: ContextLimit) -> Serving:
    """Return the devices and pools of ``status``; the tokens of a disk are estimated by the size of tokens in pools."""
    devices = [worker.device for worker in status.workers if worker.device is not None]
    return Serving(
        devices=[
            ServingDevice(
                worker_id=worker.worker_id,
                kind=worker.device.kind,
                name=worker.device.name,
                ranks=worker.device.ranks,
                note=worker.device.note,
            )
            for worker in status.workers
            if worker.device is not None
        ],
        # Workers of an earlier release do not say in which type they compute, and had no other for KV.
        dtype=next((device.dtype for device in devices if device.dtype), status.dtype),
        kv_dtype=status.dtype,
        context_tokens=limit.tokens,
        model_context_tokens=limit.model_tokens,
        page_size=status.page_size,
        page_bytes=status.page_bytes,
        pools=[*_pools(status), *(pool for budget in status.budgets for pool in _below(status, budget))],
    )


def _pools(status: CellStatus) -> list[ServingPool]:
    """Return the pools of pages.

    A page of hidden states takes fewer bytes for as many tokens, so its ``bytes`` are null.
    """
    return [
        ServingPool(
            tier=form_name(pool.tier),
            owner=pool.owner,
            tokens=pool.total * status.page_size,
            bytes=pool.total * status.page_bytes if pool.tier != HIDDEN else None,
        )
        for pool in status.pools
    ]


def _below(status: CellStatus, budget: StorageBudget) -> list[ServingPool]:
    pools = []
    if budget.awaits_pool:
        pools.append(_of(status, "host", budget.storage_id, budget.host, is_ready=False))
    if budget.disk:
        pools.append(_of(status, "disk", budget.storage_id, budget.disk))
    if budget.has_remote:
        pools.append(ServingPool(tier="remote", owner=budget.storage_id, tokens=None, bytes=None))
    return pools


def _of(status: CellStatus, tier: str, owner: str, size: int, *, is_ready: bool = True) -> ServingPool:
    tokens = size // status.page_bytes * status.page_size if status.page_bytes else None
    return ServingPool(tier=tier, owner=owner, tokens=tokens, bytes=size, is_ready=is_ready)
