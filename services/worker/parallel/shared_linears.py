"""Modules that take the place of those whose input or output is divided among ranks."""

from __future__ import annotations

from typing import Any

import torch

from services.worker.parallel.collectives import Collectives


class SummedModule(torch.nn.Module):
    """A linear layer that has some of its input columns, or the experts of a layer that have some of theirs: what the
    ranks compute adds up to its output.
    """

    def __init__(self, inner: torch.nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.inner, self._collectives = inner, collectives

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._collectives.sum(self.inner(*inputs))


class JoinedHead(torch.nn.Module):
    """A head that has some rows of the vocabulary: what the ranks compute is joined to all logits."""

    def __init__(self, inner: torch.nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.inner, self._collectives = inner, collectives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._collectives.concatenate(self.inner(x))


class AbsentHead(torch.nn.Module):
    """The head of a rank whose logits are not used: rank 0 has all of it, because it is tied to its embeddings."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], 0)


def replace_module(model: Any, name: str, made: torch.nn.Module) -> None:
    """Put ``made`` where ``model`` has the submodule called ``name``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, made)
