"""Layers as methods of selection see them, with weights made up or drawn."""

from __future__ import annotations

import torch

from services.worker.evaluation.selection import LayerView


def view_of(weights: list[torch.Tensor], *, kv_heads: int | None = None, layer: int = 0, first: int = 0) -> LayerView:
    """A view of questions, numbered from ``first``, with these weights ``[query_heads, rows, tokens]``."""
    heads, _, tokens = weights[0].shape
    numbers = tuple(range(first, first + len(weights)))
    return LayerView(layer, (0, tokens), (heads, kv_heads or heads), numbers, lambda is_rounded: weights)


def random_view(questions: int, *, heads: int = 4, tokens: int = 40, layer: int = 0, seed: int = 0) -> LayerView:
    """Rows of softmax over random scores."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.rand(heads, 3, tokens, generator=generator).softmax(dim=-1) for _ in range(questions)]
    return view_of(weights, layer=layer)


def attending_to(*wanted: list[int], tokens: int = 20) -> torch.Tensor:
    """Weights of one question of one row: each head attends to its own list of tokens, first ones most."""
    weights = torch.zeros(len(wanted), 1, tokens)
    for head, places in enumerate(wanted):
        for rank, place in enumerate(places):
            weights[head, 0, place] = 1.0 / (rank + 2)
    return weights
