"""How much new text is tokenised within a turn of the event loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.known_texts.room import Room, TooMuchNewText
from services.gateway.tokenizer import Tokenizer
from tests.unit.gateway.running_gateway import MODEL_DIR

TEXT = "the keeper of the light " * 400


@pytest.fixture
def known() -> Tokenizer:
    return Tokenizer(MODEL_DIR, known_bytes=2**20)


def test_room_is_for_all_calls_together() -> None:
    """Several short texts are as much work as a long one."""
    room = Room(10)
    room.take(6)
    room.take(4)

    with pytest.raises(TooMuchNewText):
        room.take(1)


def test_text_whose_tokens_are_known_takes_no_room(known: Tokenizer) -> None:
    """All of it is refused at first, and only the end later."""
    with pytest.raises(TooMuchNewText):
        known.packed(TEXT, add_special_tokens=False, known_in="ns", room=Room(len(TEXT) - 1))
    expected = known.packed(TEXT + "and its end", add_special_tokens=False)
    known.packed(TEXT, add_special_tokens=False, known_in="ns")

    found = known.packed(TEXT + "and its end", add_special_tokens=False, known_in="ns", room=Room(len(TEXT) // 2))
    assert found == expected
    with pytest.raises(TooMuchNewText):
        known.packed(TEXT + "and its end", add_special_tokens=False, known_in="other", room=Room(len(TEXT) // 2))


@pytest.mark.parametrize("most", [0, 10])
def test_without_known_texts_all_text_is_new(most: int) -> None:
    """Also where a text that may be too long is only counted."""
    tokenizer = Tokenizer(Path(MODEL_DIR))

    with pytest.raises(TooMuchNewText):
        tokenizer.packed(TEXT, add_special_tokens=False, most=most, room=Room(len(TEXT) - 1))
