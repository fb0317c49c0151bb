"""Text comes out token by token, exactly as decoding all tokens at once gives it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.worker.detokenizer import REPLACEMENT, Vocabulary
from shared.errors import UnsupportedModel
from tests.checkpoints import save_tokenizer
from tests.present import present
from tests.unit.worker.vocabularies import KINDS, build


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return build(kind)


@cache
def vocabulary_of(kind: str) -> Vocabulary:
    return Vocabulary(tokenizer_of(kind))


def pieces_of(kind: str, tokens: list[int], *, skip: bool = True) -> list[str]:
    stream = vocabulary_of(kind).stream(skip_special_tokens=skip)
    return [*(stream.feed(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_joined_are_the_decoded_tokens(kind: str, data: st.DataObject, skip: bool) -> None:
    """For any tokens, unknown ones included, and any decoder, with or without special tokens."""
    tokenizer = tokenizer_of(kind)
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size()), max_size=24))

    text = "".join(pieces_of(kind, tokens, skip=skip))

    assert text == tokenizer.decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_shown_stay_in_the_text(kind: str) -> None:
    """The others are left out, as without it."""
    tokenizer = tokenizer_of(kind)
    specials = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    shown, others = specials[0], specials[1:]
    stream = vocabulary_of(kind).stream(shown=[shown])
    text = "".join([stream.feed(token) for token in [*others, shown, *others]] + [stream.finish()])

    assert specials
    assert text == tokenizer.decode([shown], skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["byte_level", "llama_sentencepiece", "gemma_sentencepiece"])
def test_a_character_of_several_tokens_comes_in_one_piece(kind: str) -> None:
    """No piece before the last byte shows a replacement character."""
    pieces = ["ä", "½", "ł"] if kind == "byte_level" else ["<0xE4>", "<0xBD>", "<0xA0>"]
    end = "b"
    tokens = [present(tokenizer_of(kind).token_to_id(piece)) for piece in [*pieces, end]]

    out = pieces_of(kind, tokens)

    assert "".join(out) == "你b"
    assert out[:2] == ["", ""]
    assert not any(REPLACEMENT in piece for piece in out)


@pytest.mark.parametrize("kind", ["bytes_before_strip", "bytes_before_metaspace"])
def test_bytes_are_withheld_until_their_run_ends(kind: str) -> None:
    """One that is no character turns all of its run into replacements; a number without a token ends no run."""
    tokenizer = tokenizer_of(kind)
    run = [present(tokenizer.token_to_id(piece)) for piece in ["<0x61>", "<0xFF>"]]
    tokens = [run[0], tokenizer.get_vocab_size(), run[1], present(tokenizer.token_to_id("b"))]

    out = pieces_of(kind, tokens)

    assert out == ["", "", "", 2 * REPLACEMENT + "b", ""]


def test_half_a_character_is_replaced_only_at_the_end() -> None:
    """A character that never becomes whole is withheld until the answer is over."""
    tokens = [present(tokenizer_of("byte_level").token_to_id(piece)) for piece in ["b", "ä", "½"]]

    out = pieces_of("byte_level", tokens)

    assert out == ["b", "", "", REPLACEMENT]


def test_a_window_that_never_becomes_text_is_shown_after_all() -> None:
    """Bytes that are no character do not make a window grow for ever: the tokens held are bounded."""
    kind = "no_decoder"
    tokenizer = Tokenizer.from_str(tokenizer_of(kind).to_str())
    tokenizer.add_tokens(["\ufffd"])
    stream = Vocabulary(tokenizer).stream()
    odd = tokenizer.token_to_id("\ufffd")

    assert odd is not None
    shown = [stream.feed(odd) for _ in range(40)]

    assert any(shown)
    assert "".join(shown) + stream.finish() == tokenizer.decode([odd] * 40)


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_any_text_survives_a_real_byte_level_vocabulary(checkpoint_tokenizer: Tokenizer, text: str) -> None:
    """Encoding a text and feeding its tokens gives the text back."""
    tokens = checkpoint_tokenizer.encode(text, add_special_tokens=False).ids
    stream = Vocabulary(checkpoint_tokenizer).stream(skip_special_tokens=False)

    out = "".join(stream.feed(token) for token in tokens) + stream.finish()

    assert out == text


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The worker cannot serve text without one, and says so before it joins."""
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        Vocabulary.from_directory(tmp_path)


@pytest.fixture(scope="module")
def checkpoint_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer.from_file(str(path / "tokenizer.json"))
