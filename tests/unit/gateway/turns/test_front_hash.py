"""Digests of a text's fronts are the same, whatever of it was hashed before."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.turns import front_hash
from services.gateway.turns.front_hash import FrontHash, HashedTexts
from services.gateway.turns.places import places

PIECES = st.lists(st.sampled_from(["<a>", "word ", "x", "東\ud800"]), min_size=4, max_size=40).map("".join)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short texts have many states."""
    monkeypatch.setattr(front_hash, "STEP_CHARACTERS", 8)


@given(texts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200), PIECES), min_size=1, max_size=8))
def test_places_of_texts_that_grow_and_branch_have_the_names_of_a_full_hash(
    texts: list[tuple[int, int, str]],
) -> None:
    """Each goes on from a part of one before it."""
    known, said = HashedTexts(20_000, least_characters=8), ["12345678"]
    for number, length, piece in texts:
        text = said[number % len(said)][:length] + piece
        said.append(text)

        assert places(text, "<a>", "n", 5, known) == places(text, "<a>", "n", 5)
        assert places(text, "<a>", "other", 2, known) == places(text, "<a>", "other", 2)


class Counting:
    """A hash that counts what it is given."""

    def __init__(self, inner: hashlib.blake2b, taken: list[int]) -> None:
        self._inner, self._taken = inner, taken

    def update(self, data: bytes) -> None:
        self._taken.append(len(data))
        self._inner.update(data)

    def copy(self) -> Counting:
        return Counting(self._inner.copy(), self._taken)

    def digest(self) -> bytes:
        return self._inner.digest()


def test_what_a_text_begins_with_is_not_hashed_again() -> None:
    """But for less than a step, also behind a difference at the end; and what is kept is bounded."""
    known, taken = HashedTexts(100_000, least_characters=8), list[int]()
    front = "a long conversation, " * 20
    digests = []
    for end in ("first", "second"):
        begun = Counting(hashlib.blake2b(b"n"), taken)
        hashed = FrontHash(begun, front + end, "n", known)  # type: ignore[arg-type]
        digests.append([hashed.digest_at(place) for place in (40, 200, len(front + end))])
        hashed.keep()
        if end == "first":
            assert sum(taken) == len(front + end)
            taken.clear()

    assert digests[0][:2] == digests[1][:2]
    assert digests[1][2] == hashlib.blake2b(b"n" + (front + "second").encode()).digest()
    assert sum(taken) < 2 * 8 + len("second")
    assert 0 < known.nbytes <= 100_000
