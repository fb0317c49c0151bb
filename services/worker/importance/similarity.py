"""How alike sets of important tokens are, and how alike they would be by chance (IMPRESS 4.2, 4.3)."""

from __future__ import annotations

import torch

ALPHA = 0.6
"""IMPRESS 4.3: the threshold is the similarity expected by chance to this power."""


def jaccard(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return ``|A & B| / |A | B|`` of two sets given as int64 vectors without repeats; 1 if both are empty."""
    common = int(torch.isin(one, other).sum())
    united = len(one) + len(other) - common
    return common / united if united else 1.0


def mean_similarity(sets: torch.Tensor) -> float:
    """Return the mean over all pairs of rows of ``sets``, int64 ``[units, k]``; 1 if there is no pair (IMPRESS 4.3)."""
    pairs = [(one, other) for one in range(len(sets)) for other in range(one)]
    return sum(jaccard(sets[one], sets[other]) for one, other in pairs) / len(pairs) if pairs else 1.0


def expected_jaccard(chosen: int, tokens: int) -> float:
    """Return the similarity j of two random choices of ``chosen`` out of ``tokens`` (IMPRESS 4.3).

    A token is in both with probability ``(k/n)^2``, so they share ``k^2/n`` tokens on average and unite
    ``2k - k^2/n``; j is the quotient of these, ``(k/n) / (2 - k/n)``. That is the paper's value: a quotient of
    expectations, not the expectation of the quotient, from which it differs by a term of order ``1/n``.
    """
    if tokens == 0 or chosen == 0:
        return 0.0
    share = chosen / tokens
    return share / (2 - share)


def similarity_threshold(chosen: int, tokens: int, alpha: float = ALPHA) -> float:
    """``j ** alpha``: probe heads must agree by more than this for one set to serve all heads (IMPRESS 4.3)."""
    return float(expected_jaccard(chosen, tokens) ** alpha)
