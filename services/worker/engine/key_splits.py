"""How the decode kernel cuts the keys of a row. Arithmetic only, for those that import no Triton."""

from __future__ import annotations

SPLIT_KEYS = 512
"""Keys of one split of a decode row, as long as there are few splits."""

MAX_SPLITS = 32


def keys_per_split(visible: int) -> int:
    """Return the keys of one split of a row that sees ``visible`` keys; at most MAX_SPLITS are needed."""
    return SPLIT_KEYS * -(-visible // (SPLIT_KEYS * MAX_SPLITS))


def splits_for(max_visible: int) -> int:
    """Return the splits of the longest decode row, which sees ``max_visible`` keys."""
    return max(1, min(MAX_SPLITS, -(-max_visible // SPLIT_KEYS)))
