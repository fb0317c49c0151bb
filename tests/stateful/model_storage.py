"""A model storage: makes its host pool and copies device pages into it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from shared import codec
from shared.messages import storage_events, storage_plans
from shared.messages.base import unpack_int32
from shared.messages.pools import KvGeometry, PoolHandle
from tests.stateful.model_pages import HostPool, Page, WrongKv

if TYPE_CHECKING:
    from tests.stateful.cell_model import CellModel
    from tests.stateful.model_worker import ModelWorker


class ModelStorage:
    """Makes its host pool and copies device pages into it."""

    def __init__(self, cell: CellModel, storage_id: str, incarnation: str, node: str, pages: int) -> None:
        self.cell = cell
        self.storage_id, self.incarnation, self.node, self.pages = storage_id, incarnation, node, pages
        self.pool: HostPool | None = None
        self.devices: dict[tuple[str, str], ModelWorker] = {}
        self.inbox: deque[storage_plans.StoragePlan] = deque()
        self.outbox: deque[codec.Input] = deque()
        self.last_plan = 0

    def receive(self, plan: storage_plans.StoragePlan) -> None:
        assert plan.number == self.last_plan + len(self.inbox) + 1, "a plan is missing"
        self.inbox.append(plan)

    def step(self, *, backups_succeed: bool = True) -> bool:
        """Execute the next plan; returns whether there was one."""
        if not self.inbox:
            return False
        plan = self.inbox.popleft()
        self.last_plan = plan.number
        match plan.order:
            case storage_plans.CreateHostPool():
                self._create(plan.order.geometry)
            case storage_plans.AttachDevicePool():
                key = (plan.order.worker_id, plan.order.worker_incarnation)
                worker = self.cell.known_workers[key]
                self.devices[key] = worker
            case storage_plans.DetachDevicePool():
                self.devices.pop((plan.order.worker_id, plan.order.worker_incarnation), None)
            case storage_plans.BackupPages():
                self._backup(plan.order, backups_succeed)
        return True

    def _create(self, wanted: KvGeometry) -> None:
        self.pool = HostPool(self.storage_id, self.incarnation, self.pages)
        self.cell.host_pools[self.incarnation] = self.pool
        handle = PoolHandle(
            kind="shm", layout="page_first", name=self.incarnation, nbytes=0, pages=self.pages, geometry=wanted
        )
        self.outbox.append(
            storage_events.HostPoolCreated(storage_id=self.storage_id, incarnation=self.incarnation, handle=handle)
        )

    def _backup(self, order: storage_plans.BackupPages, succeeds: bool) -> None:
        assert self.pool is not None
        device = self.devices.get((order.worker_id, order.worker_incarnation))
        is_ok = succeeds and device is not None
        pairs = zip(unpack_int32(order.device_pages), unpack_int32(order.host_pages), strict=True)
        for index, (device_page, host_page) in enumerate(pairs):
            identity = order.identities[index * 16 : (index + 1) * 16]
            if device is not None:
                page = device.memory.get(device_page)
                if page is None or page.identity() != identity:
                    raise WrongKv(f"{order.worker_id} page {device_page} was reused under a backup")
            if is_ok and device is not None:
                page = device.memory[device_page]
                self.pool.memory[host_page] = Page(page.before, list(page.tokens))
            else:
                self.pool.memory[host_page] = Page(b"half-written", [], is_corrupt=True)
        self.outbox.append(
            storage_events.BackupDone(
                storage_id=self.storage_id,
                incarnation=self.incarnation,
                transfer_id=order.transfer_id,
                ok=is_ok,
                error="" if is_ok else "made to fail",
            )
        )
