"""States that the documentation shows: the page has each of them, and its committed picture is small and shown."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from playwright.async_api import Browser, expect

from tests.ui.pictures import FOLDER, PICTURES, opened
from tests.ui.small_png import COLOURS, encode, shrink, with_palette

MOST_BYTES = 60_000
WATCH = FOLDER.parent / "how-to" / "watch.md"

SAYS = {
    "ui-overview": ("#flows", "tokens/s uploaded"),
    "ui-empty": ("#view-overview", "No worker and no storage has joined."),
    "ui-tree": ("#tree-said", "3,500 nodes"),
    "ui-request-dark": ("#request-detail", "A date or time."),
    "ui-broker-away": ("#banner", "has no connection to the message broker"),
    "ui-degraded-disk": ("#capacity", "No space left on device"),
    "ui-phone": ("#request-detail", "Where it left the cache"),
}
"""Where each state shows, and what stands there."""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", PICTURES)
async def test_the_page_shows_the_state_of_each_picture(browser: Browser, name: str) -> None:
    """In its size and colours, without a fault in a script, and no wider than its window."""
    async with opened(browser, PICTURES[name]) as page:
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        place, words = SAYS[name]

        await expect(page.locator(place)).to_contain_text(words)
        assert await page.evaluate("document.documentElement.scrollWidth") <= PICTURES[name].size[0]
        assert await page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is (
            PICTURES[name].scheme == "dark"
        )
        assert faults == []


def test_every_picture_is_committed_small_and_shown() -> None:
    """``python -m tests.ui.pictures`` makes them; the how-to shows each, and no other picture of the page is left."""
    sizes = {path.stem: path.stat().st_size for path in FOLDER.glob("ui-*.png")}
    text = WATCH.read_text("utf-8")

    assert set(sizes) == set(PICTURES) == set(SAYS)
    assert {name: size for name, size in sizes.items() if size > MOST_BYTES} == {}
    assert [name for name in PICTURES if f"../pictures/{name}.png" not in text] == []


def test_frequent_colours_stay_and_rare_ones_become_the_nearest() -> None:
    """A palette holds 128 colours; a picture with fewer is kept as it was."""
    few = np.array([[[0, 0, 0], [200, 10, 10]], [[255, 255, 255], [0, 0, 0]]], dtype=np.uint8)
    palette, indices = with_palette(few)
    assert np.array_equal(palette[indices], few)

    many = np.random.default_rng(3).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    many[:20] = (1, 2, 3)
    palette, indices = with_palette(many)

    assert len(palette) <= COLOURS
    assert np.array_equal(palette[indices][:20], many[:20])


def test_the_file_is_a_png_with_a_palette() -> None:
    """Signature, header, palette, rows of indices, end."""
    data = encode(np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint8), np.array([[0, 1], [1, 0]], dtype=np.uint8))

    assert data.startswith(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\2\0\0\0\2\x08\3")
    begin = data.index(b"IDAT") + 4
    assert zlib.decompressobj().decompress(data[begin:]) == bytes([0, 0, 1, 0, 1, 0])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_shrunk_picture_looks_the_same(browser: Browser) -> None:
    """A browser reads it, and it has the colours that it had."""
    page = await browser.new_page(viewport={"width": 60, "height": 20})
    await page.set_content("<body style='margin:0;background:#123456'><p style='margin:0;color:#fff'>Aa</p></body>")
    before = await page.screenshot()

    after = await shrink(before, page)

    assert len(after) < len(before) + 800
    assert await shrink(after, page) == after
