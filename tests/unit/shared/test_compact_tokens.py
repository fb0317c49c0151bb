"""Tokens in compact form are the same tokens, in about half of the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.compact_tokens import compacted, count_compact, expanded
from shared.errors import CodecError
from shared.messages.base import pack_int32

TOKENS = st.lists(
    st.one_of(st.integers(0, 2**14), st.integers(0, 2**18), st.integers(-(2**31), 2**31 - 1)), max_size=70
)


@given(TOKENS)
def test_every_token_comes_back(tokens: list[int]) -> None:
    """Of any number, also of such as no vocabulary has, and the form says how many there are."""
    packed = pack_int32(tokens)

    compact = compacted(packed)

    assert expanded(compact) == packed
    assert count_compact(compact) == len(tokens)


@pytest.mark.parametrize(("vocabulary", "eighths"), [(2**16, 16), (128_256, 17), (151_936, 18), (262_144, 18)])
def test_a_token_takes_the_bits_of_its_vocabulary(vocabulary: int, eighths: int) -> None:
    """Two bytes, and an eighth of a byte for each bit above sixteen."""
    tokens = [number * 7919 % vocabulary for number in range(4_096)]

    assert len(compacted(pack_int32([*tokens, vocabulary - 1]))) <= 5 + eighths * 4_097 // 8 + 2


def test_the_bytes_are_these() -> None:
    """They are in recordings, so they stay what they are."""
    assert compacted(pack_int32([1, 0x20003, 0x10002])).hex() == "03000000020100030002000402"
    assert compacted(pack_int32([1, 2])).hex() == "020000000001000200"
    assert compacted(pack_int32([-1, 0x1000000])).hex() == "0200000010ffff0000" + 8 * "01" + "03" + 7 * "01"


def test_bits_behind_the_last_token_do_not_count() -> None:
    """A plane ends with a whole byte."""
    compact = compacted(pack_int32([1, 0x20003, 0x10002]))

    assert expanded(compact[:-1] + bytes([compact[-1] | 0xF8])) == pack_int32([1, 0x20003, 0x10002])


@given(st.binary(max_size=40))
def test_other_bytes_are_refused(data: bytes) -> None:
    """Whatever is read as tokens has the length that it says."""
    try:
        packed = expanded(data)
    except CodecError:
        return
    assert len(packed) == 4 * count_compact(data)
    assert len(data) >= 5 + 2 * count_compact(data)


@pytest.mark.parametrize("data", [b"", b"\1\0\0\0", b"\1\0\0\0\0\7", b"\xff\xff\xff\xff\0", b"\0\0\0\0\x11"])
def test_what_is_cut_off_is_refused(data: bytes) -> None:
    """No memory is taken for a number that is not there."""
    with pytest.raises(CodecError):
        expanded(data)
