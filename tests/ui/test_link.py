"""The link that ``thermocline up`` prints opens the page of a real cell, and the key does not stay in the address."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.ui.stand_in import KEY, StandIn, serving
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORTFALL = {"component": "storage", "what": "disk", "reason": "in use by process 7", "setting": "--disk-dir"}


@pytest.mark.integration
async def test_the_printed_link_shows_the_cell_once(browser: Browser) -> None:
    """At once, with nothing to type; the key goes to the gateway in a header alone. Another link is made on demand."""
    config = SupervisorConfig(port=0, threads=1, device_kv_bytes=16 * 2**20, host_kv_bytes=32 * 2**20, grace_s=20.0)
    with running(config) as cell:
        found = re.search(r"^Page: (\S+#once=(\S+))$", cell.output, re.MULTILINE)
        assert found is not None, cell.output
        link, code, said = found[1], found[2], cell.output
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url + request.headers.get("referer", "")))
        await page.goto(link)
        await expect(page.locator("#link")).to_have_text("live", timeout=60_000)
        await expect(page.get_by_role("meter", name="worker-0, device")).to_be_visible()
        address = await page.evaluate("location.href")
        key = str(await page.evaluate("sessionStorage.getItem('thermocline.admin')"))
        await page.reload()
        await expect(page.locator("#link")).to_have_text("live", timeout=60_000)

        other = await browser.new_page()
        await other.goto(link)
        await expect(other.get_by_role("alert")).to_contain_text("This link was used before")
        printed = await asyncio.to_thread(new_link, cell.base_url, key)
        assert printed != link
        await other.goto("about:blank")
        await other.goto(printed)
        await expect(other.locator("#link")).to_have_text("live", timeout=60_000)

    assert address == f"{cell.base_url}/ui/#overview"
    assert key not in said
    assert asked
    assert not any(key in url.partition("#")[0] or code in url.partition("#")[0] for url in asked)


def new_link(base_url: str, key: str) -> str:
    """What ``thermocline top --link`` prints."""
    command = [sys.executable, "-P", "-m", "thermocline", "top", "--link", "--url", base_url]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "THERMOCLINE_ADMIN_KEY": key}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True).stdout.strip()


async def test_a_used_link_says_so_and_leaves_the_address(browser: Browser) -> None:
    """The key can be given by hand then; one that opens takes an open page's place as well."""
    async with serving(StandIn(codes=["a-code", "another"])) as gateway:
        page = await browser.new_page()
        await page.goto(f"{gateway.url}/ui/#once=a-code")
        await expect(page.locator("#link")).to_have_text("live")
        other = await browser.new_page()
        await other.goto(f"{gateway.url}/ui/#once=a-code")

        await expect(other.get_by_role("alert")).to_contain_text("This link was used before, or is too old.")
        assert await other.evaluate("location.hash") == "#overview"
        await other.evaluate("location.hash = '#once=another'")
        await expect(other.locator("#link")).to_have_text("live")
        assert gateway.codes == []


async def test_a_link_in_an_open_page_brings_its_key(browser: Browser) -> None:
    """A page that asks for the key takes it from the address as well."""
    async with serving(StandIn()) as gateway:
        page = await browser.new_page()
        await page.goto(f"{gateway.url}/ui/")
        await expect(page.locator("#link")).to_have_text("key needed")
        await page.evaluate(f"location.hash = '#key={KEY}'")

        await expect(page.locator("#link")).to_have_text("live")
        await expect(page.locator("dialog")).to_have_count(0)
        assert await page.evaluate("location.hash") == "#overview"
        await page.close()


async def test_what_the_cell_lacks_stands_in_a_banner_until_it_has_it(browser: Browser) -> None:
    """In every view, with the setting that asked for it."""
    async with serving(StandIn()) as gateway:
        gateway.cell = {**gateway.cell, "degraded": [SHORTFALL]}
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        await page.goto(f"{gateway.url}/ui#key={KEY}")
        banner = page.locator("#degraded")

        await expect(banner).to_contain_text("storage, disk: in use by process 7 (--disk-dir)")
        await page.click("#tab-cache")
        await expect(banner).to_be_visible()
        gateway.cell = {**gateway.cell, "degraded": []}
        await expect(banner).to_be_hidden()
        await page.close()
