"""The size of a page where layers carry states, and how many tokens to put into it.

A page of S tokens takes ``S * k + s`` bytes; k are K and V (or latents) of one token in all layers that attend and s
the states of all that carry one, once. So small pages cost much, a token ``k + s / S`` bytes; large ones are reused
less, because a prefix is reused in whole pages. By default, a page has as many tokens as make K and V the larger half,
in bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.engine.states.layers import StateModule
from services.worker.kv.planes import HeadsKept, Kept, LatentsKept, NothingKept, RowsKept, StateKept
from shared.messages.pools import DTYPE_BYTES

PAGE_TOKENS = 16
"""Tokens of a page of a model without states."""

MOST_PAGE_TOKENS = 256
"""Upper bound for pages of models with states: half of the smallest batch of a prefill."""


def with_states(kept: Sequence[Kept], states: Sequence[StateModule]) -> list[Kept]:
    """Return the entries of a plane map: the layers of ``kept`` and, in their entries, the modules with states."""
    found: list[Kept] = [*kept, *[NothingKept()] * sum(module.entry >= len(kept) for module in states)]
    for module in states:
        found[module.entry] = StateKept(module.nbytes)
    return found


def page_size_for(kept: Sequence[Kept], dtype: str) -> int:
    """Return the tokens of a page: a power of two, PAGE_TOKENS where no layer carries a state."""
    once_bytes = sum(each.nbytes for each in kept if isinstance(each, StateKept))
    of_tokens = HeadsKept | LatentsKept | RowsKept
    token_bytes = DTYPE_BYTES[dtype] * sum(each.values for each in kept if isinstance(each, of_tokens))
    size = PAGE_TOKENS
    while size < MOST_PAGE_TOKENS and size * token_bytes < once_bytes:
        size *= 2
    return size
