"""What a router tells Prometheus: its own families, the same at both of its ports."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from services.gateway.router import bootstrap
from services.gateway.router.config import RouterConfig
from shared.lifecycle import Lifecycle
from tests.unit.gateway.router.scripted_gateway import ScriptedGateway
from thermocline.supervisor.ports import free_port


async def _scraped(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Names of the families at the API's port and at that of the metrics, of a router without summaries."""
    ready = asyncio.Event()
    monkeypatch.setattr("services.gateway.router.bootstrap.progress.ready", ready.set)
    gateway, life = ScriptedGateway(), Lifecycle()
    await gateway.start()
    config = RouterConfig(
        cells=(f"a={gateway.url}",), port=free_port(), metrics_port=free_port(), summaries=False, log_level="error"
    )
    running = asyncio.create_task(bootstrap.run(config, life))
    try:
        await asyncio.wait({running, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
        async with httpx.AsyncClient(trust_env=False) as client:
            ports = (config.port, config.metrics_port)
            texts = [(await client.get(f"http://127.0.0.1:{port}/metrics")).text for port in ports]
    finally:
        life.stop()
        await running
        await gateway.stop()
    return [{line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")} for text in texts]


async def test_both_ports_tell_the_same_and_nothing_of_a_gateway_or_a_broker_that_it_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway's families at 0 would be one more gateway to alerts, and no connection one that was lost."""
    at_the_api, at_the_metrics = await _scraped(monkeypatch)

    assert at_the_api == at_the_metrics
    assert "thermocline_router_cell_up" in at_the_api
    assert {"router", "listener", "log"} == {name.split("_")[1] for name in at_the_api}
