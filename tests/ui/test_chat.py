"""The chat: keys, what a reload keeps, and what leads where."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, Page, expect

from tests.ui.opening import opened
from tests.ui.stand_in import StandIn

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_enter_sends_and_shift_enter_breaks_the_line(page: Page, gateway: StandIn) -> None:
    """As everywhere else."""
    await page.click("#tab-chat")
    await page.keyboard.type("one")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("two")
    assert gateway.orders == []
    await page.keyboard.press("Enter")

    await expect(page.locator(".turn-explained")).to_contain_text("prompt tokens cached")
    assert gateway.orders[0][1]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    await expect(page.locator("#chat-text")).to_have_value("")


async def test_a_reload_keeps_the_conversation_and_its_settings(page: Page, gateway: StandIn) -> None:
    """With its explanations and the draft; the next turn carries what came before."""
    await page.click("#tab-chat")
    await page.fill("#chat-system", "You are the harbour office.")
    await page.fill("#chat-limit", "9")
    await page.fill("#chat-text", "When?")
    await page.keyboard.press("Enter")
    await expect(page.locator(".turn-explained")).to_contain_text("prompt tokens cached")
    await page.fill("#chat-text", "a draft")

    await page.reload()

    await expect(page.locator(".turn")).to_have_text(["When?", "The harbour opens at <b>six</b>."])
    await expect(page.locator(".turn-explained")).to_contain_text("90 % of 1,000 prompt tokens cached")
    await expect(page.locator("#chat-text")).to_have_value("a draft")
    await page.press("#chat-text", "Enter")
    await expect(page.locator(".turn")).to_have_count(4)
    await expect(page.locator("#chat-text")).to_be_editable()
    assert [said["content"] for said in gateway.orders[1][1]["messages"]] == [
        "You are the harbour office.", "When?", "The harbour opens at <b>six</b>.", "a draft",
    ]  # fmt: skip
    assert gateway.orders[1][1]["max_tokens"] == 9
    await page.get_by_role("button", name="New conversation").click()
    await page.reload()
    await expect(page.locator(".turn")).to_have_count(0)


async def test_an_answer_that_was_cut_says_so(page: Page, gateway: StandIn) -> None:
    """It ends in the middle of a sentence since the settings say so, not since something broke."""
    gateway.finish_reason = "length"
    await page.click("#tab-chat")
    await page.fill("#chat-text", "Tell all.")
    await page.keyboard.press("Enter")

    await expect(page.locator(".turn-explained")).to_contain_text("the answer ends at its limit of tokens")


async def test_reasoning_is_shown_and_sent_back(page: Page, gateway: StandIn) -> None:
    """Apart from the answer, also after a reload; with it the next turn's prompt begins as this one went on."""
    gateway.thoughts = ("Ferries leave ", "<b>hourly</b>.")
    await page.click("#tab-chat")
    await page.fill("#chat-text", "When?")
    await page.keyboard.press("Enter")
    await expect(page.locator(".turn-explained")).to_contain_text("prompt tokens cached")
    await page.reload()
    await page.click("text=Reasoning")

    await expect(page.locator(".reasoning")).to_have_text("Ferries leave <b>hourly</b>.")
    await page.fill("#chat-text", "And then?")
    await page.keyboard.press("Enter")
    await expect(page.locator(".turn-explained")).to_have_count(2)
    await expect(page.locator(".turn-explained").last).to_contain_text("prompt tokens cached")
    bodies = [body for what, body in gateway.orders if what == "chat"]
    assert bodies[1]["messages"][1]["reasoning_content"] == "Ferries leave <b>hourly</b>."


async def test_another_tab_knows_nothing_of_it(browser: Browser, page: Page, gateway: StandIn) -> None:
    """Prompts may be confidential: they are kept like the keys."""
    await page.click("#tab-chat")
    await page.fill("#chat-text", "a secret")
    await page.keyboard.press("Enter")
    await expect(page.locator(".turn-explained")).to_contain_text("prompt tokens cached")

    other = await opened(browser, gateway, "chat")

    await expect(other.locator(".turn")).to_have_count(0)
    assert "a secret" not in str(await page.evaluate("JSON.stringify({...localStorage})"))


async def test_what_is_too_long_to_keep_is_said(page: Page, gateway: StandIn) -> None:
    """And the conversation goes on."""
    gateway.words = ("word " * 500_000,)
    await page.click("#tab-chat")
    await page.fill("#chat-text", "Say much.")
    await page.keyboard.press("Enter")

    # A slow machine takes long to draw so much.
    await expect(page.locator("#view-chat")).to_contain_text(
        "This conversation is too long to be kept across a reload.", timeout=240_000
    )
    await page.reload()
    await expect(page.locator(".turn")).to_have_count(0)
