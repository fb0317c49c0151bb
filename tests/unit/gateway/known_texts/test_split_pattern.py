"""A pattern that is said to split between two characters does, in every text, as the tokenizers' library matches it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from services.gateway.known_texts.character_classes import LETTERS, UnprovablePattern
from services.gateway.known_texts.split_pattern import GPT2, SplitPattern
from tests.fuzz.text_tokenizers import LLAMA3, O200K, QWEN2

ALPHABET = "aB1. \n"

_CLASSES = st.sampled_from(
    [
        "a",
        "B",
        r"\.",
        " ",
        r"\n",
        r"\s",
        r"\S",
        r"\p{L}",
        r"\P{L}",
        r"\p{Lu}",
        r"\p{N}",
        r"\w",
        r"\D",
        "[^a ]",
        r"[^\s\p{L}]",
        "[A-Z1]",
    ]
)
_QUANTIFIERS = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{1,3}", "{0,2}", "?+", "*+", "++"])


def _quantified(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(str.__add__, inner, _QUANTIFIERS)


_GROUPS = st.builds(
    lambda opening, parts: f"({opening}{'|'.join(parts)})",
    st.sampled_from(["?:", "?i:", ""]),
    st.lists(st.lists(_quantified(_CLASSES), min_size=1, max_size=3).map("".join), min_size=1, max_size=2),
)
_SEQUENCES = st.lists(_quantified(_CLASSES | _GROUPS), min_size=1, max_size=4).map("".join)
_ALTERNATIVES = st.builds(
    str.__add__, _SEQUENCES, st.sampled_from(["", "", "", r"(?!\S)", "(?! )", r"(?=\s)", "(?=a)"])
)
PATTERNS = st.lists(_ALTERNATIVES, min_size=1, max_size=4).map("|".join)


def pieces(pattern: str, text: str) -> list[str]:
    """What a text is split into, and nothing for a text of nothing."""
    step = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [piece for piece, _ in step.pre_tokenize_str(text)] if text else []


@given(
    pattern=PATTERNS,
    before=st.sampled_from("aB1."),
    behind=st.sampled_from(" \n."),
    front=st.text(ALPHABET, max_size=12),
    back=st.text(ALPHABET, max_size=12),
)
def test_what_is_proven_of_a_pattern_holds(pattern: str, before: str, behind: str, front: str, back: str) -> None:
    """Matches of the whole are those of the parts; where no character is skipped, so are the pieces."""
    try:
        proven = SplitPattern(pattern)
    except UnprovablePattern:
        return
    if not proven.never_joins(before, behind):
        return
    one, two = front + before, behind + back

    whole, apart = pieces(pattern, one + two), pieces(pattern, one) + pieces(pattern, two)

    if proven.never_skips(before) or proven.never_skips(behind):
        assert whole == apart
    else:  # A piece that nothing matched may go over the place.
        assert len(apart) - 1 <= len(whole) <= len(apart)


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, QWEN2, O200K])
def test_published_patterns_split_words_from_white_space(pattern: str) -> None:
    """Behind letters of any script, behind digits, and in front of Chinese punctuation."""
    proven = SplitPattern(pattern)

    for before in ("a", "Z", "7", LETTERS):
        for behind in (" ", "\n", "。", "，"):
            assert proven.never_joins(before, behind), (before, behind)
            assert proven.never_skips(behind)


@pytest.mark.parametrize(
    ("pattern", "before", "behind"),
    [
        (GPT2, " ", " "),
        (GPT2, "!", "。"),
        (GPT2, "'", "s"),
        (GPT2, " ", "a"),
        (LLAMA3, "!", "\n"),
        (LLAMA3, "\n", "\n"),
        (LLAMA3, " ", "\n"),
        (LLAMA3, "。", "a"),
        (O200K, "a", "'"),
        (O200K, LETTERS, "'"),
        (O200K, "/", "\n"),
        (r"(?i:a )|\S|\s", "A", " "),
    ],
)
def test_places_that_a_later_text_can_move_are_not_proven(pattern: str, before: str, behind: str) -> None:
    """Some match takes both characters, or looks ahead between them."""
    assert not SplitPattern(pattern).never_joins(before, behind)


def test_an_assertion_that_sees_the_next_character_proves_nothing() -> None:
    """Only where the end of the text answers it in the same way."""
    assert not SplitPattern(r"a+(?!\s)|a").never_joins("a", " ")
    assert SplitPattern(r"a+(?!\S)|a").never_joins("a", " ")
    assert not SplitPattern(r"a+(?=\s)|a").never_joins("a", " ")


def test_a_quantifier_that_asks_for_more_leaves_single_characters_out() -> None:
    """And one that gives nothing back may fail where another would match."""
    assert not SplitPattern(r"a{2,}").never_skips("a")
    assert not SplitPattern(r"a?+a").never_skips("a")
    assert not SplitPattern(r"a(?!b)").never_skips("a")
    assert SplitPattern(r" ?a{1,3}").never_skips("a")


@pytest.mark.parametrize(
    "pattern",
    [r"\s+$", r"^a", r"\ba", r"(?<=a)b", r"(?<!a)b", r"a*", r"[[:alpha:]]", r"[a&&b]", r"\p{Han}+", r"a(?!b)c",
     r"(a)\1", r".", r"(?>a)", r"\X", "[b-a]", "[", "(a", "a)", r"a(?!bc)", "[]", r"\p{L", "\\", "x|"],
)  # fmt: skip
def test_what_is_not_understood_is_refused(pattern: str) -> None:
    """Nothing is proven of it."""
    with pytest.raises(UnprovablePattern):
        SplitPattern(pattern)
