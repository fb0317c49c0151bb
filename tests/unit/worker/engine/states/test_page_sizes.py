"""How many tokens make a page where nobody chose: enough that states are the smaller half, in bounds."""

from __future__ import annotations

import pytest

from services.worker.engine.states.page_sizes import MOST_PAGE_TOKENS, PAGE_TOKENS, page_size_for
from services.worker.kv.planes import HeadsKept, Kept, LatentsKept, NothingKept, StateKept

_HEADS = HeadsKept(2, 16, 16)  # 256 bytes a token in float32.


@pytest.mark.parametrize(
    ("kept", "size"),
    [
        ([_HEADS, _HEADS], PAGE_TOKENS),
        ([_HEADS, StateKept(16 * 256)], 16),
        ([_HEADS, StateKept(16 * 256 + 1)], 32),
        ([_HEADS, NothingKept(), StateKept(20 * 256), StateKept(30 * 256)], 64),
        ([LatentsKept(24, 8), StateKept(100 * 128)], 128),
        ([StateKept(1)], MOST_PAGE_TOKENS),
    ],
)
def test_states_are_the_smaller_half_of_a_page(kept: list[Kept], size: int) -> None:
    """A power of two; a model without K and V has the largest pages."""
    assert page_size_for(kept, "float32") == size


def test_no_page_is_larger_than_the_bound() -> None:
    """Prefixes are reused in whole pages, so a page must not be most of a prompt."""
    assert page_size_for([_HEADS, StateKept(2**30)], "bfloat16") == MOST_PAGE_TOKENS
