"""A worker keeps texts as it is told: what is referred to is put before the rest, or is missing."""

from __future__ import annotations

from typing import Any

import pytest

from shared.kept_texts import KeptTexts
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.requests import SamplingParams
from shared.messages.worker_plans import AdmitRequest, TextBase


def admission(tokens: range, pages: range, **told: Any) -> AdmitRequest:
    return AdmitRequest(
        request_id="r",
        attempt=1,
        gateway_id="g",
        tokens=pack_int32(tokens),
        prompt_tokens=1,
        sampling=SamplingParams(max_tokens=1),
        pages=pack_int32(pages),
        **told,
    )


def test_what_is_said_whole_is_kept_and_referred_to() -> None:
    """The first tokens and pages are those of the kept text, the rest is the order's own."""
    texts = KeptTexts()
    texts.take(admission(range(100), range(10, 20), text=7))

    whole = texts.take(admission(range(200, 203), range(50, 52), base=TextBase(text=7, tokens=90, pages=4)))

    assert whole is not None
    assert unpack_int32(whole.tokens) == [*range(90), 200, 201, 202]
    assert unpack_int32(whole.pages) == [10, 11, 12, 13, 50, 51]
    assert whole.base is None


def test_an_order_may_drop_what_it_refers_to() -> None:
    """A text that goes on takes the place of the one before; that is forgotten behind it."""
    texts = KeptTexts()
    texts.take(admission(range(100), range(10), text=1))

    told = {"base": TextBase(text=1, tokens=100, pages=10), "text": 2, "dropped": (1, 99)}
    whole = texts.take(admission(range(5), range(1), **told))

    assert whole is not None
    assert (len(texts), texts.tokens) == (1, 105)
    assert texts.take(admission(range(1), range(1), base=TextBase(text=1, tokens=1, pages=0))) is None
    again = texts.take(admission(range(1), range(1), base=TextBase(text=2, tokens=105, pages=11)))
    assert again is not None
    assert again.tokens == whole.tokens + pack_int32([0])


@pytest.mark.parametrize(
    "base",
    [
        TextBase(text=2, tokens=10, pages=1),
        TextBase(text=1, tokens=101, pages=1),
        TextBase(text=1, tokens=10, pages=11),
        TextBase(text=1, tokens=0, pages=0),
        TextBase(text=1, tokens=10, pages=-1),
    ],
)
def test_what_is_not_kept_is_missing(base: TextBase) -> None:
    """Another number, more tokens or pages than there are, or nonsense: nothing is made up, and nothing is kept."""
    texts = KeptTexts()
    texts.take(admission(range(100), range(10), text=1))

    assert texts.take(admission(range(1), range(1), base=base, text=3)) is None
    assert texts.take(admission(range(1), range(1), base=TextBase(text=3, tokens=1, pages=0))) is None
    assert len(texts) == 1


def test_an_order_that_keeps_nothing_leaves_nothing() -> None:
    """A prompt without a whole block is not referred to, and no memory is spent on it."""
    texts = KeptTexts()

    order = admission(range(100), range(10))

    assert texts.take(order) is order
    assert len(texts) == 0
