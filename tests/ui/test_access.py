"""Whatever comes from requests stays text, and whatever is shown can be read and reached."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.ui import scenes
from tests.ui.opening import opened
from tests.ui.stand_in import StandIn, a_cell, costly, divergence, explanation, node, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

MARKUP = "\"'><img src=x onerror='window.wasRun=1'><script>window.wasRun=1</script>${window.wasRun=1}"
TABS = ("overview", "tree", "requests", "chat", "cache")

_CONTRASTS = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const [red, green, blue] = numbers(color).map((value) => linear(value / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((numbers(color)[3] ?? 1) === 1) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const look = (element, color, words) => {
    const [one, other] = [light(color), light(ground(element))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const told = `${contrast.toFixed(2)} (${color} on ${ground(element)})`;
    if (contrast < 4.5) found.push(`${words.trim().slice(0, 40)}: ${told}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest(":disabled, .skip, option, noscript")) continue;
    const style = getComputedStyle(element);
    look(element, element instanceof SVGElement ? style.fill : style.color, walker.currentNode.data);
  }
  for (const field of document.querySelectorAll("[placeholder]")) {
    if (field.checkVisibility()) look(field, getComputedStyle(field, "::placeholder").color, field.placeholder);
  }
  return found;
}"""


def hostile(told: Any) -> Any:
    """The same with markup behind every text."""
    if isinstance(told, str):
        return told + MARKUP
    if isinstance(told, list):
        return [hostile(each) for each in told]
    return {key: hostile(value) for key, value in told.items()} if isinstance(told, dict) else told


def hostile_gateway() -> StandIn:
    """A gateway all of whose words could be markup, names of sources and parts included."""
    cell = a_cell(
        degraded=[scenes.DISK_GONE],
        tenants=[
            {"tenant": name, "running": 1, "waiting": 0, "device_bytes": 1, "host_bytes": 1, "disk_bytes": 1}
            for name in "ab"
        ],
    )
    pin = {"name": "pin", "tokens": 64, "held_tokens": 48, "pages": 3, "expires_at": 2e9, "refusal": "no room"}
    requests = [{**hostile(explanation(1, divergence=divergence())), "id": "http-1", "request_id": "request-1"}]
    nodes = [{**hostile(node(1, None, 0, 512, device={"w": 3}, pins=["a"])), "namespace": MARKUP}]
    return StandIn(
        cell={**hostile(cell), "storages": [MARKUP]}, storages={MARKUP: dict(scenes.FULL_DISK) | scenes.STORE},
        requests=requests, nodes=nodes, pins=[hostile(pin)], divergences=[hostile(costly())],
        words=(MARKUP,),
    )  # fmt: skip


async def looked_through(page: Page) -> None:
    """Every view with everything open, as a person would see it."""
    for tab in TABS:
        await page.click(f"#tab-{tab}")
        if tab == "overview":
            await expect(page.locator("#capacity")).to_contain_text("object store")
        if tab == "tree":
            await expect(page.locator("#tree-said")).to_contain_text("1 node")
            await page.click("#icicle", position={"x": 120, "y": 60})
            await page.click("#tree-as-table")
        if tab == "requests":
            await page.locator("#view-requests tbody tr.pick button").first.click()
            await expect(page.locator("#divergence")).to_be_visible()
        if tab == "chat":
            await page.fill("#chat-text", MARKUP)
            await page.keyboard.press("Enter")
            await expect(page.locator(".turn-explained summary")).to_be_visible()
            await page.locator(".turn-explained summary").click()
        if tab == "cache":
            await expect(page.locator("#view-cache")).to_contain_text("no room")


async def test_nothing_that_is_told_becomes_markup(browser: Browser) -> None:
    """In any view, in the banners, in exports and after a reload: it is shown as it came."""
    stand_in = hostile_gateway()
    async with serving(stand_in):
        page = await opened(browser, stand_in)
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text) if "Policy" in said.text else None)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        await looked_through(page)
        stand_in.scheduler_error, stand_in.error_code = MARKUP, MARKUP
        await expect(page.locator("#banner")).to_contain_text("<img src=x")
        await page.reload()

        await expect(page.locator(".turn.user")).to_have_text(MARKUP)
        assert await page.evaluate("window.wasRun") is None
        assert await page.locator("main img, main script, .banner img, .banner script").count() == 0
        assert (complaints, faults) == ([], [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_stands_out_from_its_ground(browser: Browser, scheme: Any) -> None:
    """By 4.5 to 1, which WCAG 2.1 asks of texts (1.4.3), in every view and in every state of a process."""
    stand_in = scenes.degraded_disk()
    stand_in.requests[0] |= {"state": "failed", "error_code": "deadline_exceeded"}
    async with serving(stand_in):
        page = await opened(browser, stand_in, color_scheme=scheme)
        await expect(page.locator("#capacity .pool-fault").first).to_be_visible()
        low: dict[str, list[str]] = {}
        for tab in TABS:
            await page.click(f"#tab-{tab}")
            if tab == "requests":
                await page.locator("#view-requests tbody tr.pick button").nth(1).click()
            if tab == "chat":
                await page.fill("#chat-text", "When?")
                await page.keyboard.press("Enter")
                await page.locator(".turn-explained summary").click()
            low[tab] = await page.evaluate(_CONTRASTS)
        await page.get_by_role("button", name="Keyboard shortcuts").click()
        low["help"] = await page.evaluate(_CONTRASTS)

        assert {name: found for name, found in low.items() if found} == {}


async def test_a_wide_table_stays_as_it_was_scrolled(browser: Browser) -> None:
    """And keeps the focus, though all around it is drawn anew each second."""
    stand_in = hostile_gateway()
    async with serving(stand_in):
        page = await opened(browser, stand_in, viewport={"width": 375, "height": 812})
        await expect(page.get_by_role("table", name="Workers")).to_be_visible()
        # In one step each: an element that was found is another one once the page has been drawn anew.
        name = "box.querySelector('caption').textContent"
        wide = f"[...document.querySelectorAll('.scroll')].find((box) => {name} === 'Workers')"
        await page.evaluate(f"{{ const box = {wide}; box.focus(); box.scrollLeft = 60; }}")

        stand_in.cell = {**stand_in.cell, "running": 17}
        await expect(page.locator(".figure b").first).to_have_text("17")

        state = f"{{ const box = {wide}; [box.scrollLeft, document.activeElement === box] }}"
        assert await page.evaluate(state) == [60, True]


async def test_what_did_not_change_is_not_read_out_again(page: Page, gateway: StandIn) -> None:
    """How many requests there are is asked every two seconds."""
    await page.click("#tab-requests")
    await expect(page.locator("#requests-said")).to_contain_text("40 requests")
    await page.evaluate(
        """window.written = 0;
        const said = document.getElementById('requests-said');
        new MutationObserver((all) => { written += all.length; })
          .observe(said, { childList: true, characterData: true, subtree: true });"""
    )

    gateway.requests[0]["ttft_ms"] = 4321.0
    await expect(page.locator("#view-requests")).to_contain_text("4.32 s")

    assert await page.evaluate("written") == 0


async def test_characters_that_cannot_be_seen_are_spelt_out(page: Page, gateway: StandIn) -> None:
    """Also those that turn the order of others round: two texts that differ in them look different."""
    told = divergence(before="It is\u200b ", prompt="\u202enow", cached="now", cause="unknown")
    gateway.requests[0] |= {"divergence": told}
    gateway.nodes = [node(1, None, 0, 16, head_text="\u202eevil")]
    await page.click("#tab-requests")
    await page.locator("#request-request-0").click()

    await expect(page.locator("#divergence mark").first).to_have_text(r"\u202e")
    await expect(page.locator("#divergence")).to_contain_text(r"It is\u200b ")
    await page.click("#tab-tree")
    await page.click("#icicle", position={"x": 120, "y": 40})
    await expect(page.locator("#tree-picked")).to_contain_text(r"\u202eevil")


async def test_it_is_printed_in_light_colours_with_its_bars(page: Page) -> None:
    """Browsers print no grounds, of which bars consist, unless they are told to; nothing can be pressed on paper."""
    await expect(page.get_by_role("meter").first).to_be_visible()
    await page.evaluate("document.documentElement.dataset.theme = 'dark'")
    await page.emulate_media(media="print")

    style = "getComputedStyle(document.documentElement).colorScheme"
    bar = "getComputedStyle(document.querySelector('.bar > i')).printColorAdjust"
    assert await page.evaluate(f"[{style}, {bar}]") == ["light", "exact"]
    await expect(page.locator("#keys")).to_be_hidden()


async def test_each_control_shows_that_it_has_the_focus(page: Page) -> None:
    """With an outline, wherever Tab leads."""
    bare: list[str] = []
    for _ in range(12):
        await page.keyboard.press("Tab")
        seen: list[str] = await page.evaluate(
            "[document.activeElement.outerHTML.slice(0, 80), getComputedStyle(document.activeElement).outlineStyle]"
        )
        if seen[1] == "none" and not seen[0].startswith("<body"):  # Behind the last one Tab leaves the page.
            bare.append(seen[0])

    assert bare == []


async def test_a_phone_of_375_pixels_shows_every_view_whole(browser: Browser) -> None:
    """No view is wider than the window, with long names and all panels."""
    stand_in = hostile_gateway()
    async with serving(stand_in):
        page = await opened(browser, stand_in, viewport={"width": 375, "height": 812})
        for tab in TABS:
            await page.click(f"#tab-{tab}")
            await expect(page.locator(f"#view-{tab}")).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth") <= 375, tab
