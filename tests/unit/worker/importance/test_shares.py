"""What share of each chunk was chosen."""

from __future__ import annotations

import torch

from services.worker.importance.shares import chunk_shares


def test_shares_are_averaged_over_layers_and_heads() -> None:
    """Of the first chunk one layer takes all four tokens and the other none; of the second each head takes its own."""
    layers = [torch.tensor([[8, 9, 10, 11]]), torch.tensor([[12, 13], [13, 14]])]

    assert list(chunk_shares(layers, 8, 16, 8, 4)) == [round(255 / 2), round(255 / 4)]


def test_a_chunk_that_lies_partly_before_counts_its_other_tokens() -> None:
    """One token of four is in the prefix; all of it was chosen."""
    assert list(chunk_shares([torch.tensor([[11, 14]])], 11, 16, 8, 4)) == [255, round(255 / 4)]


def test_layers_that_see_nothing_count_too() -> None:
    """Behind a window a layer chooses nothing."""
    assert list(chunk_shares([torch.empty(1, 0, dtype=torch.int64), torch.arange(4)[None]], 0, 4, 0, 4)) == [128]
