"""Whether a module goes on from states over several tokens, or over several sequences, at once.

There are replacements for the calls of modules that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from services.worker.engine.states.carried import States

Arguments = Mapping[str, Any]
Call = Callable[[Arguments, "States | None"], tuple[Any, States]]
"""Calls a module for n sequences, which begin (None) or go on, and returns its output and the states that it leaves."""

_TOLERANCE = 0.05
"""Largest deviation of an output or a state, relative to its largest value: rounding of half precision stays below, and
a forgotten state is far above.
"""


@torch.inference_mode()
def goes_on(call: Call, arguments: Arguments, left: States) -> bool:
    """Return whether ``call`` gives two tokens at once the same outputs and states as one after the other.

    Tensors of ``arguments`` are [1, 2, ...]. The call goes on from a state of random numbers like the one that it has
    ``left``.
    """
    return _agree(call, one_by_one(call), arguments, left)


@torch.inference_mode()
def keeps_apart(call: Call, arguments: Arguments, left: States) -> bool:
    """Return whether ``call`` gives one token of two sequences at once the same as each alone, from such states."""
    tokens = [{name: _row(value, row) for name, value in arguments.items()} for row in (0, 1)]
    both = {name: _side_by_side([token[name] for token in tokens]) for name in arguments}
    twice = {key: torch.cat([state, state]) for key, state in left.items()}
    return _agree(call, each_alone(call), both, twice)


def each_alone(call: Call) -> Call:
    """Return ``call`` so that several sequences are computed one by one."""

    def called(arguments: Arguments, states: States | None) -> tuple[Any, States]:
        found = [
            call(
                {name: _sequence(value, number) for name, value in arguments.items()},
                None if states is None else {key: state[number : number + 1] for key, state in states.items()},
            )
            for number in range(_size(arguments, 0))
        ]
        left = {key: torch.cat([each[key] for _, each in found]) for key in found[0][1]}
        return _side_by_side([output for output, _ in found]), left

    return called


def _agree(call: Call, expected: Call, arguments: Arguments, left: States) -> bool:
    """Return whether both give the same from states of random numbers like ``left``."""
    generator = torch.Generator()

    def drawn() -> States:
        generator.manual_seed(0)
        return {key: _random_like(state, generator) for key, state in left.items()}

    output, states = call(arguments, drawn())
    wanted, wanted_states = expected(arguments, drawn())
    return _are_alike(output, wanted) and all(_are_alike(states[key], wanted_states[key]) for key in states)


def one_by_one(call: Call) -> Call:
    """Return ``call`` so that sequences that go on are computed token by token."""

    def called(arguments: Arguments, states: States | None) -> tuple[Any, States]:
        if states is None:
            return call(arguments, None)
        outputs = []
        for row in range(_size(arguments, 1)):
            output, states = call({name: _row(value, row) for name, value in arguments.items()}, states)
            outputs.append(output)
        return _joined(outputs), states

    return called


def _random_like(state: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a state with random numbers. A state may also consist of token ids, which are kept."""
    if not state.is_floating_point():
        return state.clone()
    return torch.randn(state.shape, generator=generator).to(state)


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(_are_alike(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    if not isinstance(one, torch.Tensor):
        return True
    if one.shape != other.shape:
        return False
    largest = float(other.abs().max()) or 1.0
    return bool((one - other).abs().max() <= _TOLERANCE * largest)


def _size(value: Any, axis: int) -> int:
    """Return the size of the first tensor in ``value`` along ``axis``; 0 where there is none."""
    if isinstance(value, torch.Tensor):
        return value.shape[axis]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((size for size in (_size(each, axis) for each in parts) if size), 0)


def _row(value: Any, row: int) -> Any:
    return _each(value, lambda tensor: tensor[:, row : row + 1])


def _sequence(value: Any, number: int) -> Any:
    return _each(value, lambda tensor: tensor[number : number + 1])


def _each(value: Any, taken: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with ``taken`` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return taken(value)
    if isinstance(value, dict):
        return {name: _each(each, taken) for name, each in value.items()}
    return type(value)(_each(each, taken) for each in value) if isinstance(value, tuple | list) else value


def _side_by_side(values: list[Any]) -> Any:
    """Return values of single sequences as one; parts that are no tensors are those of the first."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values)
    if isinstance(first, dict):
        return {name: _side_by_side([each[name] for each in values]) for name in first}
    if isinstance(first, tuple | list):
        return type(first)(_side_by_side(list(each)) for each in zip(*values, strict=True))
    return first


def _joined(outputs: list[Any]) -> Any:
    """Return outputs of single tokens as one; parts without rows are those of the last."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(list(each)) for each in zip(*outputs, strict=True))
    if isinstance(first, torch.Tensor) and first.ndim >= 2 and first.shape[1] == 1:
        return torch.cat(outputs, dim=1)
    return outputs[-1]
