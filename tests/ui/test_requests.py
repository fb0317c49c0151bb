"""Requests in the page: all that are kept, found, sorted, filtered, linked to, and readable on a phone."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.ui.opening import opened
from tests.ui.stand_in import StandIn, divergence, explanation

pytestmark = pytest.mark.asyncio(loop_scope="module")

PHONE = {"width": 375, "height": 812}


def spans(*parts: tuple[int, int, str, str | None]) -> list[dict[str, Any]]:
    """Parts of a prompt."""
    return [{"start": a, "end": b, "source": source, "reason": why, "detail": None} for a, b, source, why in parts]


@pytest.fixture
def gateway_of_three(gateway: StandIn) -> StandIn:
    """One request that was slow since its prefix was evicted, one from the disk, and one that failed."""
    gateway.requests = [
        explanation(3, ttft_ms=5.0, state="failed", error_code="deadline_exceeded", prompt=[], model="other-model"),
        explanation(
            2,
            ttft_ms=900.0,
            prompt=spans((0, 999, "computed", "evicted"), (999, 1000, "computed", "last_token")),
            divergence=divergence(before="It is 12:0", prompt="5 now", cached="4 now", lost_tokens=700),
        ),
        explanation(1, ttft_ms=50.0, prompt=spans((0, 999, "disk", None), (999, 1000, "computed", "last_token"))),
    ]
    return gateway


def listed(page: Page) -> Any:
    """Ids of the buttons of the rows, from the top."""
    return page.locator("#view-requests tbody tr.pick button")


async def test_they_are_searched_sorted_and_filtered(browser: Browser, gateway_of_three: StandIn) -> None:
    """By words of any field or text, by tier and by reason of a miss; the slowest first on demand."""
    page = await opened(browser, gateway_of_three, "requests")
    rows = listed(page)

    await expect(rows).to_have_count(3)
    await expect(page.locator("#requests-said")).to_have_text("all 3 requests that are kept")
    await page.select_option("#requests-order", "slowest")
    await expect(rows.first).to_have_id("request-request-2")
    await page.select_option("#requests-tier", "disk")
    await expect(rows).to_have_count(1)
    await expect(rows.first).to_have_id("request-request-1")
    await page.select_option("#requests-tier", "")
    await page.select_option("#requests-reason", "evicted")
    await expect(rows.first).to_have_id("request-request-2")
    await page.select_option("#requests-reason", "")
    for words, found in (("other-MODEL", 3), ("deadline", 3), ("12:05 date", 2), ("http-1", 1)):
        await page.fill("#requests-search", words)
        await expect(rows).to_have_count(1)
        await expect(rows.first).to_have_id(f"request-request-{found}")
    await page.fill("#requests-search", "no such words")
    await expect(page.locator("#view-requests")).to_contain_text("No request matches.")


async def test_what_is_chosen_stands_in_the_address(browser: Browser, gateway_of_three: StandIn) -> None:
    """The address opens the same list and the same request elsewhere, and Back leads back to it."""
    page = await opened(browser, gateway_of_three, "requests")
    await page.select_option("#requests-order", "slowest")
    await page.select_option("#requests-reason", "last_token")
    await listed(page).first.click()
    await expect(page.locator("#request-detail")).to_contain_text("http-2")
    address = await page.evaluate("location.hash")
    await page.go_back()
    await expect(page.locator("#request-detail")).to_contain_text("Choose a request")

    other = await opened(browser, gateway_of_three, address[1:])
    await expect(other.locator("#request-detail")).to_contain_text("http-2")
    await expect(other.locator("tr[aria-current=true] button")).to_have_id("request-request-2")
    await expect(listed(other)).to_have_count(2)
    assert address == "#requests/request-2?sort=slowest&reason=last_token"


async def test_a_request_is_found_by_the_id_of_its_response(browser: Browser, gateway_of_three: StandIn) -> None:
    """Which is what a client has; one that nobody keeps is said to be gone."""
    page = await opened(browser, gateway_of_three, "requests/http-1")
    await expect(page.locator("#request-detail")).to_contain_text("Time to the first token: 50.0 ms")

    gone = await opened(browser, gateway_of_three, "requests/http-77")
    await expect(gone.locator("#request-detail")).to_contain_text("it is forgotten")


async def test_all_that_the_gateway_keeps_are_listed(browser: Browser, gateway: StandIn) -> None:
    """Page by page from the gateway, and page by page to the reader."""
    gateway.requests = [explanation(n, ttft_ms=20.0 + n) for n in reversed(range(1024))]
    page = await opened(browser, gateway, "requests")

    await expect(page.locator("#requests-said")).to_have_text("all 1,024 requests that are kept")
    await expect(listed(page)).to_have_count(50)
    await page.click("#requests-next")
    await expect(page.locator("#view-requests")).to_contain_text("51 to 100 of 1,024")
    await page.fill("#requests-search", "http-7")
    await expect(page.locator("#requests-said")).to_contain_text("111 of 1,024 requests")


async def test_one_that_goes_on_is_shown_as_it_ends(browser: Browser, gateway: StandIn) -> None:
    """And one that was under way at a gateway that began anew is not shown for ever."""
    running = {"state": "running", "ttft_ms": None, "total_ms": None}
    gateway.requests = [{**explanation(1), **running}, {**explanation(2), **running}]
    page = await opened(browser, gateway, "requests")
    await expect(page.locator("#view-requests tbody")).to_contain_text("running")
    await expect(listed(page)).to_have_count(2)

    gateway.requests = [explanation(1)]

    await expect(listed(page)).to_have_count(1)
    await expect(page.locator("#view-requests tbody")).not_to_contain_text("running")


async def test_on_a_phone_a_chosen_request_comes_into_view(browser: Browser, gateway: StandIn) -> None:
    """Below a long list; a button leads back to its row."""
    page = await opened(browser, gateway, "requests", viewport=PHONE)
    row = page.locator("#request-request-5")
    await row.click()

    await expect(page.locator("#request-detail h2")).to_be_in_viewport()
    await expect(page.locator("#request-detail")).to_contain_text("Time to the first token")
    assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    await page.click("#request-back")
    await expect(row).to_be_in_viewport()
    await expect(row).to_be_focused()
