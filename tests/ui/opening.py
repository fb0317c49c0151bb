"""Open the page at an address, with the key already in its tab."""

from __future__ import annotations

from typing import Any

from playwright.async_api import Browser, Page

from tests.ui.stand_in import KEY, StandIn


async def opened(browser: Browser, gateway: StandIn, address: str = "", **options: Any) -> Page:
    """Return the page at ``#address`` once it hears the cell. ``options`` are those of a browser context."""
    page = await browser.new_page(**{"viewport": {"width": 1280, "height": 800}, **options})
    page.set_default_timeout(30_000)
    await page.add_init_script(f"sessionStorage.setItem('thermocline.admin', '{KEY}')")
    await page.goto(f"{gateway.url}/ui/#{address}")
    await page.wait_for_selector("#link[data-state=live]")
    return page
