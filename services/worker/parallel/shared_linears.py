"""Modules that replace those whose input or output is divided among ranks."""

from __future__ import annotations

from typing import Any

import torch

from services.worker.parallel.collectives import Collectives


class SummedModule(torch.nn.Module):
    """A linear layer with some of its input columns, or a layer's experts with some of theirs.

    The outputs of all ranks add up to its output.
    """

    def __init__(self, inner: torch.nn.Module, collectives: Collectives) -> None:
        """Wrap ``inner``, this rank's part; a bias that is not divided is in one rank's part alone."""
        super().__init__()
        self.inner, self._collectives = inner, collectives

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the sum of the inner module's outputs over all ranks. Raises TransportError."""
        return self._collectives.sum(self.inner(*inputs))


class JoinedHead(torch.nn.Module):
    """A head with some rows of the vocabulary: the outputs of all ranks are joined to all logits."""

    def __init__(self, inner: torch.nn.Module, collectives: Collectives) -> None:
        """Wrap ``inner``, this rank's rows; all ranks have equally many."""
        super().__init__()
        self.inner, self._collectives = inner, collectives
        # No numbers, which may be packed later: some models read the type that they convert hidden states to.
        self.weight = inner.get_parameter("weight").new_empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks side by side, in the order of the ranks. Raises TransportError."""
        return self._collectives.concatenate(self.inner(x))


class JoinedNorm(torch.nn.Module):
    """A norm over the heads of all ranks, between a projection and attention that each have a rank's own."""

    def __init__(self, inner: torch.nn.Module, collectives: Collectives, rank: int) -> None:
        """Wrap ``inner``, the whole norm. Ranks that share a KV head have the same input."""
        super().__init__()
        self.inner, self._collectives, self._rank = inner, collectives, rank
        self._width = next(inner.parameters()).shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, [..., n], of the norm of what all ranks have. Raises TransportError."""
        own, ranks = x.shape[-1], self._collectives.ranks
        copies = own * ranks // self._width
        of_ranks = self._collectives.concatenate(x).view(*x.shape[:-1], ranks, own)
        normed: torch.Tensor = self.inner(of_ranks[..., ::copies, :].flatten(-2))
        return normed.narrow(-1, self._rank // copies * own, own).contiguous()


class AbsentHead(torch.nn.Module):
    """The head of a rank whose logits are not used: rank 0 has all of it, because it is tied to its embeddings."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return no logits, [..., 0]."""
        return x.new_zeros(*x.shape[:-1], 0)


def replace_module(model: Any, name: str, made: torch.nn.Module) -> None:
    """Put ``made`` where ``model`` has the submodule called ``name``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, made)
