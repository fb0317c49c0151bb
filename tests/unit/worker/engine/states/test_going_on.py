"""Modules that forget their state over several tokens are found, and called token by token."""

from __future__ import annotations

from typing import Any

import torch

from services.worker.engine.states.carried import States
from services.worker.engine.states.going_on import Arguments, Call, each_alone, goes_on, keeps_apart, one_by_one


def _sums(arguments: Arguments, states: States | None) -> tuple[Any, States]:
    """Running sums over tokens, from the sum so far."""
    rows = arguments["rows"]
    before = rows.new_zeros(len(rows), rows.shape[2]) if states is None else states["recurrent", 0]
    sums = rows.cumsum(1) + before[:, None]
    return (sums, None), {("recurrent", 0): sums[:, -1]}


def _forgetful(arguments: Arguments, states: States | None) -> tuple[Any, States]:
    """The same, from nothing where there are several tokens."""
    return _sums(arguments, states if arguments["rows"].shape[1] == 1 else None)


def _tried(call: Call) -> bool:
    arguments = {"rows": torch.ones(1, 2, 3)}
    return goes_on(call, arguments, call(arguments, None)[1])


def test_a_module_that_goes_on_is_told_from_one_that_forgets() -> None:
    """By what they make of a state that is not that of their beginning."""
    assert _tried(_sums)
    assert not _tried(_forgetful)


def test_token_by_token_a_forgetful_module_goes_on() -> None:
    """As if it had been given all tokens at once."""
    rows = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    _, states = one_by_one(_forgetful)({"rows": rows[:, :2]}, None)

    (found, _), left = one_by_one(_forgetful)({"rows": rows[:, 2:]}, states)

    torch.testing.assert_close(found, rows.cumsum(1)[:, 2:])
    torch.testing.assert_close(left["recurrent", 0], rows.sum(1))


def _mixing(arguments: Arguments, states: States | None) -> tuple[Any, States]:
    """Running sums that take a sequence for all where one token of several goes on."""
    (sums, _), left = _sums(arguments, states)
    return (sums.mean(0, keepdim=True).expand_as(sums) if sums.shape[1] == 1 else sums, None), left


def test_a_module_that_mixes_sequences_up_is_told_from_one_that_keeps_them_apart() -> None:
    """By what it makes of two at once, and of each."""
    arguments = {"rows": torch.tensor([[[1.0, 2.0], [5.0, -3.0]]])}
    left = _sums(arguments, None)[1]

    assert keeps_apart(_sums, arguments, left)
    assert not keeps_apart(_mixing, arguments, left)
    assert keeps_apart(each_alone(_mixing), arguments, left)
