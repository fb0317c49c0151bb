"""Similarity of sets, and what chance would give."""

from __future__ import annotations

from math import comb

import pytest
import torch

from services.worker.importance.similarity import expected_jaccard, jaccard, mean_similarity, similarity_threshold


def test_jaccard_is_the_papers_example() -> None:
    """IMPRESS Figure 7: {0, 2} and {0, 1} share one of three."""
    assert jaccard(torch.tensor([0, 2]), torch.tensor([0, 1])) == pytest.approx(1 / 3)


def test_empty_sets_are_alike() -> None:
    """Nothing differs in nothing."""
    assert jaccard(torch.tensor([]), torch.tensor([])) == 1.0


def test_similarity_is_the_mean_over_pairs_in_any_order() -> None:
    """Three probe heads have three pairs, and which is first does not matter."""
    sets = torch.tensor([[0, 1], [0, 2], [5, 6]])

    assert mean_similarity(sets) == pytest.approx((1 / 3 + 0 + 0) / 3)
    assert mean_similarity(sets.flip(0)) == mean_similarity(sets)


def test_a_single_probe_head_agrees_with_itself() -> None:
    """There is no pair to compare."""
    assert mean_similarity(torch.tensor([[3, 4]])) == 1.0


@pytest.mark.parametrize(("chosen", "tokens"), [(1, 4), (10, 100), (25, 100), (256, 1024), (60, 64)])
def test_expected_jaccard_is_close_to_the_exact_expectation(chosen: int, tokens: int) -> None:
    """The quotient of expectations is within 1/n of the expectation of the quotient (hypergeometric overlap)."""
    exact = sum(
        comb(chosen, common) * comb(tokens - chosen, chosen - common) / comb(tokens, chosen) * common
        / (2 * chosen - common)
        for common in range(chosen + 1)
        if chosen - common <= tokens - chosen
    )  # fmt: skip

    assert expected_jaccard(chosen, tokens) == pytest.approx(exact, abs=1 / tokens)


def test_threshold_lies_between_chance_and_identity() -> None:
    """At 25%, chance gives 1/7, and the threshold is its 0.6th power."""
    assert expected_jaccard(25, 100) == pytest.approx(1 / 7)
    assert similarity_threshold(25, 100) == pytest.approx((1 / 7) ** 0.6)
    assert similarity_threshold(100, 100) == 1.0
    assert similarity_threshold(25, 100, alpha=0.0) == 1.0
