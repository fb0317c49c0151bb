"""A request's tokens behave as a list does, however they are stored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.token_sequence import TokenSequence

some_ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)
bounds = st.integers(-20, 30)


@given(some_ids, some_ids, bounds, bounds)
def test_slices_are_those_of_a_list(known: list[int], sampled: list[int], start: int, stop: int) -> None:
    """Before, behind and across the end of what was known."""
    tokens = TokenSequence(np.array(known, dtype=np.int32))
    for token in sampled:
        tokens.append(token)

    whole = known + sampled
    assert tokens[start:stop] == whole[start:stop]
    assert (len(tokens), list(tokens)) == (len(whole), whole)
    assert [tokens[place] for place in range(-len(whole), len(whole))] == whole + whole


def test_what_is_not_there_has_no_token() -> None:
    """Nor is every second token worth a way to ask for it."""
    tokens = TokenSequence(range(3))

    with pytest.raises(IndexError):
        tokens[3]
    with pytest.raises(ValueError, match="one by one"):
        tokens[::2]
