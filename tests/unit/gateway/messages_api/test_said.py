"""How calls were said is remembered for as long as it helps."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.messages_api.said import LONGEST_CHARACTERS, SaidArguments


def test_a_text_comes_back_for_the_object_that_it_means() -> None:
    """Whatever its blanks and the order of its names; for another object, or another call, nothing does."""
    said = SaidArguments()
    said.note("c", '{ "b" : 1, "a": [true] }')

    assert said.find("c", {"a": [True], "b": 1}) == '{ "b" : 1, "a": [true] }'
    assert said.find("d", {"a": [True], "b": 1}) is None


@pytest.mark.parametrize("given", [{}, {"a": 1.0}, {"a": True}, {"a": 2}, {"a": 1, "b": None}])
def test_what_the_client_changed_counts(given: dict[str, Any]) -> None:
    """Values are compared as JSON has them."""
    said = SaidArguments()
    said.note("c", '{"a":1}')

    assert said.find("c", given) is None


def test_what_is_no_json_is_never_found() -> None:
    """It was given under another name."""
    said = SaidArguments()
    said.note("c", '{"a":')

    assert said.find("c", {"a": 1}) is None


def test_it_is_bounded_by_number_and_by_length() -> None:
    """What was used longest ago goes first; a very long text is not taken."""
    said = SaidArguments(most_calls=2, most_characters=1_000_000)
    for name in ("one", "two"):
        said.note(name, "{}")
    said.find("one", {})
    said.note("three", "{}")
    said.note("long", '"' + "x" * LONGEST_CHARACTERS + '"')
    short = SaidArguments(most_characters=3)
    short.note("one", "{}")
    short.note("two", "{}")

    assert [said.find(name, {}) for name in ("one", "two", "three", "long")] == ["{}", None, "{}", None]
    assert [short.find(name, {}) for name in ("one", "two")] == [None, "{}"]
