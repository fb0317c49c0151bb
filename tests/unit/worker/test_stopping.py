"""Stop strings are found however the text is cut, and nothing that may begin one is shown too early."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from services.worker.stopping import StopByToken, StopMatcher, stop_by_token
from shared.messages.requests import SamplingParams

letters = st.text(alphabet="abc", max_size=30)
stop_strings = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The naive model: look at every prefix; the longest stop string that ends the shortest one wins."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return end - len(longest), longest
    return None


@given(st.lists(letters, max_size=12), stop_strings, st.booleans())
@example(["ab", "c", "ab"], ["bca", "ab"], False)
def test_the_result_does_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: list[str], keep: bool) -> None:
    """Shown text and match equal those of the naive model on the whole text."""
    text = "".join(pieces)
    expected = first_match(text, stops)
    matcher = StopMatcher(stops, include_stop=keep)

    shown = "".join(matcher.feed(piece) for piece in pieces)
    shown += "" if matcher.matched else matcher.flush()

    if expected is None:
        assert (shown, matcher.matched) == (text, None)
    else:
        start, stop = expected
        assert (shown, matcher.matched) == (text[: start + len(stop)] if keep else text[:start], stop)


@given(letters, stop_strings)
def test_what_is_shown_is_never_taken_back(text: str, stops: list[str]) -> None:
    """After every character, what has been shown is a beginning of the final text, and no more is withheld than
    could begin a stop string.
    """
    matcher = StopMatcher(stops)
    shown = ""
    final = first_match(text, stops)
    visible = text if final is None else text[: final[0]]
    for count, character in enumerate(text, 1):
        shown += matcher.feed(character)
        if matcher.matched:
            break
        held = text[len(shown) : count]

        assert visible.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_below_min_tokens_is_not_examined() -> None:
    """Skipped text is shown whole, and a stop string that began in it does not count."""
    matcher = StopMatcher(["ab"])

    assert matcher.skip("a") == "a"
    assert matcher.feed("b") == "b"
    assert matcher.matched is None


def test_withheld_text_is_shown_before_skipped_text() -> None:
    """Order of the text is kept."""
    matcher = StopMatcher(["abc"])

    assert matcher.feed("ab") == ""
    assert matcher.skip("x") == "abx"


def test_end_of_text_and_stop_tokens_end_an_answer() -> None:
    """The model's own end has no match to report; a caller's stop token does."""
    params = SamplingParams(max_tokens=9, stop_token_ids=(7,))

    assert stop_by_token(params, (2,), 2, 0) == StopByToken(None)
    assert stop_by_token(params, (2,), 7, 0) == StopByToken(7)
    assert stop_by_token(params, (2,), 5, 0) is None


def test_ignore_eos_keeps_only_the_callers_stop_tokens() -> None:
    """The model's end is a token like any other then."""
    params = SamplingParams(max_tokens=9, stop_token_ids=(7,), ignore_eos=True)

    assert stop_by_token(params, (2,), 2, 0) is None
    assert stop_by_token(params, (2,), 7, 0) == StopByToken(7)


def test_min_tokens_holds_back_stop_tokens() -> None:
    """The first position that may stop is ``min_tokens``."""
    params = SamplingParams(max_tokens=9, min_tokens=3)

    assert [stop_by_token(params, (2,), 2, position) is not None for position in range(5)] == [
        False, False, False, True, True,
    ]  # fmt: skip
