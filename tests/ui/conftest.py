"""A headless browser for the tests of the page. They are skipped where there is none, and say so."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.ui.stand_in import KEY, StandIn, serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

expect.set_options(timeout=30_000)  # A bound for what never comes; a machine may have much else to do.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """Chromium of the system, one for all tests of a file."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: install the package `chromium` to test the page at /ui")
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        await found.close()


@pytest_asyncio.fixture(loop_scope="module")
async def browser(chromium: Browser) -> AsyncIterator[Browser]:
    """A browser without pages, each of which will know nothing of another: whatever a test opens is closed after it."""
    yield chromium
    for context in chromium.contexts:
        await context.close()


@pytest_asyncio.fixture(loop_scope="module")
async def gateway() -> AsyncIterator[StandIn]:
    """A scripted gateway with the real page."""
    async with serving(StandIn()) as stand_in:
        yield stand_in


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, gateway: StandIn) -> AsyncIterator[Page]:
    """The page, open and unlocked. A fault in its scripts, or anything against its policy, fails the test."""
    faults: list[str] = []
    opened = await browser.new_page(viewport={"width": 1440, "height": 900})
    opened.set_default_timeout(30_000)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda said: faults.append(said.text) if "Security Policy" in said.text else None)
    await opened.goto(f"{gateway.url}/ui")
    await opened.fill("#admin-key", KEY)
    await opened.get_by_role("button", name="Use these").click()
    await opened.wait_for_selector("#link[data-state=live]")
    yield opened
    await opened.close()
    assert faults == []
