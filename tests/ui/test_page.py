"""The page at /ui in a headless browser, against a scripted gateway: what it shows, sends, and says of failures."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.ui.stand_in import KEY, StandIn, a_cell, a_tree, explanation, node, serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_overview_shows_tiers_workers_and_hits(page: Page, gateway: StandIn) -> None:
    """From the events as they come; a meter says in words how full each pool is."""
    overview = page.locator("#view-overview")

    await expect(overview.get_by_role("meter")).to_have_count(4)
    meter = overview.get_by_role("meter", name="worker-0, device")
    assert await meter.get_attribute("aria-valuetext") == "400 cached, 80 in use, 202 free of 682 pages"
    await expect(overview).to_contain_text("leaving: it gets no new requests")
    await expect(overview).to_contain_text("host memory: 21,000")
    disk = overview.get_by_role("meter", name="storage, disk")
    assert await disk.get_attribute("aria-valuetext") == "2.9 MiB of 953.7 MiB, 90 chunks, 1 quarantined"

    gateway.cell = a_cell(running=17, workers=[])
    await expect(overview.locator(".figure b").first).to_have_text("17")
    await expect(overview).to_contain_text("No worker has joined")


async def test_tenants_are_shown_where_there_are_several(page: Page, gateway: StandIn) -> None:
    """With their requests and bytes, the busiest first; a name is text, whatever it looks like."""
    overview = page.locator("#view-overview")
    await expect(overview.get_by_role("table", name="Tenants")).to_have_count(0)

    quiet = {"waiting": 0, "device_bytes": 0, "host_bytes": 0, "disk_bytes": 0}
    gateway.cell = a_cell(
        tenants=[quiet | {"tenant": "a", "running": 0}, quiet | {"tenant": "b", "running": 3, "host_bytes": 2**20}]
    )

    rows = overview.get_by_role("table", name="Tenants").locator("tbody tr")
    await expect(rows.first).to_contain_text("1.0 MiB")
    await expect(rows.locator("td:first-child")).to_have_text(["b", "a"])


async def test_the_past_is_drawn_from_requests(browser: Browser) -> None:
    """Cached share and TTFT of requests that came lately, and figures of them."""
    stand_in = StandIn()
    async with serving(stand_in):
        page = await browser.new_page()
        now_ms = await page.evaluate("Date.now()")
        stand_in.requests = [explanation(n, ttft_ms=10.0 * (n + 1), created_ms=now_ms - 20_000 * n) for n in range(9)]
        await unlock(page, stand_in)

        await expect(page.locator("svg.chart")).to_have_count(4)
        await expect(page.locator(".figure b").nth(2)).to_have_text("90 %")
        await expect(page.locator(".figure b").nth(3)).to_have_text("50.0 ms")
        label = await page.locator("svg.chart").nth(1).get_attribute("aria-label")
        assert label is not None
        assert "9 values" in label


async def test_a_node_can_be_chosen_found_and_read_in_a_table(page: Page, gateway: StandIn) -> None:
    """By pointer, by keys, by search; the table has the same nodes as the picture."""
    await page.click("#tab-tree")
    await expect(page.locator("#tree-said")).to_contain_text("300 nodes")
    chosen = page.locator("#tree-picked")

    await page.click("#icicle", position={"x": 120, "y": 40})
    await expect(chosen).to_contain_text("You are the harbour office.")
    await page.keyboard.press("ArrowDown")
    await expect(chosen).to_contain_text("beginning of 2")
    await page.keyboard.press("ArrowUp")
    await expect(chosen).to_contain_text("worker-0: 32 pages")

    await page.keyboard.press("/")
    await page.keyboard.type("beginning of 250")
    await expect(page.locator("#tree-said")).to_contain_text("1 of 300 nodes found")
    await page.keyboard.press("Enter")
    await expect(chosen).to_contain_text("250")

    await page.click("#tree-as-table")
    await expect(page.locator("#tree-table tbody tr")).to_have_count(1)
    await page.fill("#tree-search", "")
    await expect(page.locator("#tree-table tbody tr")).to_have_count(50)
    await page.click("#tree-next")
    await expect(page.locator("#view-tree")).to_contain_text("51 to 100 of 300")


async def test_a_fresh_tree_turns_no_page(page: Page, gateway: StandIn) -> None:
    """Neither that of the table nor the place among what was found."""
    await page.click("#tab-tree")
    await page.click("#tree-as-table")
    await page.fill("#tree-search", "beginning")
    await page.keyboard.press("Shift+Enter")
    await expect(page.locator("#tree-table")).to_contain_text("251 to 299 of 299")

    gateway.nodes.append(node(301, None, 0, 16))
    await page.click("#tree-refresh")

    await expect(page.locator("#tree-table")).to_contain_text("251 to 300 of 300")


async def test_zooming_moves_what_is_under_the_pointer_apart(page: Page) -> None:
    """The picture changes with the wheel, and Fit brings the first one back."""

    async def picture() -> str:
        await page.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
        return str(await page.evaluate("document.getElementById('icicle').toDataURL()"))

    async def becomes(claim: str) -> None:
        """Wait: a turn of the wheel reaches the page when the browser gets to it."""
        await page.wait_for_function(f"whole => document.getElementById('icicle').toDataURL() {claim} whole", arg=whole)

    await page.click("#tab-tree")
    await expect(page.locator("#tree-said")).to_contain_text("300 nodes")
    whole = await picture()
    await page.hover("#icicle", position={"x": 300, "y": 100})
    await page.mouse.wheel(0, -600)
    await becomes("!==")
    await page.get_by_role("button", name="Show all of the tree").click()
    await becomes("===")


async def test_a_hundred_thousand_nodes_are_loaded_and_drawn(page: Page, gateway: StandIn) -> None:
    """Page after page; drawing all of them stays within a few frames."""
    gateway.nodes = a_tree(100_000)

    await page.click("#tab-tree")

    await expect(page.locator("#tree-said")).to_contain_text("100,000 nodes", timeout=60_000)
    await page.click("#icicle", position={"x": 60, "y": 30})
    await expect(page.locator("#tree-picked")).to_contain_text("paths through it")


async def test_a_conversation_deeper_than_the_stack_is_drawn(page: Page, gateway: StandIn) -> None:
    """A chain of nodes, each the only child of the one before."""
    gateway.nodes = [node(n, n - 1 or None, 16 * (n - 1), 16) for n in range(1, 20_001)]

    await page.click("#tab-tree")

    await expect(page.locator("#tree-said")).to_contain_text("20,000 nodes, 320,000 tokens", timeout=60_000)


async def test_a_request_is_explained(page: Page, gateway: StandIn) -> None:
    """A click on a waterfall shows the parts of its prompt with reasons, and the parts of its time."""
    failed: dict[str, Any] = {
        "state": "failed",
        "error_code": "deadline_exceeded",
        "ttft_ms": None,
        "prompt": [],
        "parts": [],
    }
    gateway.requests.append({**explanation(77), **failed})
    await page.click("#tab-requests")
    await expect(page.locator("#view-requests tbody tr.pick")).to_have_count(41)

    await page.locator("#request-request-5").click()

    detail = page.locator("#request-detail")
    await expect(detail).to_contain_text("http-5")
    await expect(detail).to_contain_text("was never stored")
    await expect(detail).to_contain_text("the last token is always computed")
    await expect(detail).to_contain_text("Time to the first token: 25.0 ms")
    assert await detail.get_by_role("listitem").count() >= 9
    await page.locator("#request-request-77").click()
    await expect(detail).to_contain_text("deadline_exceeded")
    await expect(detail).to_contain_text("Not told yet")


async def test_a_chat_streams_and_tells_what_was_cached(page: Page, gateway: StandIn) -> None:
    """Text stays text, whatever the model says; the next turn carries the one before."""
    await page.click("#tab-chat")
    for text in ("When does it open?", "And on Sundays?"):
        await page.fill("#chat-text", text)
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn-explained").last).to_contain_text("90 % of 1,000 prompt tokens cached")

    await expect(page.locator(".turn:not(.user)").last).to_have_text("The harbour opens at <b>six</b>.")
    bodies = [body for what, body in gateway.orders if what == "chat"]
    assert [body["explain"] for body in bodies] == [True, True]
    assert [said["role"] for said in bodies[1]["messages"]] == ["user", "assistant", "user"]


async def test_nothing_changes_without_a_second_yes(page: Page, gateway: StandIn) -> None:
    """Flush, pin and prewarm ask first; a no, or Escape, sends nothing."""
    await page.click("#tab-cache")
    await page.click("text=Flush…")
    await page.keyboard.press("Escape")
    await page.click("text=Flush…")
    await page.get_by_role("button", name="Cancel").click()
    assert gateway.orders == []

    await page.click("text=Flush…")
    await page.click("#confirm-yes")
    await expect(page.locator("#manage-said")).to_have_text(
        "Dropped 3 device pages, 2 host pages and 0 chunks on disk."
    )
    await page.fill("#pin-prompt", "You are the harbour office.")
    await expect(page.locator("#view-cache")).to_contain_text("2,048")
    await page.fill("#pin-name", "office")
    await page.click("text=Pin…")
    await page.click("#confirm-yes")
    await expect(page.locator("#manage-said")).to_have_text("Pin office holds 48 of 64 tokens now.")
    await page.fill("#warm-prompts", "one\n\ntwo\n")
    await page.click("text=Prewarm…")
    await page.click("#confirm-yes")
    await expect(page.locator("#manage-said")).to_contain_text("2 prompts brought in, 0 failed; 50 % of 200 tokens")
    await page.get_by_role("button", name="Unpin office").click()
    await page.click("#confirm-yes")
    await expect(page.locator("#manage-said")).to_have_text("office is removed.")

    assert gateway.orders == [
        ("flush", {"tiers": ["device", "host"]}),
        ("pins", {"prompt": "You are the harbour office.", "ttl_s": 3600, "name": "office"}),
        ("prewarm", {"prompts": [{"prompt": "one"}, {"prompt": "two"}]}),
        ("unpin", {"name": "office"}),
    ]


async def test_it_says_that_the_key_is_wrong_and_takes_another(browser: Browser, gateway: StandIn) -> None:
    """Unauthorised is not disconnected; the right key opens without loading the page anew."""
    page = await browser.new_page()
    await unlock(page, gateway, "some-other-key-of-length")

    await expect(page.get_by_role("alert")).to_contain_text("Key needed. The admin key is required.")
    await page.get_by_role("button", name="Give the key").click()
    await page.fill("#admin-key", KEY)
    await page.keyboard.press("Enter")
    await expect(page.locator("#link")).to_have_text("live")
    await expect(page.get_by_role("alert")).to_be_hidden()


async def test_pins_are_shown_once_there_is_a_key(browser: Browser, gateway: StandIn) -> None:
    """Whatever was answered before."""
    page = await browser.new_page()
    await page.goto(f"{gateway.url}/ui/#cache")
    await expect(page.locator("#view-cache")).to_contain_text("the admin key is required")

    await page.fill("#admin-key", KEY)
    await page.keyboard.press("Enter")

    await expect(page.locator("#view-cache")).to_contain_text("There is no pin.")


async def test_a_gateway_that_is_full_is_not_taken_for_away(browser: Browser, gateway: StandIn) -> None:
    """As many watch it as may; the page opens when one of them leaves."""
    gateway.is_full = True
    page = await browser.new_page()
    await unlock(page, gateway)
    await expect(page.get_by_role("alert")).to_contain_text("Gateway busy. The server has as many connections as")

    gateway.is_full = False
    await expect(page.locator("#link")).to_have_text("live")


async def test_a_page_that_is_open_for_long_keeps_nothing_of_its_pauses(browser: Browser, gateway: StandIn) -> None:
    """Each pause can be ended early, and is forgotten when it was not."""
    gateway.scheduler_error = "the scheduler is silent"
    page = await browser.new_page()
    await page.add_init_script(
        """window.added = window.open_ = 0;
        const { addEventListener: add, removeEventListener: remove } = AbortSignal.prototype;
        AbortSignal.prototype.addEventListener = function (...one) { added += 1; open_ += 1; add.apply(this, one); };
        AbortSignal.prototype.removeEventListener = function (...one) { open_ -= 1; remove.apply(this, one); };"""
    )
    await unlock(page, gateway)

    await page.wait_for_function("() => added > 40")

    assert await page.evaluate("open_") < 10


@pytest.mark.parametrize("area", ["localStorage", "sessionStorage"])
async def test_it_works_where_the_browser_keeps_nothing(browser: Browser, gateway: StandIn, area: str) -> None:
    """With all cookies blocked; a reload asks for the key again."""
    page = await browser.new_page()
    refused = "throw new DOMException('denied', 'SecurityError')"
    await page.add_init_script(f"Object.defineProperty(window, '{area}', {{ get() {{ {refused}; }} }})")
    await unlock(page, gateway)

    await expect(page.locator("#link")).to_have_text("live")
    await page.click("#theme")
    await expect(page.locator("html")).to_have_attribute("data-theme", "light")


async def test_it_says_that_the_administration_is_off(browser: Browser, gateway: StandIn) -> None:
    """A gateway without an admin key shows nobody the cell."""
    gateway.admin_is_off = True
    page = await browser.new_page()
    await unlock(page, gateway)

    await expect(page.get_by_role("alert")).to_contain_text("Administration off.")


async def test_it_says_that_the_scheduler_is_away_and_goes_on_after(page: Page, gateway: StandIn) -> None:
    """What was last heard stays, marked as old."""
    gateway.scheduler_error = "the scheduler has not been heard of lately"
    await expect(page.get_by_role("alert")).to_contain_text(
        "Scheduler away. The scheduler has not been heard of lately."
    )
    await expect(page.locator("#view-overview")).to_contain_text("worker-0")

    gateway.scheduler_error = ""
    await expect(page.locator("#link")).to_have_text("live")


async def test_it_says_that_it_is_disconnected_and_comes_back(browser: Browser) -> None:
    """When the gateway goes, and when another takes its address."""
    stand_in = StandIn()
    page = await browser.new_page()
    async with serving(stand_in):
        await unlock(page, stand_in)
        await expect(page.locator("#link")).to_have_text("live")
        port = int(stand_in.url.rpartition(":")[2])
    await expect(page.get_by_role("alert")).to_contain_text("Gateway away.")

    async with serving(StandIn(), port):
        await expect(page.locator("#link")).to_have_text("live", timeout=20_000)


async def test_the_keyboard_reaches_everything(page: Page) -> None:
    """Digits open views, arrows go along the tabs, ? lists the shortcuts and Escape closes the list."""
    await page.keyboard.press("3")
    await expect(page.locator("#tab-requests")).to_be_focused()
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator("#tab-tree")).to_have_attribute("aria-selected", "true")
    await expect(page.locator("#view-tree")).to_be_visible()
    await page.keyboard.press("Shift+?")
    await expect(page.get_by_role("dialog")).to_contain_text("search requests, or the tree")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.id") == "tree-search"


async def test_skipping_to_the_content_leaves_the_address(page: Page) -> None:
    """Which names the view that a reload shows."""
    await page.click("#tab-requests")
    await page.focus(".skip")
    await page.keyboard.press("Enter")

    assert await page.evaluate("[document.activeElement.id, location.hash]") == ["main", "#requests"]


async def test_every_control_has_a_name(page: Page) -> None:
    """In every view: a screen reader has something to say of each button and field."""
    for tab in ("overview", "tree", "requests", "chat", "cache"):
        await page.click(f"#tab-{tab}")
        nameless: list[str] = await page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, textarea, canvas, [role=img], [role=meter]')]
            .filter((one) => one.checkVisibility() && !one.textContent.trim())
            .filter((one) => !one.getAttribute('aria-label') && !one.labels?.length)
            .map((one) => one.outerHTML)"""
        )
        assert nameless == []


async def test_it_fits_a_phone_and_a_screen_in_light_and_dark(browser: Browser, gateway: StandIn) -> None:
    """No view is wider than the window, and the switch changes the ground whatever the system prefers."""
    for width in (390, 1440):
        page = await browser.new_page(viewport={"width": width, "height": 844}, color_scheme="light")
        await unlock(page, gateway)
        await expect(page.locator("#link")).to_have_text("live")
        for tab in ("overview", "tree", "requests", "chat", "cache"):
            await page.click(f"#tab-{tab}")
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
        light = await ground(page)
        await page.click("#theme")
        await page.click("#theme")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert await ground(page) != light
        await page.close()


async def test_the_key_is_kept_for_the_tab_alone(page: Page, gateway: StandIn) -> None:
    """It outlives a reload, and is in no storage that outlives the tab."""
    await page.reload()

    await expect(page.locator("#link")).to_have_text("live")
    assert KEY not in str(await page.evaluate("JSON.stringify({...localStorage}) + document.cookie + location.href"))


async def test_it_loads_nothing_from_elsewhere(browser: Browser, gateway: StandIn) -> None:
    """Every request of the page goes to the gateway that served it."""
    asked: list[str] = []
    page = await browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    await unlock(page, gateway)
    await expect(page.locator("#link")).to_have_text("live")
    await until(lambda: any("/v1/requests" in url for url in asked))

    assert [url for url in asked if not url.startswith(gateway.url)] == []


async def unlock(page: Page, gateway: StandIn, key: str = KEY) -> None:
    """Open the page and give it a key."""
    await page.goto(f"{gateway.url}/ui/")
    await page.fill("#admin-key", key)
    await page.keyboard.press("Enter")


async def ground(page: Page) -> Any:
    """The colour of the ground, as computed."""
    return await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
