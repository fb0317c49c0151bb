"""A whole cell with a model and a broker for the API's cases: slower, and nothing in it is scripted."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cell import Cell, running_cell
from tests.fuzz.api_cases import ADMIN_KEY
from tests.fuzz.api_server import hints_for
from tests.fuzz.heard import Heard, listening
from tests.nats_server import NatsServer
from tests.unit.gateway.running_gateway import MODEL_DIR


@dataclass
class RealServer:
    """Satisfies ``api_run.Server``."""

    cell: Cell
    heard: Heard
    host: str
    port: int
    hints: dict[str, list[Any]]

    async def document(self) -> dict[str, Any]:
        described: dict[str, Any] = (await self.cell.http.get("/openapi.json")).json()
        return described

    async def at_rest(self) -> str:
        """The scheduler's pages are counted as well: free + cached = total."""
        try:
            await self.cell.settle()
        except (TimeoutError, AssertionError) as error:
            return f"does not come to rest: {error or type(error).__name__}"
        return ""


@contextlib.asynccontextmanager
async def real_server() -> AsyncIterator[RealServer]:
    """The bundled model on one worker, with host memory and a disk."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder) / "disk"
        disk.mkdir()
        with NatsServer(Path(folder) / "nats") as nats, listening() as heard:
            async with running_cell(
                nats.url,
                MODEL_DIR,
                gateway_settings={"admin_key": ADMIN_KEY, "body_timeout_ms": 2_000},
                storage_settings={"disk_dir": (str(disk),), "disk_kv_bytes": 64 * 2**20},
            ) as cell:
                host, _, port = cell.base_url.removeprefix("http://").rpartition(":")
                yield RealServer(cell, heard, host, int(port), hints_for(cell.model))
