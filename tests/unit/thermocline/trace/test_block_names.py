"""Names of blocks: equal as far as prompts are equal, and of no use to those who want to know the text."""

from __future__ import annotations

import pytest

from thermocline.trace.block_names import BlockNames

NAMES = BlockNames(b"a salt of thirty-two bytes, fixed")


def test_names_are_equal_as_far_as_prompts_are() -> None:
    """A block that differs changes its own name and all that follow."""
    text = bytes(range(256)) * 24
    other = bytearray(text)
    other[2048 + 5] ^= 1

    _, one = NAMES.of("m", text, 4.0)
    _, two = NAMES.of("m", bytes(other), 4.0)

    assert len(one) == len(two) == 3
    assert one[0] == two[0]
    assert set(one[1:]).isdisjoint(two[1:])


def test_equal_blocks_at_other_places_have_other_names() -> None:
    """A name is of a prefix, not of a block alone."""
    _, names = NAMES.of("m", bytes(2048 * 3), 4.0)

    assert len(set(names)) == 3


@pytest.mark.parametrize(("salt", "model"), [(b"another salt of thirty-two bytes", "m"), (NAMES.salt, "n")])
def test_another_salt_or_model_shares_nothing(salt: bytes, model: str) -> None:
    """KV is of one model, and names of one salt can be compared with those of no other."""
    _, one = NAMES.of("m", b"x" * 5000, 4.0)
    _, two = BlockNames(salt).of(model, b"x" * 5000, 4.0)

    assert set(one).isdisjoint(two)


@pytest.mark.parametrize(
    ("size", "tokens", "blocks"), [(1, 1, 1), (4, 1, 1), (5, 2, 1), (2047, 512, 1), (2048, 512, 1), (2049, 513, 2)]
)
def test_lengths_agree_with_the_number_of_blocks(size: int, tokens: int, blocks: int) -> None:
    """A block for every 512 tokens begun."""
    length, names = NAMES.of("m", b"x" * size, 4.0)

    assert (length, len(names)) == (tokens, blocks)
    assert all(0 <= name < 2**53 for name in names)
