"""Places are named for everything before them, and for who may share it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.turns.places import KEY_BYTES, places

OPENING = "<a>"
TEXT = "<u>hi<a>hello<u>and<a>"


def test_a_place_is_behind_each_opening() -> None:
    """The last one is where the next answer will stand."""
    found = places(TEXT, OPENING, "n", 1)

    assert [place.offset for place in found] == [TEXT.index("hello"), len(TEXT)]
    assert len({place.name for place in found} | {place.key.hex() for place in found}) == 4
    assert all(len(place.key) == KEY_BYTES for place in found)


def test_the_last_place_of_a_turn_is_found_again_in_the_next() -> None:
    """Under the same name and key, whatever stands behind it."""
    earlier = places("<u>hi<a>", OPENING, "n", 0)

    assert places(TEXT, OPENING, "n", 1)[0] == earlier[0]


@given(before=st.text(max_size=20), namespace=st.sampled_from(["m", "n"]))
def test_other_text_or_namespace_is_another_place(before: str, namespace: str) -> None:
    """Names are equal only where both are."""
    (one,) = places(f"{before}<a>", OPENING, namespace, 0)[:1]
    (other,) = places("<u>hi<a>", OPENING, "n", 0)

    assert places("<u>hi<a>", OPENING, "m", 0) != [other]
    assert (one.name == other.name) == (one.key == other.key)
    assert (one.name == other.name) == (before == "<u>hi" and namespace == "n")


def test_openings_that_callers_write_are_bounded() -> None:
    """No more places than there can be answers, and none without an opening."""
    assert len(places(OPENING * 1_000, OPENING, "n", 3)) == 4
    assert places(TEXT, "", "n", 3) == []
