"""The cache that a state layer of the library gets: the states of some sequences, handed in and taken out.

The library's layers ask their cache for two kinds of states, numbered within a layer: of a convolution, the last inputs
``[n, channels, kernel]``, and recurrent ones, of any shape ``[n, ...]``. This cache keeps what the library's
``LinearAttentionLayer`` keeps, in the same data types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import pad

Kind = Literal["conv", "recurrent"]
States = dict[tuple[Kind, int], torch.Tensor]
"""States of n sequences by kind and number, each ``[n, ...]``."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One state of a layer: its ``shape`` for one sequence."""

    kind: Kind
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes for one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


def parts_of(states: Mapping[tuple[Kind, int], torch.Tensor]) -> tuple[StatePart, ...]:
    """Return the parts of these states, in the order in which they are packed."""
    return tuple(
        StatePart(kind, number, tuple(states[kind, number].shape[1:]), states[kind, number].dtype)
        for kind, number in sorted(states)
    )


def pack(states: Mapping[tuple[Kind, int], torch.Tensor], parts: Sequence[StatePart]) -> torch.Tensor:
    """Return the bytes of ``parts`` one behind the other, uint8 [n, nbytes].

    Raises ValueError where a state is missing or has another shape or data type than its part.
    """
    columns = []
    for part in parts:
        state = states.get((part.kind, part.number))
        if state is None or tuple(state.shape[1:]) != part.shape or state.dtype != part.dtype:
            raise ValueError(f"a layer left another {part.kind} state than it did at first")
        columns.append(state.reshape(len(state), -1).contiguous().view(torch.uint8))
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def unpack(packed: torch.Tensor, parts: Sequence[StatePart]) -> States:
    """Undo :func:`pack`. The states are copies: layers write into them."""
    states: States = {}
    first = 0
    for part in parts:
        column = packed[:, first : first + part.nbytes].clone(memory_format=torch.contiguous_format)
        states[part.kind, part.number] = column.view(part.dtype).view(len(packed), *part.shape)
        first += part.nbytes
    return states


class CarriedStates:
    """The cache of one layer for one call. ``states`` holds the states that the layer has left after it."""

    def __init__(self, states: States | None = None) -> None:
        """Without ``states`` the sequences begin with this call."""
        self.states: States = states or {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the convolution state of this number; None for sequences that begin."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent state of this number; None for sequences that begin."""
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Add the inputs ``[n, channels, rows]`` of a convolution, and return them behind the earlier ones.

        The last ``conv_kernel_size`` are kept, zeros before the beginning.
        """
        kept = self.states.get(("conv", state_idx))
        if kept is None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            inputs = pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
            dtype = conv_states.dtype
        else:
            width, dtype = kept.shape[-1], kept.dtype
            inputs = torch.cat([kept, conv_states], dim=-1)
        self.states["conv", state_idx] = inputs[..., inputs.shape[-1] - width :].to(dtype, copy=True)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Keep a recurrent state, in the data type of the first, and return it so."""
        before = self.states.get(("recurrent", state_idx))
        dtype = recurrent_states.dtype if before is None else before.dtype
        self.states["recurrent", state_idx] = state = recurrent_states.to(dtype)
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the sequences go on from earlier tokens."""
        return bool(self.states) if state_idx is None else ("conv", state_idx) in self.states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: the library records the past to undo guesses, and nothing is undone here."""
        return False

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the recurrent state, by the name that MiniMax's cache has for it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Keep the recurrent state, by the name that MiniMax's cache has for it."""
        self.update_recurrent_state(linear_cache, layer_idx)
