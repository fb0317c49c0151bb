"""What is asked and when: arrivals, workloads, prompts."""

from __future__ import annotations

import itertools
import statistics

import pytest

from shared.errors import ConfigError
from thermocline.load.arrivals import arrival_times
from thermocline.load.prompts import WORDS, PromptMaker, Said
from thermocline.load.workloads import WORKLOADS, make_workload
from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, Asked, name

VOCABULARY = range(8, 300)


def maker(seed: int = 1, *, words_per_token: float = 1.0, length_scale: float = 1.0) -> PromptMaker:
    return PromptMaker(seed, vocabulary=VOCABULARY, words_per_token=words_per_token, length_scale=length_scale)


def taken(workload: str, count: int, *settings: str, seed: int = 1) -> list[Asked]:
    return list(itertools.islice(make_workload(workload, settings, seed).requests(), count))


def test_constant_arrivals_are_evenly_spaced() -> None:
    """From the very start."""
    assert list(itertools.islice(arrival_times("constant", 4.0, 1), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    """Gaps are exponential: their deviation is their mean. The same seed gives the same."""
    times = list(itertools.islice(arrival_times("poisson", 5.0, 1), 20_000))
    gaps = [late - early for early, late in itertools.pairwise(times)]

    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.03)
    assert times == list(itertools.islice(arrival_times("poisson", 5.0, 1), 20_000))
    assert times[:5] != list(itertools.islice(arrival_times("poisson", 5.0, 2), 5))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_asks_the_same_again(workload: str) -> None:
    """Given its seed, and not given another; each request has a prompt and an answer."""
    asked = taken(workload, 20)

    assert asked == taken(workload, 20)
    assert all(one.prompt_tokens > 0 and one.answer.tokens > 0 for one in asked)


def test_unshared_prompts_share_nothing() -> None:
    """No span of one is a span of another."""
    names = [span.name for one in taken("unshared", 100) for span in one.spans]

    assert len(names) == len(set(names))


def test_a_burst_comes_at_once_on_one_document() -> None:
    """And the next, on another, a pause later."""
    asked = taken("burst", 6, "size=3", "pause_s=7", "document_tokens=50")

    assert [one.time_s for one in asked] == [0.0, 0.0, 0.0, 7.0, 7.0, 7.0]
    assert [one.spans[0] for one in asked[:4]] == [Span(name(SHARED, 0), 50)] * 3 + [Span(name(SHARED, 1), 50)]
    assert len({one.spans[1].name for one in asked}) == 6


def test_every_fault_of_the_options_is_named() -> None:
    """Unknown ones, those that are no assignment, and values out of bounds."""
    with pytest.raises(ConfigError, match=r"size=0.*sizes=3.*pause_s=nan.*alone"):
        make_workload("burst", ["size=0", "sizes=3", "pause_s=nan", "alone"], 1)
    with pytest.raises(ConfigError, match="known are few-shot"):
        make_workload("bursts", [], 1)


def test_a_span_is_its_name_and_the_seed() -> None:
    """Equal names give equal tokens, a longer span begins with the shorter, and another seed shares nothing."""
    prompt = maker().tokens([Span(6, 40), Span(9, 5)], {})

    assert len(prompt) == 45
    assert prompt[:20] == maker().tokens([Span(6, 20)], {})
    assert prompt[40:] == maker().tokens([Span(9, 5)], {})
    assert prompt[:20] != maker(2).tokens([Span(6, 20)], {})
    assert set(prompt) <= set(VOCABULARY)


def test_tokens_are_the_same_on_every_machine() -> None:
    """Results of different machines are of the same prompts."""
    assert maker().tokens([Span(6, 6)], {}) == [244, 266, 283, 47, 244, 22]


def test_lengths_are_divided() -> None:
    """Of spans, never below one token."""
    assert len(maker(length_scale=10).tokens([Span(6, 40), Span(9, 5)], {})) == 5


def test_a_text_has_as_many_words_as_make_its_tokens() -> None:
    """By what the server counts as a token."""
    text = maker(words_per_token=0.5).text([Span(6, 40), Span(9, 10)], {})

    assert len(text.split()) == 25
    assert set(text.split()) <= set(WORDS)


def test_what_was_said_takes_the_place_of_its_span() -> None:
    """As token ids, and as text."""
    answer = name(OUTPUT, 4)
    said = {answer: Said([1, 2, 3], "truly so")}
    spans = [Span(6, 2), Span(answer, 100), Span(9, 1)]

    assert maker().tokens(spans, said)[2:5] == [1, 2, 3]
    assert "truly so" in maker().text(spans, said)
    assert len(maker().tokens(spans, said)) == 6


def test_a_chat_has_turns() -> None:
    """What was answered is the assistant's, and all that stands together is one message."""
    answer = name(OUTPUT, 0)
    spans = [Span(name(SHARED, 0), 3), Span(name(QUESTION, 0), 2), Span(answer, 9), Span(name(QUESTION, 1), 2)]

    messages = maker().messages(spans, {answer: Said([], "so")})

    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [len(message["content"].split()) for message in messages] == [5, 1, 2]
