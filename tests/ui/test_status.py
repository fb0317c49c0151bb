"""What the page says is wrong, and with which process; how full everything is; what moves and what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.ui import scenes
from tests.ui.opening import opened
from tests.ui.stand_in import DISK, StandIn, a_cell, flows, serving

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

    for second in range(5_001, 5_400, 20):
        gateway.cell = a_cell(flows=flows(second))
        if await moving.count() >= 6:
            break
        await page.wait_for_timeout(60)

    await expect(moving).to_have_count(6)
    await expect(page.locator("#flows")).to_contain_text("tokens/s copied")


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
