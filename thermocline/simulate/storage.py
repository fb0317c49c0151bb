"""A virtual storage: makes its host pool at once and copies backups over the link of the worker they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.errors import InternalError
from shared.messages import storage_events as events
from shared.messages import storage_plans as plans
from shared.messages.pools import PoolHandle
from thermocline.simulate.cost import Costs, backup_s
from thermocline.simulate.events import NS_PER_S, to_ns
from thermocline.simulate.link import Link


class VirtualStorage:
    """One node's storage. ``links`` are those of the node's workers, by worker id."""

    def __init__(
        self,
        storage_id: str,
        incarnation: str,
        pages: int,
        costs: Costs,
        links: dict[str, Link],
        tell: Callable[[list[Any]], None],
    ) -> None:
        self.storage_id = storage_id
        self.incarnation = incarnation
        self.backups = 0
        self.backed_up_tokens = 0
        self._pages = pages
        self._costs = costs
        self._links = links
        self._tell = tell

    def deliver(self, orders: list[tuple[int, plans.StorageOrder]]) -> None:
        """Orders arrive now: (plan number, order), in sequence."""
        for _, order in orders:
            match order:
                case plans.CreateHostPool():
                    self._create(order)
                case plans.BackupPages():
                    self._backup(order)
                case plans.AttachDevicePool() | plans.DetachDevicePool():
                    pass  # Every link is there from the start.
                case _:
                    raise InternalError(f"{self.storage_id} cannot carry out {type(order).__name__}")

    def _create(self, order: plans.CreateHostPool) -> None:
        handle = PoolHandle(
            kind="shm",
            layout="page_first",
            name=self.incarnation,
            nbytes=self._pages * order.geometry.page_bytes,
            pages=self._pages,
            geometry=order.geometry,
        )
        self._tell([events.HostPoolCreated(storage_id=self.storage_id, incarnation=self.incarnation, handle=handle)])

    def _backup(self, order: plans.BackupPages) -> None:
        tokens = len(order.device_pages) // 4 * self._costs.page_size
        self.backups += 1
        self.backed_up_tokens += tokens

        def done(elapsed_ns: int) -> None:
            self._tell(
                [
                    events.BackupDone(
                        storage_id=self.storage_id,
                        incarnation=self.incarnation,
                        transfer_id=order.transfer_id,
                        ok=True,
                        seconds=elapsed_ns / NS_PER_S,
                    )
                ]
            )

        self._links[order.worker_id].down.copy(to_ns(backup_s(self._costs, tokens)), done)
