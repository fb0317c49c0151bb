"""Forward pre-hooks of attention modules, called in a forward that does not call the modules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from services.worker.engine.cache_argument import cache_argument
from shared.errors import InvariantViolated


def are_any(modules: Sequence[Any]) -> bool:
    """Return whether any of ``modules`` has a forward pre-hook."""
    return any(module._forward_pre_hooks for module in modules)


class Rotations(Protocol):
    """The rotary embedding of a model."""

    def embeddings(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines that attention modules get for ``positions``, int64 [T]."""


@functools.cache
def _cache_name(kind: type[Any]) -> str:
    """Return the name of the cache among the arguments of attention modules of this class, which every step needs."""
    return cache_argument(kind.forward)


class Hooks:
    """The hooks of one step, called with the arguments with which the model would call its modules."""

    def __init__(
        self,
        modules: Sequence[Any],
        normed: torch.Tensor,
        positions: torch.Tensor,
        rotations: Rotations,
    ) -> None:
        """``normed`` [T, hidden] holds the input of attention of a layer when its hooks are called."""
        self._modules, self._normed, self._positions = modules, normed, positions
        self._rotations = rotations
        self._kwargs: dict[str, Any] | None = None

    def call(self, layer: int) -> None:
        """Call the hooks of a layer. Raises InvariantViolated for one that returns changed arguments."""
        module = self._modules[layer]
        if not module._forward_pre_hooks:
            return
        if self._kwargs is None:
            kind: Any = type(module)
            self._kwargs = {
                "hidden_states": self._normed[None],
                "attention_mask": None,
                "position_ids": self._positions[None],
                "use_cache": False,
                "position_embeddings": self._rotations.embeddings(self._positions),
                _cache_name(kind): None,
            }
        for number, hook in list(module._forward_pre_hooks.items()):
            if number not in module._forward_pre_hooks_with_kwargs:
                raise InvariantViolated("hooks of attention modules must take keywords")
            if hook(module, (), self._kwargs) is not None:
                raise InvariantViolated("hooks of attention modules may look at what is computed, not change it")
