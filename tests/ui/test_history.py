"""What the page remembers: across reloads, for a bounded time, of one model; and what of it is looked at."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.ui.opening import opened
from tests.ui.stand_in import KEY, StandIn, a_cell, explanation

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def kept(page: Page) -> dict[str, Any]:
    """What the browser keeps of the past."""
    found: dict[str, Any] = json.loads(await page.evaluate("localStorage.getItem('thermocline.history') ?? '{}'"))
    return found


async def test_a_reload_keeps_what_was_seen(browser: Browser, gateway: StandIn) -> None:
    """Figures of requests that the gateway has forgotten since; no text of a prompt is among what is kept."""
    page = await opened(browser, gateway)
    now_ms = await page.evaluate("Date.now()")
    gateway.requests = [explanation(n, ttft_ms=10.0 * (n + 1), created_ms=now_ms - 1000 * n) for n in range(9)]
    median = page.locator(".figure b").nth(3)
    await expect(median).to_have_text("50.0 ms")
    gateway.requests = []

    await page.reload()

    await expect(median).to_have_text("50.0 ms")
    assert set((await kept(page))["requests"][0]) == {"id", "ms", "ttft", "prompt", "share"}


@pytest.mark.parametrize("ahead_s", [-1800, 1800])
async def test_clocks_may_differ(browser: Browser, gateway: StandIn, ahead_s: int) -> None:
    """Requests are dated by the gateway's clock, and so is what is asked of the past."""
    now_ms = time.time_ns() // 1_000_000
    gateway.cell = a_cell(now_ms=now_ms)
    gateway.requests = [explanation(n, ttft_ms=10.0 * (n + 1), created_ms=now_ms - 1000 * (n + 1)) for n in range(9)]
    page = await browser.new_page()
    await page.add_init_script(f"const now = Date.now; Date.now = () => now() + {1000 * ahead_s};")
    await page.goto(f"{gateway.url}/ui/#key={KEY}")

    await expect(page.locator(".figure b").nth(3)).to_have_text("50.0 ms")
    dots = page.get_by_role("img", name="Time to first token").locator("path.dots")
    assert (await dots.get_attribute("d") or "").count("M") == 9


async def test_nothing_is_drawn_of_a_time_that_nobody_watched(browser: Browser, gateway: StandIn) -> None:
    """The line is broken there, and a short piece of it can be seen."""
    now_ms = time.time_ns() // 1_000_000
    quiet = {"queued": 0, "occupancy": {}, "flows": {}}
    samples = [{"ms": now_ms - 5 * 3_600_000 + 10_000 * n, "running": 100, **quiet} for n in range(80)]
    past = json.dumps({"model": gateway.cell["model"], "samples": samples, "requests": []})
    page = await browser.new_page()
    await page.add_init_script(f"localStorage.setItem('thermocline.history', {json.dumps(past)});")
    await page.goto(f"{gateway.url}/ui/#key={KEY}")
    await page.select_option("#range", "6h")

    line = page.get_by_role("img", name="Requests over time").locator("path.line").first
    await page.wait_for_function(
        "line => line.getAttribute('d').split('M').length === 3", arg=await line.element_handle()
    )
    memory = page.get_by_role("img", name="Memory in use").locator("path.line").first
    assert (await memory.get_attribute("d") or "").count("M") == 1


async def test_the_range_is_chosen_and_stands_in_the_address(browser: Browser, gateway: StandIn) -> None:
    """A request of an hour ago counts in six hours and not in fifteen minutes."""
    page = await opened(browser, gateway)
    now_ms = await page.evaluate("Date.now()")
    gateway.requests = [explanation(1, ttft_ms=77.0, created_ms=now_ms - 3_700_000)]
    median = page.locator(".figure b").nth(3)
    await expect(median).to_have_text("–")

    await page.select_option("#range", "6h")

    await expect(median).to_have_text("77.0 ms")
    assert await page.evaluate("location.hash") == "#overview?range=6h"
    other = await opened(browser, gateway, "overview?range=6h")
    await expect(other.locator("#range")).to_have_value("6h")


async def test_it_is_bounded_in_number_and_time(browser: Browser, gateway: StandIn) -> None:
    """Whatever was kept before: the oldest go first, and what is older than six hours goes at all."""
    page = await browser.new_page()
    now_ms = await page.evaluate("Date.now()")
    quiet = {"running": 1, "queued": 0, "occupancy": {}, "flows": {}}
    samples = [{"ms": now_ms - 10_000 * n, **quiet} for n in range(4000, 1, -1)]
    requests = [{"id": f"r{n}", "ms": now_ms - 9000 + n, "ttft": 5, "prompt": 9, "share": 0.5} for n in range(5000)]
    past = json.dumps({"model": gateway.cell["model"], "samples": samples, "requests": requests})
    # A tab keeps its session: what is put there once is not put there again by a reload.
    await page.add_init_script(
        f"""if (location.protocol === 'http:' && !sessionStorage.seeded) {{
          localStorage.setItem('thermocline.history', {json.dumps(past)});
          sessionStorage.seeded = sessionStorage['thermocline.admin'] = {json.dumps(KEY)};
        }}"""
    )
    gateway.requests = [explanation(1, created_ms=now_ms)]
    await page.goto(f"{gateway.url}/ui/")
    await expect(page.locator(".figure b").nth(3)).not_to_have_text("–")
    await page.reload()
    await expect(page.locator(".figure b").nth(3)).not_to_have_text("–")

    found = await kept(page)

    assert 2 <= len(found["requests"]) <= 2000
    assert 2 <= len(found["samples"]) <= 2161
    assert found["samples"][0]["ms"] >= now_ms - 6 * 3600 * 1000
    assert len(json.dumps(found)) < 10**6


async def test_another_model_begins_anew(browser: Browser, gateway: StandIn) -> None:
    """What was measured of one says nothing of another."""
    page = await opened(browser, gateway)
    now_ms = await page.evaluate("Date.now()")
    gateway.requests = [explanation(1, ttft_ms=77.0, created_ms=now_ms)]
    median = page.locator(".figure b").nth(3)
    await expect(median).to_have_text("77.0 ms")

    gateway.requests = []
    gateway.cell = a_cell(model="fedcba9876543210")
    await page.reload()

    await expect(page.locator("#link")).to_have_text("live")
    await expect(median).to_have_text("–")


async def test_a_browser_that_keeps_nothing_says_so(browser: Browser, gateway: StandIn) -> None:
    """The page works, but a reload will lose its history."""
    page = await browser.new_page()
    await page.add_init_script(
        """const keep = Storage.prototype.setItem;
        Storage.prototype.setItem = function (name, value) {
          if (name === 'thermocline.history') throw new DOMException('full', 'QuotaExceededError');
          keep.call(this, name, value);
        };"""
    )
    await page.goto(f"{gateway.url}/ui/#key={KEY}")

    await expect(page.locator("#view-overview")).to_contain_text("This browser keeps no history: QuotaExceededError.")
