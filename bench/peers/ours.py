"""A cell of this repository, as ``thermocline up`` starts it, within the same bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.emptying import empty, rest
from bench.peers.systems import Bounds, Tier
from shared.bus.nats_bus import connect
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig


def cell_config(name: str, bounds: Bounds, folder: Path) -> SupervisorConfig:
    """Nothing is set but the bounds; ``name`` says whether there is a disk tier."""
    return SupervisorConfig(
        model=str(bounds.model),
        dtype="bfloat16",
        port=0,
        threads=bounds.threads,
        device_kv_bytes=bounds.device_bytes,
        host_kv_bytes=bounds.host_bytes,
        disk_dir=(str(folder / "disk"),) if name == "ours-disk" else (),
        max_running=bounds.max_running,
        log_level="warning",
    )


class OurServer:
    """See Server."""

    keeps_connections = True

    def __init__(self, cell: RunningCell, disk_folder: Path | None) -> None:
        self.base_url = cell.base_url
        self.disk_folder = disk_folder
        self._cell = cell

    def pids(self) -> Sequence[int]:
        return [self._cell.supervisor_pid]

    def model_name(self) -> str:
        name: str = httpx.get(f"{self.base_url}/v1/models").raise_for_status().json()["data"][0]["id"]
        return name

    def empty(self, tiers: Sequence[Tier]) -> None:
        asyncio.run(self._empty(tuple(tiers)))

    async def _empty(self, tiers: tuple[Tier, ...]) -> None:
        """Once nothing moves any more, so that a save to disk is not overtaken."""
        bus = await connect(tuple(self._cell.nats_url.split(",")), "bench")
        try:
            await rest(bus)
            await empty(bus, tiers)
        finally:
            await bus.close()


@contextmanager
def running_ours(name: str, bounds: Bounds, folder: Path) -> Iterator[OurServer]:
    """Raises CellNotReady."""
    config = cell_config(name, bounds, folder)
    for directory in config.disk_dir:
        Path(directory).mkdir()
    with running(config) as cell:
        yield OurServer(cell, Path(config.disk_dir[0]) if config.disk_dir else None)
