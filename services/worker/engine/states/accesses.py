"""How a module receives its states and leaves new ones: in the library's cache, or in a way of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from services.worker.engine.states.carried import CarriedStates, States

_RWKV_STATES = 5
_RWKV_LOWEST = -1e30
"""Largest exponent so far, before the first token (``RwkvModel.forward``)."""


class Access(Protocol):
    """A module's way to receive and leave states. ``arguments`` of a call are tensors [n, T, ...], by name."""

    def hand_in(self, arguments: Mapping[str, Any], states: States | None) -> dict[str, Any]:
        """Return the arguments with the states of sequences that go on; None is for sequences that begin."""

    def take_out(self, given: Mapping[str, Any], output: Any) -> States:
        """Return the states that the call with these arguments has left."""


class InCache:
    """States in the library's cache, which is an argument of the module."""

    def __init__(self, name: str) -> None:
        """Hand the cache over as the module's argument ``name``."""
        self.name = name

    def hand_in(self, arguments: Mapping[str, Any], states: States | None) -> dict[str, Any]:
        """Return the arguments with a cache of these states."""
        return {**arguments, self.name: CarriedStates(states)}

    def take_out(self, given: Mapping[str, Any], output: Any) -> States:
        """Return the states that the module left in the cache."""
        states: States = given[self.name].states
        return states


class OfRwkv:
    """RWKV's states, in a list of tensors [n, hidden, layers]; each layer reads and writes one column."""

    def __init__(self, module: Any) -> None:
        """Read the layer's number and the number of layers from ``module``, an ``RwkvBlock``; it is not kept."""
        self._layer = int(module.layer_id)
        self._layers = int(module.config.num_hidden_layers)

    def hand_in(self, arguments: Mapping[str, Any], states: States | None) -> dict[str, Any]:
        """Return the arguments with the list; sequences that begin get zeros, and the lowest exponent."""
        columns = self._beginning(arguments["hidden"]) if states is None else states
        # All columns are the same memory: the block sees one of them.
        state = [
            columns["recurrent", number][:, :, None].expand(-1, -1, self._layers) for number in range(_RWKV_STATES)
        ]
        return {**arguments, "state": state, "use_cache": True}

    def take_out(self, given: Mapping[str, Any], output: Any) -> States:
        """Return a copy of the layer's column of each tensor."""
        return {("recurrent", number): state[:, :, self._layer].clone() for number, state in enumerate(given["state"])}

    def _beginning(self, hidden: torch.Tensor) -> States:
        zeros = hidden.new_zeros(hidden.shape[0], hidden.shape[2])
        wide = hidden.new_zeros(zeros.shape, dtype=torch.float32)
        states = (zeros, zeros.clone(), wide, wide.clone(), torch.full_like(wide, _RWKV_LOWEST))
        return {("recurrent", number): state for number, state in enumerate(states)}


class OfRecurrentGemma:
    """States in attributes of the module, which it uses where it is called with a cache (RecurrentGemma)."""

    def __init__(self, module: Any) -> None:
        """Keep ``module``, a ``RecurrentGemmaRecurrentBlock``, whose attributes each call sets and clears."""
        self._module = module

    def hand_in(self, arguments: Mapping[str, Any], states: States | None) -> dict[str, Any]:
        """Set the module's attributes, None for new sequences, and return the arguments with the cache switched on."""
        self._module.conv1d_state = None if states is None else states["conv", 0]
        self._module.rg_lru.recurrent_states = None if states is None else states["recurrent", 0]
        return {**arguments, "use_cache": True}

    def take_out(self, given: Mapping[str, Any], output: Any) -> States:
        """Return the module's states and clear its attributes, so that the next call does not find them."""
        states: States = {
            ("conv", 0): self._module.conv1d_state,
            ("recurrent", 0): self._module.rg_lru.recurrent_states,
        }
        self._module.conv1d_state = self._module.rg_lru.recurrent_states = None
        return states


def own_access(module: Any) -> Access | None:
    """Return the way of a module that does not keep its states in the library's cache; None for any other module."""
    match type(module).__name__:
        case "RwkvBlock":
            return OfRwkv(module)
        case "RecurrentGemmaRecurrentBlock":
            return OfRecurrentGemma(module)
        case _:
            return None


def own_layer_types(config: Any) -> list[str] | None:
    """Return the layer types of a model with states whose configuration names none; else None."""
    if getattr(config, "model_type", "") == "rwkv" and getattr(config, "layer_types", None) is None:
        return ["linear_attention"] * int(config.num_hidden_layers)
    return None
