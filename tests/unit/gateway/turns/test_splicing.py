"""Whatever is kept of an answer, the prompt's text is the rendered text."""

from __future__ import annotations

import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tokenizer import Tokenizer
from services.gateway.turns.memory import Alternatives, Said
from services.gateway.turns.places import Place
from services.gateway.turns.splicing import Fate, splice
from shared.messages.base import pack_int32
from tests.unit.gateway.turns.chats import CHATML, make_tokenizer, random_answer, words_of

BEFORE, CLOSING = "<|im_start|>assistant\n", "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("chatml"), CHATML)


def said(tokenizer: Tokenizer, words: list[int]) -> Said:
    return Said(pack_int32(words), tokenizer.rendered_text(words))


@given(seed=st.integers(0, 2**32), cut=st.integers(0, 60), behind=st.text(max_size=8))
def test_the_prompts_text_is_what_was_rendered(tokenizer: Tokenizer, seed: int, cut: int, behind: str) -> None:
    """An answer that is cut anywhere, and gone on from with anything, is kept from its beginning to a whole token."""
    words = words_of(tokenizer, random_answer(tokenizer, random.Random(seed)))
    answer = said(tokenizer, words)
    text = BEFORE + answer.text[:cut] + behind + CLOSING
    place = Place(len(BEFORE), "p", b"")

    spliced = splice(text, [place], {"p": (answer,)}, CLOSING, tokenizer.encode_rendered, tokenizer.rendered_text)

    decoded = tokenizer.rendered_text(spliced.tokens)
    assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", text)
    opening = tokenizer.encode_rendered(BEFORE)
    if spliced.fates == (Fate.KEPT,):
        assert spliced.tokens[: len(opening) + len(words)] == opening + words


@pytest.mark.parametrize("texts", [("the", "the keeper"), ("the keeper", "the")])
def test_the_longest_answer_that_is_all_there_is_taken(tokenizer: Tokenizer, texts: tuple[str, str]) -> None:
    """Whichever was said last; and of none that is all there the one that goes furthest."""
    answers: Alternatives = tuple(said(tokenizer, [spell(tokenizer, letter) for letter in text]) for text in texts)

    quoting = said(tokenizer, [spell(tokenizer, letter) for letter in "the<|im_end|>no"])
    answers = (*answers, quoting)

    def fate(text: str) -> tuple[Fate, int]:
        place = Place(len(BEFORE), "p", b"")
        found = splice(
            BEFORE + text + CLOSING,
            [place],
            {"p": answers},
            CLOSING,
            tokenizer.encode_rendered,
            tokenizer.rendered_text,
        )
        return found.fates[0], len(found.tokens)

    extra = len(tokenizer.encode_rendered(BEFORE)) + 1
    assert fate("the") == (Fate.KEPT, extra + len("the"))
    assert fate("the keeper") == (Fate.KEPT, extra + len("the keeper"))
    assert fate("the kee") == (Fate.CUT, extra + len("the") + len(tokenizer.encode_rendered(" kee")))
    assert fate("the<|im_end|>") == (Fate.KEPT, extra + len("the") + 1)
    assert fate("the<|im_end|>no") == (Fate.KEPT, extra + len("the<|im_end|>no"))
    assert fate("a crane") == (Fate.CHANGED, extra + len(tokenizer.encode_rendered("a crane")))


def spell(tokenizer: Tokenizer, letter: str) -> int:
    (token,) = tokenizer.encode_rendered(letter)
    return token
