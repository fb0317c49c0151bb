"""Calls in lockstep: where they meet, what they leave behind when one fails, and what each of them sees as its own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import pytest
import torch

from services.worker.engine.lockstep import JoinedLayer, in_lockstep, join_layers


class Doubling(torch.nn.Module):
    """A layer that records the rows of each of its passes."""

    computes_rows_alone = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n] to the same."""
        self.rows.append(len(x))
        return 2 * x


@pytest.fixture
def layers() -> torch.nn.ModuleList:
    made = torch.nn.ModuleList([Doubling(), Doubling(), Doubling()])
    join_layers(made)
    return made


def call(layers: torch.nn.ModuleList, x: torch.Tensor, taken: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
    """``x`` through the layers that are taken, with one added between them."""
    for number in taken:
        x = layers[number](x) + 1
    return x


def test_rows_of_all_calls_are_computed_together(layers: torch.nn.ModuleList) -> None:
    """Whatever their shapes; each call gets its own back."""
    inputs = [torch.full((1, rows, 2), float(rows)) for rows in (1, 3, 2)]

    found = in_lockstep([partial(call, layers, x) for x in inputs])

    for mine, x in zip(found, inputs, strict=True):
        assert torch.equal(mine, 8 * x + 7)
    assert [layer.rows for layer in layers] == [[6], [6], [6]]


def test_calls_meet_again_behind_a_layer_that_some_skip(layers: torch.nn.ModuleList) -> None:
    """Those that took it catch up first."""
    x = torch.ones(1, 2)

    in_lockstep([partial(call, layers, x), partial(call, layers, x, (0, 2)), partial(call, layers, x, (2,))])

    assert [layer.rows for layer in layers] == [[2], [1], [3]]


def test_nothing_to_compute_waits_for_nobody(layers: torch.nn.ModuleList) -> None:
    """A call that wants no logits has no rows for the head."""
    found = in_lockstep([partial(call, layers, torch.ones(rows, 2)) for rows in (0, 1)])

    assert [len(each) for each in found] == [0, 1]


def test_a_call_alone_is_made_as_it_is(layers: torch.nn.ModuleList) -> None:
    """And layers that were joined compute as before outside of lockstep."""
    assert torch.equal(call(layers, torch.ones(1, 2)), torch.full((1, 2), 15.0))
    assert len(in_lockstep([partial(call, layers, torch.ones(1, 2))])) == 1
    assert [layer.rows for layer in layers] == [[1, 1]] * 3


def test_joining_twice_joins_once(layers: torch.nn.ModuleList) -> None:
    """Runners over several pools are made of one model."""
    before = [layer.forward for layer in layers]

    join_layers(layers)

    assert [layer.forward for layer in layers] == before
    assert all(isinstance(each, JoinedLayer) for each in before)


def test_the_outermost_of_nested_layers_is_joined() -> None:
    """A sum over ranks is made once for all calls, not once for each."""
    outer, inner = Doubling(), Doubling()
    outer.inner = inner

    join_layers(torch.nn.ModuleList([outer]))

    assert isinstance(outer.forward, JoinedLayer)
    assert not isinstance(inner.forward, JoinedLayer)


@pytest.mark.parametrize("at", [0, 1])
def test_a_call_that_fails_ends_the_others(at: int, layers: torch.nn.ModuleList) -> None:
    """They give back what they hold, and none goes on."""
    ended: list[str] = []

    def other() -> torch.Tensor:
        try:
            return call(layers, torch.ones(1, 2))
        finally:
            ended.append("other")

    def failing() -> torch.Tensor:
        call(layers, torch.ones(1, 2), (0,))
        raise ValueError("lost")

    calls: list[Callable[[], torch.Tensor]] = [other]
    calls.insert(at, failing)
    with pytest.raises(ValueError, match="lost"):
        in_lockstep(calls)

    assert ended == ["other"]
    assert layers[2].rows == []


def test_each_call_has_variables_of_its_own(layers: torch.nn.ModuleList) -> None:
    """What one sets in its context is not seen by another that goes on in between."""
    seen: ContextVar[int] = ContextVar("seen", default=-1)

    def setting(number: int) -> int:
        seen.set(number)
        call(layers, torch.ones(1, 2))
        return seen.get()

    assert in_lockstep([partial(setting, number) for number in (1, 2, 3)]) == [1, 2, 3]
    assert seen.get() == -1
