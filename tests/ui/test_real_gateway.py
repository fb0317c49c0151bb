"""The page against the real API of a gateway: what one sends, the other understands."""

from __future__ import annotations

import asyncio

import pytest
from playwright.async_api import Browser, expect

from shared.messages.status import PoolStatus
from tests.ui.stand_in import KEY
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.unit.gateway.scripted_cache import ScriptedCache, node

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANNOUNCED_S = 0.3


async def test_every_view_works_with_the_real_api(browser: Browser) -> None:
    """Status, tree, chat with its explanation, recent requests, pins: all from a gateway's own routes."""
    async with (
        running_gateway(says("one two three"), over_http=True, admin_key=KEY, api_keys=("an-ordinary-key",)) as harness,
        ScriptedCache(harness.bus, nodes=[node(1), node(2, 1, pins=("office",)), node(3, 1)]),
    ):
        announcing = asyncio.create_task(announce(harness))
        page = await browser.new_page()
        await page.goto(f"{harness.base_url}/ui")
        await page.fill("#admin-key", KEY)
        await page.fill("#api-key", "an-ordinary-key")
        await page.keyboard.press("Enter")
        await expect(page.locator("#link")).to_have_text("live")
        full = "40 cached, 4 in use, 20 free of 64 pages"
        await expect(page.get_by_role("meter", name="worker-0, device")).to_have_attribute("aria-valuetext", full)

        await page.click("#tab-tree")
        await expect(page.locator("#tree-said")).to_have_text("3 nodes, 48 tokens, 1 namespace")
        await page.click("#tab-chat")
        await page.fill("#chat-text", "hello there")
        await page.keyboard.press("Control+Enter")
        await expect(page.locator(".turn:not(.user)")).to_contain_text("one two three")
        await expect(page.locator(".turn-explained")).to_contain_text("prompt tokens cached, first token after")
        await page.click("#tab-requests")
        await page.locator("#view-requests tbody tr.pick button").click()
        await expect(page.locator("#request-detail")).to_contain_text("/v1/chat/completions")
        await expect(page.locator("#request-detail")).to_contain_text("Time to the first token")
        await page.click("#tab-cache")
        await page.fill("#pin-prompt", "hello there, and more of the same that is long enough for a page of tokens")
        await page.click("text=Pin…")
        await page.click("#confirm-yes")
        await expect(page.locator("#manage-said")).to_contain_text("tokens now.")
        await page.close()
        announcing.cancel()


async def announce(harness: Harness) -> None:
    """What an active scheduler says of itself again and again."""
    pool = PoolStatus(owner="worker-0", tier="device", total=64, free=20, cached=40, leased=4)
    while True:
        await harness.cell.announce(pools=(pool,))
        await asyncio.sleep(ANNOUNCED_S)
