"""Seeded walks of a cell of two or three nodes whose storages read one another's host memory and disks, and come and
go.
"""

from __future__ import annotations

import random

from shared.chunks import chunk_bytes
from shared.messages.cell_events import CellConfig
from tests.stateful.cell_driver import NOISES, CellDriver
from tests.stateful.model_pages import geometry
from tests.stateful.walking import move, unmet

WALKS = 40
STORAGES = ("storage", "storage-b", "storage-c")
NODES = ("node", "node-b", "node-c")
TROUBLES = (
    *("worker_dies", "worker_starts", "worker_drains", "storage_dies", "storage_starts"),
    *("storage_drains", "storage_drains", "hand_over_timer", "pause_timer", "page_rots", "chunk_rots", "waiters_leave"),
)

MUST_HAPPEN = (
    "evicted_pages_host",
    "fetch_deadlines",
    "fetched_tokens",
    "fetched_tokens_lent",
    "fetches_cancelled",
    "fetches_failed",
    "fetches_shared",
    "fetches_without_room",
    "handed_on_pages",
    "hit_tokens_disk",
    "hit_tokens_host",
    "hit_tokens_lent",
    "loans_started",
    "node_drain_pauses",
    "node_drains_cut_short",
    "node_drains_done",
    "raised_tokens",
    "raises_started",
    "storages_lost",
    "workers_lost",
)
"""What the walks together must have met; otherwise they would prove nothing about it."""


class SharingDriver(CellDriver):
    """Each node has a storage and a worker."""

    nodes = 2
    handover_bytes = 0

    def start_storage(self, index: int) -> None:
        number = index % self.nodes
        self.cell.storages.pop(STORAGES[number], None)
        self.cell.add_storage(
            STORAGES[number],
            node=NODES[number],
            pages=self.host_pages,
            disk_chunks=self.disk_chunks,
            shares="engine",
            handover_bytes=self.handover_bytes,
        )

    def start_worker(self, index: int) -> None:
        number = index % self.nodes
        self.cell.workers.pop(f"worker-{number}", None)
        self.cell.add_worker(f"worker-{number}", node=NODES[number], pages=self.pages)

    def trouble(self, kind: str, index: int) -> None:
        cell = self.cell
        if kind == "worker_dies" and len(cell.workers) > 1:
            cell.lose_worker(self._worker(index).worker_id)
        elif kind == "worker_starts":
            self.start_worker(index)
        elif kind == "storage_dies" and len(cell.storages) > 1:
            cell.lose_storage(list(cell.storages)[index % len(cell.storages)])
        elif kind == "storage_drains" and cell.storages:
            storage = list(cell.storages.values())[index % len(cell.storages)]
            if not storage.is_draining:
                storage.drain(grace_ms=(0, 1_000)[index % 7 > 0])
                while index % 2 and storage.outbox:
                    cell.deliver(storage)
                if index % 3 == 0:
                    self.trouble("hand_over_timer", index)
                if index % 4 == 1:
                    self.fail_fetches()
        elif kind == "worker_drains" and cell.workers:
            super().trouble(kind, index)
        elif kind == "hand_over_timer":
            for name in [name for name in cell.timers if name.startswith("hand_over.")][:1]:
                cell.fire(name)
        elif kind == "pause_timer":
            self.end_pauses()
        elif kind == "chunk_rots":
            for disk in cell.disks.values():
                for pages in list(disk.chunks.values())[index % 5 :: 5]:
                    pages[0].is_corrupt = True
        elif kind == "storage_starts":
            self.start_storage(index)
        elif kind == "page_rots":
            pages = [
                page for storage in cell.storages.values() if storage.pool for page in storage.pool.memory.values()
            ]
            for page in pages[index % 7 :: 7]:
                page.is_corrupt = True
        elif kind == "waiters_leave":
            for name in [name for name, request in cell.state.requests.items() if request.prefetch.fetch]:
                cell.cancel(name)
        elif kind == "storage_moves" and cell.storages:
            storage = list(cell.storages.values())[index % len(cell.storages)]
            storage.step(backups_succeed=index % 5 > 0)
            storage.fetch(index=index, chunks=1 + index % 3, error="made to fail" if index % 11 == 0 else "")
            if index % 3:
                cell.deliver(storage)

    def fail_fetches(self) -> None:
        """No storage gets through to what it was to fetch."""
        for storage in list(self.cell.storages.values()):
            while storage.step():
                pass
            while storage.fetch(error="made to fail"):
                self.cell.deliver(storage)

    def end_pauses(self) -> bool:
        """Have copies that failed ordered again; returns whether there were any."""
        names = [name for name in self.cell.timers if name.startswith("hand_again.")]
        for name in names:
            self.cell.fire(name)
        return bool(names)

    def finish(self) -> None:
        self.cell.drain()
        while self.end_pauses():
            self.cell.drain()
        super().finish()


def walk(seed: int) -> dict[str, int]:
    """Drive one cell; returns its counters."""
    chance = random.Random(seed)
    config = CellConfig(
        max_batch_tokens=chance.choice([64, 400]),
        max_running=chance.randint(1, 3),
        min_host_load_tokens=1,
        min_prefetch_tokens=chance.choice([1, 1, 100]),
        prefetch_wait=chance.choice(["best_effort", "deadline", "full"]),
        prefetch_fraction=chance.choice([0.1, 0.5, 1.0]),
        host_writes="through",
        disk_writes=chance.choice(["off", "through"]),
        defer_tokens=chance.choice([0, 20]),
    )
    driver = SharingDriver(
        config,
        page_size=chance.choice([16, 32, 64]),
        workers=0,
        pages=chance.choice([16, 24]),
        host_pages=0,
        disk_chunks=40,
    )
    driver.host_pages = chance.choice([12, 20, 60])
    driver.nodes = chance.choice([2, 3])
    driver.handover_bytes = chance.choice([0, 3 * chunk_bytes(geometry(driver.cell.page_size)), 1 << 40, 1 << 40])
    for index in range(driver.nodes):
        driver.start_storage(index)
        driver.start_worker(index)
    driver.everything_moves(3)
    for _ in range(160):
        point = chance.random()
        if point < 0.05:
            driver.trouble(chance.choice(TROUBLES), chance.randrange(1000))
        elif point < 0.065:
            driver.start_storage(chance.randrange(3))
            driver.start_worker(chance.randrange(3))
        elif point < 0.1:
            driver.noise(chance.choice((*NOISES, "fetch_timer", "fetch_timer")), chance.randrange(1000))
        elif point < 0.18:
            driver.flush(chance.choice([("device",), ("device",), ("device", "host"), ("host",)]), None)
        elif point < 0.45:
            driver.submit([chance.randint(0, 2) for _ in range(chance.randint(2, 8))], chance.randint(0, 3), 2)
        elif point < 0.7:
            driver.trouble("storage_moves", chance.randrange(1000))
        else:
            move(driver, chance, chance.choice(["all", "worker", "heard"]))
    driver.finish()
    assert not driver.cell.state.handing
    return driver.cell.state.counters


def test_nodes_that_share_end_well_and_meet_everything() -> None:
    """Every walk ended without a wrong read, a leak or a stuck request, and all of this happened on the way."""
    assert unmet((walk(seed) for seed in range(WALKS)), MUST_HAPPEN) == []
