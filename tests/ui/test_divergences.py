"""Where prompts leave the cache, as the page at /ui shows it."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.ui.stand_in import KEY, StandIn, costly, divergence, explanation, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_requests_divergence_is_shown_with_both_sides(page: Page, gateway: StandIn) -> None:
    """In which message, what it cost and the usual cause; texts are text, whatever they look like."""
    gateway.requests = [explanation(1, divergence=divergence())]
    await page.click("#tab-requests")
    await page.locator("#request-request-1").click()

    shown = page.locator("#divergence")
    await expect(shown).to_contain_text("At token 37, in message 0 (system), it leaves the nearest cached path.")
    await expect(shown).to_contain_text("812 tokens, about 93.1 ms, behind it were computed although they are cached")
    await expect(shown.locator("dd")).to_have_text(
        [f"…the harbour <b>office</b>. It is 12:0{minute} now. Answer briefly." for minute in (5, 4)]
    )
    await expect(shown.locator("mark")).to_have_text(["5", "4"])
    await expect(shown).to_contain_text("A date or time. Put it behind the shared part")


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "continued", "lost_tokens": 0}, "Nothing was lost: it goes on where the cached path ends"),
    ({"kind": "evicted"}, "From token 37 on, in message 0 (system), 812 tokens, about 93.1 ms, had been cached"),
    ({"kind": "new", "token": 0}, "No cached prefix begins like it."),
    ({"kind": "opted_out", "token": None}, "It reads no cache."),
    ({"part": "tools", "message": None}, "At token 37, in the list of tools, it leaves"),
    ({"part": "template"}, "in text of the chat template before message 0 (system), it leaves"),
    ({"part": None, "message": None, "cause": "unknown"}, "At token 37 it leaves the nearest cached path."),
    ({"cached": None, "lost_tokens": None, "lost_ms": None}, "shown only with the admin key"),
    ({"cause": "other_conversation", "lost_tokens": 0, "lost_ms": None}, "Another conversation. Nothing is wrong"),
]  # fmt: skip


async def test_every_kind_is_said_in_words(page: Page, gateway: StandIn) -> None:
    """And a request of which nothing is known has no such part."""
    unknown = dict.fromkeys(("before", "prompt", "cached", "cause"))
    known = [({} if changes.get("kind") in (None, "evicted") else unknown) | changes for changes, _ in KINDS]
    gateway.requests = [explanation(n, divergence=divergence(**told)) for n, told in enumerate(known)]
    gateway.requests.append(explanation(len(KINDS)))
    await page.click("#tab-requests")
    for number, (_, words) in enumerate(KINDS):
        await page.locator(f"#request-request-{number}").click()
        await expect(page.locator("#divergence")).to_contain_text(words)

    await page.locator(f"#request-request-{len(KINDS)}").click()
    await expect(page.locator("#request-detail")).to_contain_text(f"http-{len(KINDS)}")
    await expect(page.locator("#divergence")).to_have_count(0)


async def test_the_costliest_points_stand_in_the_overview(browser: Browser) -> None:
    """The costliest first, with both sides; a count that may be too high says so."""
    stand_in = StandIn(divergences=[costly(), costly(cause="tools_reordered", lost_tokens=900, error_tokens=25)])
    async with serving(stand_in):
        page = await browser.new_page()
        await page.goto(f"{stand_in.url}/ui")
        await page.fill("#admin-key", KEY)
        await page.keyboard.press("Enter")
        rows = page.get_by_role("table", name="Divergence points").locator("tbody tr")

        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text("A date or time")
        await expect(rows.first).to_contain_text("33,292")
        await expect(rows.first).to_contain_text("It is 12:05 now.")
        await expect(rows.nth(1).locator("td[title]")).to_have_attribute("title", "up to 25 too many")
        await expect(page.locator("#divergences")).to_contain_text("since 13/11/2025, ")  # It is another day.


async def test_a_cell_that_lost_nothing_says_so(page: Page) -> None:
    """Instead of an empty table."""
    await expect(page.locator("#divergences")).to_contain_text(
        "No prompt has lost cached tokens to a divergence so far."
    )
