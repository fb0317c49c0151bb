"""How a module is given its states and leaves them: in the library's cache, or in a way of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from services.worker.engine.states.carried import CarriedStates, States

_RWKV_STATES = 5
_RWKV_LOWEST = -1e30
"""Largest exponent so far, of none (``RwkvModel.forward``)."""


class Access(Protocol):
    """One way. ``arguments`` of a call are tensors [n, T, ...], by name."""

    def hand_in(self, arguments: Mapping[str, Any], states: States | None) -> dict[str, Any]:
        """Arguments with the states of sequences that go on, or for ones that begin."""

    def take_out(self, given: Mapping[str, Any], output: Any) -> States:
        """Take out what the call with these arguments has left."""


class InCache:
    """In a cache that is the argument ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def hand_in(self, arguments: Mapping[str, Any], states: States | None) -> dict[str, Any]:
        return {**arguments, self.name: CarriedStates(states)}

    def take_out(self, given: Mapping[str, Any], output: Any) -> States:
        states: States = given[self.name].states
        return states


class OfRwkv:
    """In a list of tensors [n, hidden, layers], which the block of a layer reads and writes one column of."""

    def __init__(self, module: Any) -> None:
        self._layer = int(module.layer_id)
        self._layers = int(module.config.num_hidden_layers)

    def hand_in(self, arguments: Mapping[str, Any], states: States | None) -> dict[str, Any]:
        columns = self._beginning(arguments["hidden"]) if states is None else states
        # All columns are the same memory: the block sees one of them.
        state = [
            columns["recurrent", number][:, :, None].expand(-1, -1, self._layers) for number in range(_RWKV_STATES)
        ]
        return {**arguments, "state": state, "use_cache": True}

    def take_out(self, given: Mapping[str, Any], output: Any) -> States:
        return {("recurrent", number): state[:, :, self._layer].clone() for number, state in enumerate(given["state"])}

    def _beginning(self, hidden: torch.Tensor) -> States:
        zeros = hidden.new_zeros(hidden.shape[0], hidden.shape[2])
        wide = hidden.new_zeros(zeros.shape, dtype=torch.float32)
        states = (zeros, zeros.clone(), wide, wide.clone(), torch.full_like(wide, _RWKV_LOWEST))
        return {("recurrent", number): state for number, state in enumerate(states)}


class OfRecurrentGemma:
    """In attributes of the module, which it uses where it is told to use a cache."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def hand_in(self, arguments: Mapping[str, Any], states: States | None) -> dict[str, Any]:
        self._module.conv1d_state = None if states is None else states["conv", 0]
        self._module.rg_lru.recurrent_states = None if states is None else states["recurrent", 0]
        return {**arguments, "use_cache": True}

    def take_out(self, given: Mapping[str, Any], output: Any) -> States:
        states: States = {
            ("conv", 0): self._module.conv1d_state,
            ("recurrent", 0): self._module.rg_lru.recurrent_states,
        }
        self._module.conv1d_state = self._module.rg_lru.recurrent_states = None
        return states


def own_access(module: Any) -> Access | None:
    """Return the way of a module that does not keep its states in the library's cache; None for any other."""
    match type(module).__name__:
        case "RwkvBlock":
            return OfRwkv(module)
        case "RecurrentGemmaRecurrentBlock":
            return OfRecurrentGemma(module)
        case _:
            return None


def own_layer_types(config: Any) -> list[str] | None:
    """Types of the layers of a model of states whose configuration names none."""
    if getattr(config, "model_type", "") == "rwkv" and getattr(config, "layer_types", None) is None:
        return ["linear_attention"] * int(config.num_hidden_layers)
    return None
