"""What the page says is wrong, and with which process; how full everything is; what moves and what was saved."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.ui import scenes
from tests.ui.opening import opened
from tests.ui.stand_in import DISK, EVENTS_S, StandIn, a_cell, flows, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_model_is_called_by_its_name(page: Page, gateway: StandIn) -> None:
    """Its digest is a detail; where a gateway tells no name, the digest stands for it."""
    await expect(page.locator("#model")).to_have_text("harbour-8b")
    assert await page.title() == "harbour-8b – Thermocline"

    gateway.cell = a_cell(models=[])
    await expect(page.locator("#model")).to_have_text("model 0123456789ab")


async def test_the_process_at_fault_is_named(page: Page, gateway: StandIn) -> None:
    """Broker, scheduler, worker or storage: at the top in two words, in a banner in a sentence."""
    top, banner, degraded = page.locator("#link"), page.locator("#banner"), page.locator("#degraded")
    gateway.scheduler_error, gateway.error_code = scenes.BROKER_GONE, "broker_away"
    await expect(top).to_have_text("broker away")
    await expect(banner).to_contain_text("Gateway gateway-0 has no connection to the message broker.")

    gateway.scheduler_error, gateway.error_code = "scheduler scheduler-0 was last heard of 7 s ago", "scheduler_away"
    await expect(top).to_have_text("scheduler away")
    await expect(banner).to_contain_text("Scheduler scheduler-0 was last heard of 7 s ago.")

    gateway.scheduler_error = ""
    gateway.cell = a_cell(workers=[])
    await expect(top).to_have_text("no worker")
    await expect(degraded).to_contain_text("No worker has joined")
    await expect(banner).to_be_hidden()

    gateway.cell = a_cell(degraded=[scenes.DISK_GONE])
    await expect(top).to_have_text("storage degraded")
    await expect(degraded).to_contain_text("storage, disk: /var/lib/thermocline cannot be written to")

    gateway.cell, gateway.storages = a_cell(), {"storage": None}
    await expect(top).to_have_text("storage silent")

    gateway.storages = {"storage": dict(DISK)}
    await expect(top).to_have_text("live")
    await expect(degraded).to_be_hidden()


async def test_disks_and_stores_are_bars_like_memory(browser: Browser) -> None:
    """Each says in words how full it is; a fault of a disk stands below its bar."""
    stand_in = scenes.degraded_disk()
    stand_in.storages["storage"] = {**scenes.FULL_DISK, **scenes.STORE, "uploads_failed": 2}
    async with serving(stand_in):
        page = await opened(browser, stand_in)
        capacity = page.locator("#capacity")

        await expect(capacity.get_by_role("meter")).to_have_count(6)
        disk = capacity.get_by_role("meter", name="storage, disk")
        store = capacity.get_by_role("meter", name="storage, remote")
        silent = capacity.get_by_role("meter", name="storage-b, disk")
        assert await disk.get_attribute("aria-valuenow") == "790000000"
        assert await store.get_attribute("aria-valuetext") == (
            "18,000 chunks uploaded, 36 waiting, 2 failed since this storage started"
        )
        assert await silent.get_attribute("aria-valuetext") == "does not answer"
        await expect(capacity).to_contain_text("No space left on device")
        await expect(capacity).to_contain_text("2 uploads failed")


async def test_of_many_processes_those_with_a_fault_are_shown(browser: Browser) -> None:
    """And the fullest, in a list that a person can read and a browser can draw; an export has all."""
    free = {"tier": "device", "total": 100, "leased": 0, "form": ""}
    worker = {"incarnation": "one", "running": 0, "waiting": 0, "draining": False}
    numbers = range(300)
    stand_in = StandIn(
        cell=a_cell(
            pools=[{**free, "owner": f"worker-{n}", "cached": n % 100, "free": 100 - n % 100} for n in numbers],
            workers=[{**worker, "worker_id": f"worker-{n}", "running": n} for n in numbers],
            storages=[f"storage-{n}" for n in numbers],
        ),
        storages={f"storage-{n}": None if n < 30 else dict(DISK, chunks_quarantined=0) for n in numbers},
    )
    async with serving(stand_in):
        page = await opened(browser, stand_in)
        capacity = page.locator("#capacity")
        await expect(capacity.get_by_text("does not answer")).to_have_count(30)

        await expect(capacity).to_contain_text("40 of 600: those with a fault, and the fullest.")
        await expect(capacity.get_by_role("meter", name="worker-299, device")).to_be_visible()
        workers = page.get_by_role("table", name="Workers").locator("tbody tr")
        await expect(workers).to_have_count(40)
        await expect(workers.first).to_contain_text("worker-260")
        await expect(page.locator("#degraded li")).to_have_count(11)
        await expect(page.locator("#degraded")).to_contain_text("and 20 more")


async def test_what_was_saved_since_the_cell_began(page: Page, gateway: StandIn) -> None:
    """Tokens and seconds; before any worker was measured there are no seconds to tell."""
    figures = page.get_by_role("region", name="Figures")
    await expect(figures).to_contain_text("79,240tokens not computed again")
    await expect(figures).to_contain_text("46.50 sof prefill saved; loads took 1.25 s")

    saved = {"tokens": 64, "computed_tokens": 9, "prefill_seconds": 0.0, "load_seconds": 0.0}
    gateway.cell = a_cell(savings=saved)
    await expect(figures).to_contain_text("–of prefill saved")


async def test_flows_are_rates_of_what_moves_now(page: Page, gateway: StandIn) -> None:
    """Nothing while totals stand still, whatever they are; a rate on each way that they grow on."""
    moving = page.locator("#flows .way:not(.idle)")
    gateway.cell = a_cell(flows=flows(5_000))
    await expect(page.locator("#flows .way").first).to_have_attribute("title", "4,500,000 tokens since the cell began")

    async def moves() -> None:
        """Until the page, however busy its machine, has seen two totals."""
        for second in itertools.count(5_001, 20):
            gateway.cell = a_cell(flows=flows(second))
            await asyncio.sleep(EVENTS_S)

    moves_on = asyncio.create_task(moves())
    try:
        await expect(moving).to_have_count(6)
        await expect(page.locator("#flows")).to_contain_text("tokens/s copied")
    finally:
        moves_on.cancel()


async def test_every_view_is_exported_as_json(page: Page, gateway: StandIn) -> None:
    """What it shows, with the address that shows it."""
    for tab, key in (
        ("overview", "cell"),
        ("tree", "nodes"),
        ("requests", "requests"),
        ("chat", "turns"),
        ("cache", "pins"),
    ):
        await page.click(f"#tab-{tab}")
        if tab == "tree":
            await expect(page.locator("#tree-said")).to_contain_text("300 nodes")
        if tab == "requests":
            await expect(page.locator("#requests-said")).to_contain_text("40 requests")
        async with page.expect_download() as download:
            await page.get_by_role("button", name="Export JSON").click()
        saved = await download.value
        told: dict[str, Any] = json.loads(Path(await saved.path()).read_text("utf-8"))

        assert saved.suggested_filename.startswith(f"thermocline-{tab}-")
        assert told["view"] == tab
        assert len(told[key]) == {"nodes": 300, "requests": 40, "cell": len(gateway.cell)}.get(key, 0)
        assert told["address"].endswith(f"#{tab}")
