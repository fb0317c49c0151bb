"""Token ids of simulated prompts."""

from __future__ import annotations

import numpy as np

from thermocline.simulate.tokens import Span, TokenMaker, span_tokens


def test_a_span_is_a_prefix_of_any_longer_one_of_its_name() -> None:
    """Equal names share a prefix exactly as long as the shorter span."""
    assert span_tokens(Span(7, 1000)).startswith(span_tokens(Span(7, 37)))


def test_spans_of_different_names_differ_from_the_first_token() -> None:
    """No two of many thousand names begin alike, so that no prefix is shared by accident."""
    first = {span_tokens(Span(name, 1)) for name in range(20_000)}

    assert len(first) == 20_000


def test_token_ids_fit_the_wire() -> None:
    """Ids are packed int32 and not negative, also for names of any size."""
    ids = np.frombuffer(span_tokens(Span(-(2**70) + 3, 5000)), dtype="<i4")

    assert len(ids) == 5000
    assert ids.min() >= 0


def test_prompts_are_spans_in_a_row_and_the_cache_is_bounded() -> None:
    """What is kept never exceeds its bound, and what was dropped is made again alike."""
    maker = TokenMaker(cache_bytes=4 * 4000)
    spans = [Span(name, 400) for name in range(50)]
    before = maker.prompt(spans)

    assert before == b"".join(span_tokens(span) for span in spans)
    assert maker.prompt(spans) == before
    assert 0 < maker._held <= 4 * 4000
