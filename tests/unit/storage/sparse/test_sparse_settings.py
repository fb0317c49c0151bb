"""Settings of sparse copies."""

from __future__ import annotations

import pytest

from services.storage.config import StorageConfig


def test_a_storage_keeps_no_copies_unless_told() -> None:
    """They take as much of a disk as the chunks themselves."""
    assert not StorageConfig().sparse


@pytest.mark.parametrize("tokens", [0, 1, 2, 64])
def test_blocks_may_have_any_power_of_two_of_tokens(tokens: int) -> None:
    """All of these divide every chunk; 0 leaves it to the rule."""
    assert StorageConfig(sparse_block_tokens=tokens).sparse_block_tokens == tokens


def test_other_blocks_are_refused() -> None:
    """With a message that names the flag."""
    with pytest.raises(ValueError, match="--sparse-block-tokens 48 is not a power of two"):
        StorageConfig(sparse_block_tokens=48)
