"""The usual cause of a difference, by the texts around it and by where in a conversation it lies."""

from __future__ import annotations

import pytest

from services.gateway.divergence_causes import cause_of
from services.gateway.prompt_places import Place

SYSTEM = Place("message", 0, "system")
TOOLS = Place("tools", tools=("get_weather", "get_time", "search"))


@pytest.mark.parametrize(
    ("before", "prompt", "cached"),
    [
        ("Now: 2026-11-2", "5. Answer briefly.", "4. Answer briefly."),
        ("Now: ", "2026-11-25T10:00:00Z end", "2025-01-01T00:00:00+01:00 end"),
        ("It is ", "9:05 and", "13:05 and"),
        ("It is 13:0", "5:59.", "4:00."),
        ("The time is 1", "1:59 PM", "0:00 am"),
        ("Today is ", "Monday, be kind", "Tuesday, be kind"),
        ("Today is T", "uesday", "hursday"),
        ("Date: ", "November 24, 2026", "December 1, 2026"),
        ("Date: ", "24 Nov 2026", "1 Dec 2026"),
        ("Today Date: 2", "4 Nov 2026", "5 Nov 2026"),
        ("Date: 24.1", "1.2026", "2.2026"),
        ("ts=17639", "60001 x", "60002 x"),
        ("ts=", "1763960001123", "1763960001999"),
        ("Now: 2026-11-24", "T10:00 x", " x"),
    ],
)
def test_dates_and_times_are_known(before: str, prompt: str, cached: str) -> None:
    """In the usual forms, wherever within one the two sides differ; the place in the prompt does not matter."""
    for place in (SYSTEM, None, Place("template", 0, "system"), Place("message", 3, "user")):
        assert cause_of(before, prompt, cached, place) == "date_or_time"


@pytest.mark.parametrize(
    ("before", "prompt", "cached", "cause"),
    [
        (
            "id 3f2a9c1e-", "aaaa-4bbb-8ccc-1234567890ab.", "bbbb-4bbb-8ccc-1234567890ab.", "identifier",
        ),
        ("session ", "a81bc9d0e7 go", "7fe0d1c2b3 go", "identifier"),
        ("req_", "9f8e7d6c5b", "1a2b3c4d5e", "identifier"),
        ("You have ", "41 messages left", "42 messages left", "number"),
        ("Turn ", "9 of 20", "10 of 20", "number"),
        ("Be brief.", "\n\nBe polite. Be kind.", " Be polite. Be kind.", "whitespace"),
        ("Be ", "brief.", "thorough.", "system_prompt"),
        ("Be as ", "march hare", "hatter", "system_prompt"),
        ("Reasoning: ", "low\n", "high\n", "template_variable"),
        ("<|assistant|>", "<think>\n\n</think>", "Well", "template_variable"),
    ],
)  # fmt: skip
def test_other_texts_are_known(before: str, prompt: str, cached: str, cause: str) -> None:
    """Identifiers, numbers, spaces, variables of templates; and what is left is an edited system prompt."""
    assert cause_of(before, prompt, cached, SYSTEM) == cause


@pytest.mark.parametrize(
    ("place", "cause"),
    [
        (SYSTEM, "system_prompt"),
        (Place("message", 0, "developer"), "system_prompt"),
        (Place("message", 1, "user"), "other_conversation"),
        (Place("message", 3, "user", is_first=False), "other_turn"),
        (Place("message", 2, "assistant"), "answer_changed"),
        (Place("message", 4, "tool"), "tool_result"),
        (Place("template", 0, "system"), "template_variable"),
        (Place("generation_prompt"), "template_variable"),
        (None, "unknown"),
    ],
)
def test_plain_words_are_judged_by_their_place(place: Place | None, cause: str) -> None:
    """What differs in a first user message is another conversation, and nothing is wrong with it."""
    assert cause_of("Say: ", "red", "green", place) == cause


TOOL = '{"type": "function", "function": {"name": "'


def test_tools_in_another_order_are_told_from_other_tools() -> None:
    """By the names where the sides differ, which may begin alike; without a place only as far as the prompt is told."""
    ours, theirs = 'weather", "description": "w"}}', 'time", "description": "t"}}'

    assert cause_of(f"{TOOL}get_", ours, theirs, TOOLS) == "tools_reordered"
    assert cause_of(f"{TOOL}get_", ours, 'news", "description": "n"}}', TOOLS) == "tools_changed"
    assert cause_of(f'{TOOL}get_time", "description": "', "tells it", "says it", TOOLS) == "tools_changed"
    assert cause_of(f"{TOOL}get_", f'{ours}\n{TOOL}get_time"', theirs, None) == "tools_reordered"
    assert cause_of(f"{TOOL}get_", ours, theirs, None) == "tools_changed"


def test_who_may_not_see_the_other_side_is_told_by_the_prompt_alone() -> None:
    """Something that changes with every request stands near; numbers are too common to say so."""
    assert cause_of("It is", " now 12:05, Monday", None, SYSTEM) == "date_or_time"
    assert cause_of("It was 12:05", " then", None, SYSTEM) == "system_prompt"
    assert cause_of("", "a " * 21 + "12:05", None, SYSTEM) == "system_prompt"
    assert cause_of("Now: 2026-11-", "24 12:00", None, SYSTEM) == "date_or_time"
    assert cause_of("session ", "a81bc9d0e7", None, None) == "identifier"
    assert cause_of("You have ", "41 left", None, SYSTEM) == "system_prompt"
    assert cause_of("", "hello", None, Place("message", 1, "user")) == "other_conversation"
    assert cause_of("", "x", None, TOOLS) == "tools_changed"


@pytest.mark.parametrize("text", ["", "\n", "a" * 100_000, "1" * 100_000, "2026-" * 20_000, '"name":"' * 12_000])
def test_senseless_texts_are_judged_in_no_time(text: str) -> None:
    """No rule goes through a text again and again."""
    assert cause_of(text[:300], text[:300], "x", None)
    assert cause_of(text[:300], text[:300], None, SYSTEM)
