"""Digests of prefixes: a polynomial of all tokens, however it is put together."""

import numpy as np
import pytest

from services.scheduler.core.cache.digests import extend, root_digest

BASE, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def by_definition(digest: int, tokens: list[int]) -> int:
    """Token after token, each counting as one more than its number."""
    for token in tokens:
        digest = (digest * BASE + token + 1) & MASK
    return digest


@pytest.mark.parametrize("count", [0, 1, 16, 63, 64, 65, 200, 4096, 4100, 9000])
def test_a_digest_is_the_polynomial_whatever_the_length(count: int) -> None:
    """Spans of up to 64 tokens and long ones have ways of their own."""
    tokens = np.random.default_rng(count).integers(0, 2**31, count, dtype=np.int32)

    assert extend(root_digest("ab"), tokens.tobytes()) == by_definition(root_digest("ab"), tokens.tolist())


def test_where_a_prefix_is_cut_makes_no_difference() -> None:
    """A node's digest goes on from its parent's."""
    tokens = np.arange(100, dtype=np.int32).tobytes()

    assert extend(extend(7, tokens[: 16 * 4]), tokens[16 * 4 :]) == extend(7, tokens)
