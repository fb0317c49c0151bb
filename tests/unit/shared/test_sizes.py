"""Sizes for people (shared/sizes.py)."""

from __future__ import annotations

import pytest

from shared.sizes import size


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**41, "2.0 TiB"), (2**51, "2048.0 TiB")],
)
def test_sizes_are_readable(nbytes: int, words: str) -> None:
    """One decimal of the largest unit that fits."""
    assert size(nbytes) == words
