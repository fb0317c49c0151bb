"""Prompts named by blocks of few tokens, so that short prompts have some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared import prompt_chain
from shared.ids import TOKEN_BYTES


@contextmanager
def small_blocks(tokens: int) -> Iterator[None]:
    """Within this block, ``shared.prompt_chain`` names blocks of so many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_chain, "BLOCK_TOKENS", tokens)
        patch.setattr(prompt_chain, "BLOCK_BYTES", tokens * TOKEN_BYTES)
        yield
