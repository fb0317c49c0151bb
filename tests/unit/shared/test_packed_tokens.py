"""Packed tokens are the sequence of ids that they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages.base import pack_int32
from shared.packed_tokens import PackedTokens

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(ids=IDS, start=st.integers(-25, 25), end=st.integers(-25, 25))
def test_packed_tokens_behave_as_their_list(ids: list[int], start: int, end: int) -> None:
    """In length, order, slices, equality and sum."""
    packed = PackedTokens.of(ids)

    assert (len(packed), list(packed), packed.tolist(), bool(packed)) == (len(ids), ids, ids, bool(ids))
    assert packed == ids
    assert ids == packed
    assert packed[start:end] == PackedTokens.of(ids[start:end])
    assert packed + ids == PackedTokens.joined([ids, packed]) == ids + ids
    assert packed != [*ids, 1]
    assert hash(packed) == hash(PackedTokens.of(ids))
    assert pack_int32(packed) == pack_int32(ids)
    if ids:
        assert (packed[-1], packed.bounds()) == (ids[-1], (min(ids), max(ids)))


def test_ids_are_integers_of_python() -> None:
    """JSON and the Rust tokenizer take no others."""
    packed = PackedTokens.of([1, 2])

    assert {type(each) for each in (packed[0], *packed, *packed.bounds())} == {int}
    with pytest.raises(IndexError):
        packed[2]
