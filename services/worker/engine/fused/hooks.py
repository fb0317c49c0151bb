"""Forward pre-hooks of attention modules, called in a forward that does not call the modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shared.errors import InvariantViolated


def are_any(modules: Sequence[Any]) -> bool:
    """Whether any of ``modules`` has one."""
    return any(module._forward_pre_hooks for module in modules)


class Rotations(Protocol):
    """The rotary embedding of a model."""

    def embeddings(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention modules get for ``positions``, int64 [T]."""


class Hooks:
    """Those of one step: they are told what the model would call its modules with."""

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
        """Call the hooks. Raises InvariantViolated for one that wants to change something, which would go unheard."""
        module = self._modules[layer]
        if not module._forward_pre_hooks:
            return
        if self._kwargs is None:
            self._kwargs = {
                "hidden_states": self._normed[None],
                "attention_mask": None,
                "position_ids": self._positions[None],
                "past_key_values": None,
                "use_cache": False,
                "position_embeddings": self._rotations.embeddings(self._positions),
            }
        for number, hook in list(module._forward_pre_hooks.items()):
            if number not in module._forward_pre_hooks_with_kwargs:
                raise InvariantViolated("hooks of attention modules must take keywords")
            if hook(module, (), self._kwargs) is not None:
                raise InvariantViolated("hooks of attention modules may look at what is computed, not change it")
