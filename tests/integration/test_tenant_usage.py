"""What each tenant has, as a real cell tells it: from the pools, from the disk, and of everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.keys import key_hash
from services.gateway.tenant_file import write_tenants
from services.gateway.tenants import Tenant
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer

pytestmark = pytest.mark.integration

ADMIN = {"x-admin-key": "an-admin-key-of-some-length"}
Rows = dict[str, dict[str, Any]]
SALTS = {"a": "salt-of-tenant-a-0", "b": "salt-of-tenant-b-0"}


async def told(cell: Cell, claim: Callable[[Rows], bool]) -> Rows:
    """Rows of GET /v1/cell by tenant, once ``claim`` holds of them; disks are told once a second."""
    async with asyncio.timeout(30):
        while True:
            report = (await cell.http.get("/v1/cell", headers=ADMIN)).raise_for_status().json()
            found = {row["tenant"]: row for row in report["tenants"]}
            if claim(found):
                return found
            await asyncio.sleep(0.05)


async def test_bytes_of_every_tier_are_told_by_tenant(
    checkpoints: Checkpoints, nats_server: NatsServer, tmp_path: Path
) -> None:
    """Neither tenant has a quota. What is flushed from a tier is not told any more."""
    model, _ = checkpoints["llama"]
    write_tenants(
        tmp_path / "tenants.toml",
        {name: Tenant(salt=salt, keys=(key_hash(f"key-of-{name}".encode()),)) for name, salt in SALTS.items()},
    )
    (tmp_path / "disk").mkdir()
    gateway = {"tenants": str(tmp_path / "tenants.toml"), "api_keys": ("key-of-plain",)}
    async with running_cell(
        nats_server.url,
        model,
        gateway_settings=gateway | {"admin_key": ADMIN["x-admin-key"]},
        scheduler_settings={"host_writes": "through"},
        storage_settings={"disk_dir": (str(tmp_path / "disk"),), "disk_kv_bytes": 2**26},
    ) as cell:
        for number, (name, tokens) in enumerate((("a", 256), ("b", 512), ("plain", 256))):
            cell.http.headers["authorization"] = f"Bearer key-of-{name}"
            await cell.complete([8 + (number + place) % (VOCAB_SIZE - 8) for place in range(tokens)], 1)

        tiers = [f"{tier}_bytes" for tier in ("device", "host", "disk")]
        found = await told(cell, lambda found: all(row[tier] for row in found.values() for tier in tiers))
        assert list(found) == ["a", "b", "other"]
        for tier in ("device", "host"):
            assert found["a"][f"{tier}_bytes"] == found["other"][f"{tier}_bytes"]
            assert found["b"][f"{tier}_bytes"] == 2 * found["a"][f"{tier}_bytes"]
        assert found["b"]["disk_bytes"] > found["a"]["disk_bytes"] > found["a"]["device_bytes"]

        await cell.http.post("/v1/cache/flush", json={"tiers": ["device", "host"], "tenant": "b"}, headers=ADMIN)

        found = await told(cell, lambda found: not found["b"]["host_bytes"])
        assert (found["b"]["device_bytes"], found["b"]["disk_bytes"] > 0) == (0, True)
        assert found["a"]["host_bytes"]
