"""Whether a module goes on from a state over several tokens at once, and how to have one do it that does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from services.worker.engine.states.carried import States

Arguments = Mapping[str, Any]
Call = Callable[[Arguments, "States | None"], tuple[Any, States]]
"""Calls a module for n sequences, which begin (None) or go on: its output and the states that it leaves."""

_TOLERANCE = 0.05
"""Largest deviation of an output or a state, by its largest value: rounding of half precision stays below, and a state
that is forgotten is not to be confused with it.
"""


@torch.inference_mode()
def goes_on(call: Call, arguments: Arguments, left: States) -> bool:
    """Whether ``call`` gives two tokens (tensors of ``arguments`` are [1, 2, ...]) at once what it gives them one after
    the other, from a state of random numbers like the one that it has ``left``.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn() -> States:
        generator.manual_seed(0)
        return {key: _random_like(state, generator) for key, state in left.items()}

    output, states = call(arguments, drawn())
    expected, expected_states = one_by_one(call)(arguments, drawn())
    return _are_alike(output, expected) and all(_are_alike(states[key], expected_states[key]) for key in states)


def one_by_one(call: Call) -> Call:
    """``call``, token by token where sequences go on."""

    def called(arguments: Arguments, states: States | None) -> tuple[Any, States]:
        if states is None:
            return call(arguments, None)
        outputs = []
        for row in range(_rows(arguments)):
            output, states = call({name: _row(value, row) for name, value in arguments.items()}, states)
            outputs.append(output)
        return _joined(outputs), states

    return called


def _random_like(state: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers of a state are drawn; token ids, which a state may consist of, stay."""
    if not state.is_floating_point():
        return state.clone()
    return torch.randn(state.shape, generator=generator).to(state)


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(_are_alike(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    if not isinstance(one, torch.Tensor):
        return True
    largest = float(other.abs().max()) or 1.0
    return bool((one - other).abs().max() <= _TOLERANCE * largest)


def _rows(value: Any) -> int:
    """Rows of the first tensor in ``value``; 0 where there is none."""
    if isinstance(value, torch.Tensor):
        return value.shape[1]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((rows for rows in map(_rows, parts) if rows), 0)


def _row(value: Any, row: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:, row : row + 1]
    if isinstance(value, dict):
        return {name: _row(each, row) for name, each in value.items()}
    return type(value)(_row(each, row) for each in value) if isinstance(value, tuple | list) else value


def _joined(outputs: list[Any]) -> Any:
    """Outputs of single tokens, as one; what has no rows is that of the last."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(list(each)) for each in zip(*outputs, strict=True))
    if isinstance(first, torch.Tensor) and first.ndim >= 2 and first.shape[1] == 1:
        return torch.cat(outputs, dim=1)
    return outputs[-1]
