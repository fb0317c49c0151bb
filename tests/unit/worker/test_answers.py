"""An answer ends where it must, and is the same whether or not it was interrupted."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.answers import Answer
from services.worker.detokenizer import Vocabulary
from shared.messages.requests import SamplingParams
from tests.present import present
from tests.unit.worker.vocabularies import build

KINDS = ("byte_level", "llama_sentencepiece", "gemma_sentencepiece", "metaspace")


@cache
def vocabulary_of(kind: str) -> Vocabulary:
    return Vocabulary(build(kind))


@cache
def number_of(piece: str) -> int:
    return present(build("byte_level").token_to_id(piece))


def make_answer(params: SamplingParams, kind: str = "byte_level", *, max_context: int = 1000) -> Answer:
    stream = vocabulary_of(kind).stream(skip_special_tokens=params.skip_special_tokens)
    return Answer(params, prompt_tokens=10, max_context=max_context, eos_token_ids=(number_of("</s>"),), stream=stream)


def grow_all(answer: Answer, tokens: list[int]) -> tuple[str, list[str]]:
    """Feed until the end; returns all text and the text of each token."""
    texts = []
    for token in tokens:
        growth = answer.grow(token)
        texts.append(growth.text)
        if growth.finish is not None:
            break
    return "".join(texts), texts


def tokens_of(*pieces: str) -> list[int]:
    return [number_of(piece) for piece in pieces]


@settings(max_examples=200)
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.lists(st.integers(0, 17), min_size=1, max_size=20),
    cut=st.integers(0, 19),
    stop=st.lists(st.sampled_from(["b", "aé", "hello", " a b", "你", "STOP", "hi"]), max_size=2),
    min_tokens=st.integers(0, 5),
    include_stop=st.booleans(),
)
def test_a_resumed_answer_continues_as_if_never_interrupted(
    kind: str, tokens: list[int], cut: int, stop: list[str], min_tokens: int, include_stop: bool
) -> None:
    """Cut anywhere: replaying the first tokens gives the same texts again, and so do the others and the end."""
    params = SamplingParams(max_tokens=len(tokens), stop=tuple(stop), min_tokens=min_tokens, include_stop=include_stop)
    whole = make_answer(params, kind)
    growths = []
    for token in tokens:
        growths.append(whole.grow(token))
        if growths[-1].finish is not None:
            break
    cut = min(cut, len(growths) - 1)
    resumed = make_answer(params, kind)

    assert resumed.replay(tokens[:cut]) == growths[:cut]
    assert [resumed.grow(token) for token in tokens[cut : len(growths)]] == growths[cut:]
    assert (resumed.finish, resumed.tokens) == (whole.finish, whole.tokens)


def test_the_end_token_is_kept_and_its_text_is_not_shown() -> None:
    """Output tokens include the end token; nothing of it is text, even where special tokens are shown."""
    answer = make_answer(SamplingParams(max_tokens=9, skip_special_tokens=False))

    text, _ = grow_all(answer, tokens_of("hello", "</s>"))

    assert text == "hello"
    assert answer.tokens == tokens_of("hello", "</s>")
    assert answer.finish == "stop"


def test_include_stop_shows_the_text_of_the_stop_token() -> None:
    """As it does for stop strings."""
    params = SamplingParams(max_tokens=9, include_stop=True, stop_token_ids=(number_of("b"),))
    answer = make_answer(params)

    growth = [answer.grow(token) for token in tokens_of("hello", "b")][-1]

    assert (growth.text, growth.finish, growth.stop_match) == ("b", "stop", number_of("b"))


def test_a_stop_string_may_span_tokens() -> None:
    """Its beginning is withheld, the text is cut before it, and the match is reported."""
    answer = make_answer(SamplingParams(max_tokens=9, stop=("STOP",)))
    growths = [answer.grow(token) for token in tokens_of("hello", "ST", "OP")]

    assert [growth.text for growth in growths] == ["hello", "", ""]
    assert (growths[-1].finish, growths[-1].stop_match) == ("stop", "STOP")


def test_max_tokens_ends_an_answer_and_shows_what_was_withheld() -> None:
    """Half a stop string and half a character come out in the end."""
    answer = make_answer(SamplingParams(max_tokens=2, stop=("STOP",)))

    text, texts = grow_all(answer, tokens_of("ST", "ä"))

    assert texts == ["", "ST\ufffd"]
    assert text == "ST\ufffd"
    assert answer.finish == "length"


def test_the_context_ends_an_answer() -> None:
    """Ten prompt tokens leave a context of twelve two."""
    answer = make_answer(SamplingParams(max_tokens=100), max_context=12)

    grow_all(answer, tokens_of("b", "b", "b"))

    assert answer.finish == "length"
    assert len(answer.tokens) == 2


def test_a_prompt_that_fills_the_context_gets_one_token() -> None:
    """Its last position predicts one."""
    answer = make_answer(SamplingParams(max_tokens=100), max_context=10)

    assert answer.grow(number_of("b")).finish == "length"


def test_an_ended_answer_is_recognised_when_replayed() -> None:
    """A worker that died between its last token and its report leaves such an answer behind."""
    answer = make_answer(SamplingParams(max_tokens=9))

    growths = answer.replay(tokens_of("hello", "</s>"))

    assert [growth.finish for growth in growths] == [None, "stop"]


def test_an_abort_shows_what_was_withheld() -> None:
    """The caller gets the text up to the last token."""
    answer = make_answer(SamplingParams(max_tokens=9, stop=("STOP",)))
    answer.grow(number_of("ST"))

    assert answer.end("cancelled") == "ST"
    assert answer.finish == "cancelled"
