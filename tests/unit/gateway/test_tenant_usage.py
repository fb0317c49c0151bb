"""What is told and counted by tenant, and that nobody but the file's tenants has a name there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway import tenant_metrics
from services.gateway.callers import Callers
from services.gateway.keys import key_hash
from services.gateway.openai_schema.cell import CellTenant
from services.gateway.tenant_file import write_tenants
from services.gateway.tenant_metrics import TenantCollector
from services.gateway.tenants import Tenant
from services.gateway.views.cell_view import cell_view
from services.gateway.views.tenant_view import tenant_view
from shared import metrics
from shared.ids import key_digest
from shared.messages.gateway_notices import TENANTS_BOUND
from shared.messages.status import CellStatus, OwnerBytes, TenantLoad
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.unit.gateway.scripted_cell import cell_status

SALT, SALT_B = "0123456789abcdef", "fedcba9876543210"
BODY = {"model": "test-model", "prompt": "a b c", "max_tokens": 3}


def a_status(loads: tuple[TenantLoad, ...] = (), owners: tuple[OwnerBytes, ...] = ()) -> CellStatus:
    return cell_status(tenant_loads=loads, owner_bytes=owners)


def test_everybody_outside_the_file_is_one() -> None:
    """Holders of --api-keys, callers without a key, the administration, and tenants of other gateways' files."""
    status = a_status(
        (
            TenantLoad(tenant="a", running=1, waiting=2),
            TenantLoad(tenant="", running=3, waiting=0),
            TenantLoad(tenant="0123456789abcdef", running=1, waiting=1),
            TenantLoad(tenant="elsewhere", running=0, waiting=4),
        ),
        (
            OwnerBytes(owner="", device=5, disk=1),
            OwnerBytes(owner="of-a", device=10, host=20, disk=30),
            OwnerBytes(owner="of-elsewhere", host=7),
        ),
    )

    view = tenant_view(status, {"a": "of-a", "idle": "of-idle"})

    assert view == [
        CellTenant(tenant="a", running=1, waiting=2, device_bytes=10, host_bytes=20, disk_bytes=30),
        CellTenant(tenant="idle", running=0, waiting=0, device_bytes=0, host_bytes=0, disk_bytes=0),
        CellTenant(tenant="other", running=4, waiting=5, device_bytes=5, host_bytes=7, disk_bytes=1),
    ]


def test_tenants_of_one_salt_are_each_told_what_they_share() -> None:
    """And nobody else is."""
    view = tenant_view(a_status((), (OwnerBytes(owner="both", host=8),)), {"one": "both", "two": "both"})

    assert [(row.tenant, row.host_bytes) for row in view] == [("one", 8), ("two", 8), ("other", 0)]


def test_without_a_file_nobody_is_told_apart() -> None:
    """The report has no rows then."""
    status = a_status((TenantLoad(tenant="", running=1, waiting=0),))

    assert cell_view(status, {}).tenants == []
    assert [row.tenant for row in cell_view(status, {"a": "x"}).tenants] == ["a", "other"]


def test_a_scrape_asks_for_what_is_so_then() -> None:
    """A series for each tenant and state or tier; none while the scheduler is silent."""
    rows = [CellTenant(tenant="a", running=1, waiting=2, device_bytes=10, host_bytes=20, disk_bytes=30)]
    registry = CollectorRegistry(auto_describe=True)
    registry.register(TenantCollector(lambda: rows))

    lines = generate_latest(registry).decode().splitlines()

    assert 'thermocline_tenant_requests{state="waiting",tenant="a"} 2.0' in lines
    assert 'thermocline_tenant_cached_bytes{tenant="a",tier="disk"} 30.0' in lines
    rows.clear()
    assert all(line.startswith("#") for line in generate_latest(registry).decode().splitlines())


def counted(family: str) -> dict[tuple[str, ...], float]:
    """A counter's samples by the values of their labels, without zeros."""
    for found in text_string_to_metric_families(metrics.render().decode()):
        if found.name == f"thermocline_{family}":
            return {tuple(each.labels.values()): each.value for each in found.samples if each.value}
    return {}


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[Path]:
    """A file with tenants that no other test has; what was counted of them is gone afterwards."""
    path = tmp_path / "tenants.toml"
    write_tenants(
        path,
        {
            "usage-a": Tenant(salt=SALT, keys=(key_hash(b"key-a"),), requests_per_minute=2),
            "usage-b": Tenant(salt=SALT_B, keys=(key_hash(b"key-b"),), max_concurrent=1),
        },
    )
    yield path
    for name in ("usage-a", "usage-b"):
        tenant_metrics.forget(name)


async def ask(harness: Harness, key: str, **changes: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await harness.client.post("/v1/completions", json=BODY | changes, headers=headers)


async def test_tokens_are_counted_by_tenant(tenants: Path) -> None:
    """In, found in a cache, and out; with a key of --api-keys they are everybody else's."""
    before = counted("tenant_generation_tokens").get(("other",), 0.0)
    async with running_gateway(
        says("one two three four"), tenants=str(tenants), tenant_metrics=True, api_keys=("plain-key",)
    ) as harness:
        for key in ("key-a", "key-b", "key-b", "plain-key"):
            assert (await ask(harness, key)).status_code == 200
        prompt = harness.cell.submitted[0].prompt_tokens

    assert counted("tenant_prompt_tokens")[("usage-a",)] == prompt
    assert counted("tenant_prompt_tokens")[("usage-b",)] == 2 * prompt
    assert counted("tenant_prompt_tokens_cached")[("usage-a",)] == prompt // 2 + prompt // 4
    assert counted("tenant_generation_tokens")[("usage-b",)] == 6
    assert counted("tenant_generation_tokens")[("other",)] == before + 3


async def test_what_is_turned_away_is_counted_by_reason(tenants: Path) -> None:
    """The tenant's own limits, the cell's queue, and this gateway's bound."""
    async with running_gateway(tenants=str(tenants), tenant_metrics=True, max_inflight=2) as harness:
        first = asyncio.create_task(ask(harness, "key-b"))
        await harness.cell.until(lambda: len(harness.cell.submitted) == 1)
        assert (await ask(harness, "key-b")).status_code == 429
        assert (await ask(harness, "key-a", n=2)).status_code == 429
        await harness.cell.refuse(harness.cell.submitted[0], "queue_full", 100)
        assert (await first).status_code == 429
        second = asyncio.create_task(ask(harness, "key-a"))
        await harness.cell.until(lambda: len(harness.cell.submitted) == 2)
        assert (await ask(harness, "key-a")).status_code == 429
        await harness.cell.refuse(harness.cell.submitted[1], "queue_full", 100, f"{TENANTS_BOUND} 1 waiting requests")
        assert (await second).json()["error"]["code"] == "tenant_queue_full"

    rejected = {key: value for key, value in counted("tenant_requests_rejected").items() if "usage" in key[0] + key[1]}
    by_name = {tuple(sorted(key)): value for key, value in rejected.items()}
    assert by_name == {
        ("concurrency", "usage-b"): 1,
        ("queue", "usage-b"): 1,
        ("gateway", "usage-a"): 1,
        ("requests", "usage-a"): 1,
        ("queue", "usage-a"): 1,
    }


async def test_a_tenant_that_leaves_the_file_takes_its_series_along(tenants: Path) -> None:
    """What it still has running counts with everybody else's, so that it cannot come back by itself."""
    callers = Callers(tenants_file=str(tenants))
    account = callers.account("usage-a")
    assert account is not None
    assert callers.owners == {"usage-a": key_digest(SALT), "usage-b": key_digest(SALT_B)}
    assert account.label == "usage-a"
    assert 'tenant="usage-a"' in metrics.render().decode()

    write_tenants(tenants, {"usage-b": Tenant(salt=SALT_B)})
    await callers.reload()

    assert account.label == "other"
    assert callers.owners == {"usage-b": key_digest(SALT_B)}
    assert 'tenant="usage-a"' not in metrics.render().decode()


async def test_metrics_name_no_tenant_unless_they_are_asked_to(tenants: Path) -> None:
    """Whoever may scrape would know who the customers are."""
    async with running_gateway(says("one two"), tenants=str(tenants)) as harness:
        before = counted("tenant_generation_tokens").get(("other",), 0.0)
        made = (await ask(harness, "key-a")).json()["usage"]["completion_tokens"]
        page = (await harness.client.get("/metrics")).text

    assert counted("tenant_generation_tokens")[("other",)] == before + made
    assert "usage-a" not in page
