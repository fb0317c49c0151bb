"""Make the pictures of the page at /ui in docs/pictures: ``python -m tests.ui.pictures [NAME ...]``.

They show the scripted gateway of ``stand_in.py`` in the states of ``scenes.py``, in the Chromium of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright

from tests.ui import scenes
from tests.ui.small_png import shrink
from tests.ui.stand_in import EVENTS_S, KEY, NOW_MS, StandIn, flows, serving

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
SCREEN = (1280, 800)
PHONE = (375, 812)


@dataclass(frozen=True, slots=True)
class Picture:
    """A state of a cell, where to look at it, and what to do first."""

    scene: Callable[[], StandIn]
    view: str = "overview"
    size: tuple[int, int] = SCREEN
    scheme: str = "light"
    act: Callable[[Page, StandIn], Awaitable[None]] | None = None


async def _lose_broker(page: Page, gateway: StandIn) -> None:
    gateway.scheduler_error, gateway.error_code = scenes.BROKER_GONE, "broker_away"
    await page.wait_for_selector("#banner:not([hidden])")


async def _pick_node(page: Page, gateway: StandIn) -> None:
    await page.get_by_text("3,500 nodes").wait_for()
    await page.click("#icicle", position={"x": 120, "y": 40})


async def _pick_slowest(page: Page, gateway: StandIn) -> None:
    await page.select_option("#requests-order", "slowest")
    await page.locator("#view-requests tbody tr.pick button").first.click()
    await page.wait_for_selector("#divergence")


async def _heard_storages(page: Page, gateway: StandIn) -> None:
    await page.locator("#capacity .pool-fault").first.wait_for()


async def _flowing(page: Page, gateway: StandIn) -> None:
    await page.locator("#flows .way:not(.idle)").nth(6).wait_for()
    await page.locator("svg.chart").nth(3).wait_for()


PICTURES = {
    "ui-overview": Picture(scenes.busy, act=_flowing, size=(1280, 1000)),
    "ui-empty": Picture(scenes.empty),
    "ui-tree": Picture(scenes.large_tree, "tree", act=_pick_node),
    "ui-request-dark": Picture(scenes.busy, "requests", scheme="dark", act=_pick_slowest),
    "ui-broker-away": Picture(scenes.busy, act=_lose_broker),
    "ui-degraded-disk": Picture(scenes.degraded_disk, act=_heard_storages),
    "ui-phone": Picture(scenes.busy, "requests", PHONE, act=_pick_slowest),
}
"""Every committed picture, by its name."""


@contextlib.asynccontextmanager
async def opened(browser: Browser, picture: Picture) -> AsyncIterator[Page]:
    """The page as a picture shows it. Its clock begins where the scene's does."""
    gateway = picture.scene()
    async with serving(gateway):
        flowing = asyncio.create_task(_flow(gateway))
        context = await browser.new_context(
            viewport={"width": picture.size[0], "height": picture.size[1]}, locale="en-GB", timezone_id="UTC",
            color_scheme="dark" if picture.scheme == "dark" else "light",
        )  # fmt: skip
        page = await context.new_page()
        await page.clock.install(time=datetime.fromtimestamp(NOW_MS / 1000, UTC))
        await page.goto(f"{gateway.url}/ui#key={KEY}")
        await page.wait_for_selector("#link[data-state=live]")
        await page.click(f"#tab-{picture.view}")
        if picture.act is not None:
            await picture.act(page, gateway)
        await page.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
        yield page
        await context.close()
        flowing.cancel()


async def _flow(gateway: StandIn) -> None:
    """Let tokens flow: an hour of them to begin with, then as much as the clock says."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while gateway.cell["pools"]:
        second = 3600 + loop.time() - begun
        gateway.cell = {**gateway.cell, "flows": flows(second)}
        for counters in gateway.storages.values():
            if counters is not None and "chunks_uploaded" in counters:
                counters["chunks_uploaded"] = round(5 * second)
        await asyncio.sleep(EVENTS_S)


async def make(names: list[str], folder: Path = FOLDER) -> None:
    """Write these pictures."""
    from tests.ui.conftest import CHROMIUM

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        decoder = await browser.new_page()
        for name in names:
            async with opened(browser, PICTURES[name]) as page:
                small = await shrink(await page.screenshot(), decoder)
            (folder / f"{name}.png").write_bytes(small)
            print(f"{name}.png: {len(small) / 1000:.1f} kB")
        await browser.close()


if __name__ == "__main__":
    asyncio.run(make(sys.argv[1:] or list(PICTURES)))
