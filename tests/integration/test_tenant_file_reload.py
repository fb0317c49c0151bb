"""A gateway process of its own whose file of tenants changes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.gateway.keys import key_hash
from services.gateway.tenant_file import write_tenants
from services.gateway.tenants import Tenant
from tests.nats_server import NatsServer
from tests.unit.gateway.running_gateway import MODEL_DIR
from tests.waiting import until
from thermocline.supervisor.ports import free_port

pytestmark = pytest.mark.integration


def tenant(key: str) -> dict[str, Tenant]:
    return {"acme": Tenant(salt="0123456789abcdef", keys=(key_hash(key.encode()),))}


@asynccontextmanager
async def gateway(nats_url: str, tenants: Path, log: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    port = free_port()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.gateway", "--nats", nats_url, "--model", str(MODEL_DIR),
            "--port", str(port), "--tenants", str(tenants),
            stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def test_a_change_of_the_file_and_sighup_are_heard_without_a_restart(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """New keys open, old ones do not; SIGHUP reads the file again, changed or not, and ends nothing."""
    tenants, log = tmp_path / "tenants.toml", tmp_path / "log"
    write_tenants(tenants, tenant("old"))
    async with gateway(nats_server.url, tenants, log) as (process, url), httpx.AsyncClient(base_url=url) as client:

        async def status(key: str) -> int:
            try:
                answer = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            except httpx.TransportError:
                return 0
            return answer.status_code

        async def becomes(key: str, wanted: int) -> None:
            async with asyncio.timeout(60):
                while await status(key) != wanted:
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.05)

        await becomes("old", 200)
        assert await status("new") == 401
        write_tenants(tenants, tenant("new"))
        await becomes("new", 200)
        assert await status("old") == 401
        loaded = log.read_text().count("tenants_loaded")
        process.send_signal(signal.SIGHUP)
        await until(lambda: log.read_text().count("tenants_loaded") == loaded + 1)
        assert await status("new") == 200
        process.terminate()

        assert await process.wait() == 0
        assert "sha256" not in log.read_text()
