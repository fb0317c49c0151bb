"""A conversation that goes on has the ids that it would have without what is kept of it, and costs what is new."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.turns.memory import Alternatives, AnswerMemory, Said
from services.gateway.turns.places import places
from services.gateway.turns.spliced_texts import SplicedTexts, keep_front
from services.gateway.turns.splicing import NO_FRONT, Fate, Spliced, splice
from services.gateway.turns.turns import Turns
from shared.messages.base import pack_int32
from shared.packed_tokens import PackedTokens
from tests.unit.gateway.turns.chats import CHATML, make_tokenizer, talk

OPENING, CLOSING, OTHER = "<a>", "</a>", 1_000
PIECES = ("the ", "keeper", OPENING, CLOSING, " ", "x")
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


def encode(text: str) -> PackedTokens:
    """A token for each character."""
    return PackedTokens.of([ord(character) for character in text])


def decode(tokens: Sequence[int]) -> str:
    """Ids above OTHER are the same characters, said in ids that the tokenizer would not give back."""
    return "".join(chr(token % OTHER) for token in tokens)


def said(text: str) -> Said:
    return Said(pack_int32([OTHER + ord(character) for character in text]), text)


def spliced(text: str, known: Mapping[str, Alternatives], fronts: SplicedTexts | None) -> Spliced:
    """As a gateway does it."""
    found = fronts.nearest("n", text) if fronts is not None else None
    front = (found[0].value, found[1]) if found is not None else (NO_FRONT, 0)
    made = splice(text, places(text, OPENING, "n", 99), known, CLOSING, encode, decode, front)
    if fronts is not None:
        keep_front(fronts, "n", text, made.front, found)
    return made


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 120), TEXTS, st.lists(TEXTS, max_size=3), st.booleans()),
        min_size=2,
        max_size=10,
    )
)
def test_texts_that_grow_and_branch_have_the_ids_that_they_have_without(
    turns: list[tuple[int, int, str, list[str], bool]],
) -> None:
    """Whatever was said at their places comes to be known, and is forgotten, between them."""
    fronts, known = SplicedTexts(100_000, least_characters=4), dict[str, Alternatives]()
    earlier = ["the keeper "]
    for number, length, piece, answers, forgets in turns:
        asked = earlier[number % len(earlier)][:length] + piece + OPENING
        with_front = spliced(asked, known, fronts)

        without = spliced(asked, known, None)
        assert (with_front.tokens, with_front.fates) == (without.tokens, without.fates)
        assert decode(with_front.tokens) == asked
        place = places(asked, OPENING, "n", 99)[-1]
        known[place.name] = (*map(said, answers), *known.get(place.name, ()))
        if forgets:
            known.pop(next(iter(known)))
        earlier.append(asked + "".join(answers[:1]) + CLOSING)


def test_a_longer_answer_that_is_all_there_is_taken_instead() -> None:
    """Though both texts begin with the shorter one and what ends it."""
    fronts, asked = SplicedTexts(100_000, least_characters=4), "who watches the lamp?" + OPENING
    place = places(asked, OPENING, "n", 0)[0]
    known = {place.name: (said("keeper"), said(f"keeper{CLOSING}x"))}

    fates = [
        len(spliced(asked + answer, known, fronts).front.joints[0].kept.tokens)
        for answer in (f"keeper{CLOSING}the", f"keeper{CLOSING}x{CLOSING}")
    ]

    assert fates == [len("keeper"), len(f"keeper{CLOSING}x")]


def test_only_what_is_new_is_tokenised(tmp_path: Path) -> None:
    """In turn 40 of a session no more characters than in turn 5, and the last answer's place alone is decided."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    fronts = SplicedTexts(2**20, least_characters=64)
    turns = Turns(tokenizer, AnswerMemory(2**20), None, fronts=fronts)
    usual, characters = tokenizer.encode_rendered, list[int]()

    def counting(text: str, **how: Any) -> PackedTokens:
        characters.append(len(text))
        return usual(text, **how)

    tokenizer.encode_rendered = counting  # type: ignore[method-assign]
    told = talk(turns, tokenizer, 40, random.Random(1))

    assert all(following.fates == (Fate.KEPT,) * len(following.fates) for _, _, following in told)
    assert len(told[-1][2].fates) == 40
    # One piece before the last answer and one behind it, each turn.
    assert len(characters) <= 2 * len(told) + 1
    assert max(characters[-20:]) <= max(characters[4:20])
    assert 0 < fronts.nbytes < 8 * len(told[-1][2].text) + 500 * 41  # One text, not forty.


def test_nothing_is_kept_of_what_is_not_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who asks that nothing be written leaves no front, and finds none."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    fronts = SplicedTexts(2**20, least_characters=64)
    turns = Turns(tokenizer, AnswerMemory(2**20), None, fronts=fronts)
    told = talk(turns, tokenizer, 3, random.Random(1))
    opened, before = told[-1][2].opened, fronts.nbytes
    for name in ("nearest", "put"):  # Calling them would raise.
        monkeypatch.setattr(fronts, name, None)

    kept = turns.tokens(opened, 4_096, known_in=None)

    assert before > 0
    assert kept.tokens.tolist() == told[-1][2].tokens
