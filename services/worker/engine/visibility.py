"""The keys that a row sees: those up to its own, of a sliding window or of its own chunk only. Pure arithmetic.

A window w lets the row at position i see keys ``i - w < j <= i``; a chunk c those of ``i // c * c <= j <= i`` (Llama
4's local layers). A layer has at most one of them; None is no such bound.
"""

from __future__ import annotations


def first_visible(position: int, window: int | None, chunk: int | None) -> int:
    """Return the first key that the row at ``position`` sees."""
    if chunk is not None:
        return position - position % chunk
    return 0 if window is None else max(0, position - window + 1)


def most_visible(length: int, window: int | None, chunk: int | None) -> int:
    """Return the largest number of keys that a row of a request of ``length`` tokens sees."""
    return min([length, *(bound for bound in (window, chunk) if bound is not None)])
