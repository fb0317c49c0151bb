"""Texts are cut where the tokenizer's definition proves it, and nowhere else."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from services.gateway.known_texts.boundaries import BEHIND, Boundaries, prove
from services.gateway.known_texts.character_classes import LETTER_RANGES
from tests.fuzz.text_tokenizers import KINDS, LLAMA3

WORDS = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def boundaries(made: Tokenizer) -> Boundaries:
    return prove(msgspec.json.decode(made.to_str()))


def cuts(found: Boundaries, text: str) -> list[int]:
    """Places of a text behind a character where it may be cut."""
    return [match.end() for match in found.others.finditer(text)] if found.others is not None else []


def words(*specials: str | AddedToken, **model: Any) -> Tokenizer:
    """A tokenizer of single characters."""
    vocabulary = {character: number for number, character in enumerate("<unk>")} | {"▁": 90, "a": 91, "b": 92}
    made = Tokenizer(models.BPE(vocabulary, [], **model))
    made.add_special_tokens(list(specials))
    return made


def test_letters_are_letters_in_every_version_of_unicode() -> None:
    """And NFC leaves them as they are, whatever stands before them; the same goes for what a cut stands in front of."""
    letters = re.findall(f"[{LETTER_RANGES}]", "".join(map(chr, range(0x10000))))
    seconds = {
        parts[1]
        for character in map(chr, range(0x110000))
        if len(parts := unicodedata.decomposition(character).split()) == 2 and not parts[0].startswith("<")
    }

    assert len(letters) > 30_000
    for letter in letters:
        assert unicodedata.category(letter)[0] == unicodedata.ucd_3_2_0.category(letter)[0] == "L"
        assert unicodedata.normalize("NFC", letter) == letter
    for character in (*letters, *BEHIND):
        assert unicodedata.combining(character) == 0
        assert f"{ord(character):04X}" not in seconds
        assert not 0x1100 <= ord(character) < 0x1200


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_cut_between_words(kind: str) -> None:
    """White space begins a segment in all of them; a line's end does where nothing is put before texts."""
    found = boundaries(KINDS[kind]())

    assert cuts(found, "light and tide") == [5, 9]
    assert cuts(found, "моста и") == [5]
    takes_lines = kind in ("gpt2", "llama3", "qwen2", "o200k", "deepseek", "starcoder", "wordpiece")
    assert cuts(found, "light\nand") == ([5] if takes_lines else [])
    assert cuts(found, "a  b") == ([1] if not found.left_out else [])


def test_chinese_is_cut_in_front_of_its_punctuation() -> None:
    """It has no spaces."""
    assert cuts(boundaries(KINDS["qwen2"]()), "你好，世界。") == [2, 5]


def test_line_ends_behind_punctuation_are_no_boundary_of_llama_3() -> None:
    """Its pattern takes both into one word, GPT-2's does not."""
    assert cuts(boundaries(KINDS["llama3"]()), "so!\nno") == []
    assert cuts(boundaries(KINDS["gpt2"]()), "so!\nno") == [3]


@pytest.mark.parametrize(
    "step",
    [
        pre_tokenizers.Punctuation(),
        pre_tokenizers.UnicodeScripts(),
        pre_tokenizers.Split(Regex(r"\s+$|\w+"), "isolated"),
        pre_tokenizers.Split(Regex(LLAMA3), "merged_with_next"),
        pre_tokenizers.Split(Regex(LLAMA3), "isolated", invert=True),
        pre_tokenizers.Split(" ", "isolated"),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("a b"), "isolated"), WORDS]),
        pre_tokenizers.Sequence([BYTES, WORDS]),
        BYTES,
    ],
)
def test_other_pre_tokenizers_prove_nothing(step: Any) -> None:
    """Then special tokens alone are boundaries."""
    made = words("<|end|>")
    made.pre_tokenizer = step

    found = boundaries(made)

    assert cuts(found, "a b" * 9) == []
    assert found.tokens is not None


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.NFKC(),
        normalizers.Lowercase(),
        normalizers.Strip(),
        normalizers.BertNormalizer(),
        normalizers.Replace("a", "▁"),
        normalizers.Replace(" ", "__"),
        normalizers.Sequence([normalizers.Prepend("x"), normalizers.Replace(" ", "▁")]),
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")]),
    ],
)
def test_other_normalizers_prove_nothing(normalizer: Any) -> None:
    """Not of text; added tokens are looked for first."""
    made = words("<|end|>")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    made.normalizer = normalizer

    found = boundaries(made)

    assert cuts(found, "a b") == []
    assert found.tokens is not None


def pieces(vocabulary: tuple[str, ...], **model: Any) -> Tokenizer:
    """Byte pair encoding of texts as a whole, with these tokens of several characters."""
    numbers = {piece: number for number, piece in enumerate(["a", "b", "▁", "<unk>", *vocabulary])}
    merges = [(piece[:-1], piece[-1]) for piece in vocabulary]
    made = Tokenizer(models.BPE(numbers, merges, **model))
    made.normalizer = normalizers.Replace(" ", "▁")
    return made


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (pieces(()), [1, 3]),
        (pieces(("▁a", "▁▁")), [1, 3]),
        (pieces(("a▁",)), [3]),
        (pieces(("ab", "ab▁")), [1]),
        (pieces((), ignore_merges=True), []),
        (pieces((), end_of_word_suffix="</w>"), []),
        (pieces(("<unk>▁",), unk_token="<unk>"), []),
    ],
)
def test_byte_pairs_of_whole_texts_are_cut_where_no_token_joins(made: Tokenizer, expected: list[int]) -> None:
    """A merge would cross the place otherwise."""
    assert cuts(boundaries(made), "a b a") == expected


def test_dropout_and_looking_around_leave_no_boundary() -> None:
    """Tokens are drawn anew each time, or depend on what stands beside them."""
    for made in (words("<|end|>", dropout=0.1), words("<|end|>", AddedToken("b", single_word=True))):
        made.pre_tokenizer = pre_tokenizers.Split(Regex(LLAMA3), "isolated")

        assert boundaries(made) == Boundaries()


@pytest.mark.parametrize(
    ("specials", "expected"),
    [
        (("<s>", "</s>"), ["</s>", "<s>"]),
        (("<s>", AddedToken("<mask>", lstrip=True)), ["<s>"]),
        (("<s>", AddedToken("<s>x", lstrip=True)), []),
        (("<s>", "a<b"), ["a<b"]),
        ((" <s>",), []),
        ((AddedToken("<s>", normalized=True),), []),
    ],
)
def test_texts_are_cut_in_front_of_tokens_that_nothing_reaches_into(
    specials: tuple[str | AddedToken, ...], expected: list[str]
) -> None:
    """Nor takes white space from before them."""
    found = boundaries(words(*specials)).tokens

    assert ([re.escape(each) for each in expected] if expected else None) == (
        found.pattern.split("|") if found else None
    )


@pytest.mark.parametrize(
    ("specials", "text"),
    [((AddedToken("a b"),), "a b"), ((AddedToken("<a>", rstrip=True),), "<a> b"), ((AddedToken("é b"),), "é b")],
)
def test_text_is_not_cut_where_an_added_token_may_reach_over(specials: tuple[AddedToken, ...], text: str) -> None:
    """Or takes the white space behind it."""
    made = words(*specials)
    made.pre_tokenizer = pre_tokenizers.Split(Regex(LLAMA3), "isolated")

    assert cuts(boundaries(made), text) == []
    assert cuts(boundaries(made), "b b") == [1]
