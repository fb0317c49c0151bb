"""What layers of a prefix attend over, as rank 0 chooses it and as another rank is told."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from services.worker.importance.identification import Rows
from services.worker.importance.selection_failed import SelectionFailed
from services.worker.kv.layer_gate import LayerGate
from services.worker.parallel.choices import LayerAsked, TellingChoices, ToldChoices
from services.worker.parallel.gates import TellingGate
from services.worker.parallel.orders import LayersLanded, TokensChosen, unpacked
from shared.errors import InvariantViolated

ROWS = Rows(torch.zeros(4, 2, 8), 64, 1.0, None, None)


class Prefix:
    """Chooses tokens 3 and 7 of every layer but ``lost``."""

    name = "r"

    def __init__(self, lost: int | None = None) -> None:
        self.lost, self.positions = lost, dict[int, torch.Tensor]()

    def choose(self, layer: int, *_: Any) -> None:
        if layer == self.lost:
            raise ZeroDivisionError("the disk is gone")
        self.positions[layer] = torch.tensor([[3, 7]])


def of_layer(layer: int) -> LayerAsked:
    return LayerAsked(layer, ROWS, torch.zeros(2, 9, 8), torch.arange(9))


def choices(prefix: Prefix, gate: TellingGate | None = None) -> tuple[TellingChoices, ToldChoices, deque[TokensChosen]]:
    """Rank 0's choices for prefix 5 in step 7 and another rank's, and the orders between them."""
    orders: deque[TokensChosen] = deque()
    by_number: dict[int, Any] = {5: prefix}
    return TellingChoices(7, by_number, gate, orders.append), ToldChoices(7, orders.popleft), orders


def test_another_rank_is_told_what_rank_0_chooses() -> None:
    """One order for each layer, and none is left."""
    telling, told, orders = choices(Prefix())

    for layer in range(2):
        chosen = telling.choose(5, of_layer(layer))
        assert told.choose(5, of_layer(layer)) == chosen
        assert (chosen.sets, unpacked(chosen.tokens).tolist(), chosen.is_void) == (1, [3, 7], False)

    telling.settle()
    assert not orders


def test_a_choice_that_fails_is_void_and_raised_after_the_pass() -> None:
    """With the name of the prefix and the cause."""
    telling, told, _ = choices(Prefix(lost=1))
    telling.choose(5, of_layer(0))
    told.choose(5, of_layer(0))

    assert telling.choose(5, of_layer(1)).is_void
    assert told.choose(5, of_layer(1)).is_void

    with pytest.raises(SelectionFailed, match="of r could not") as failed:
        telling.settle()
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_nothing_is_chosen_after_a_load_has_failed() -> None:
    """It would stay chosen, by KV that was never there; the failed load is what is raised."""
    gate = LayerGate(timeout_s=1)
    gate.reject("checksum")
    telling_gate = TellingGate(gate, 7, 3, lambda order: None)
    telling_gate.wait(0)
    prefix = Prefix()
    telling, _, _ = choices(prefix, telling_gate)

    assert telling.choose(5, of_layer(0)).is_void

    assert not prefix.positions
    telling.settle()


@pytest.mark.parametrize(
    "order",
    [
        TokensChosen(number=6, prefix=5, layer=1),
        TokensChosen(number=7, prefix=4, layer=1),
        TokensChosen(number=7, prefix=5, layer=0),
        LayersLanded(number=7, layers=2),
    ],
)
def test_an_order_about_something_else_is_never_taken_for_a_choice(order: TokensChosen | LayersLanded) -> None:
    """Of another step, prefix or layer, or no choice at all."""
    told = ToldChoices(7, lambda: order)

    with pytest.raises(InvariantViolated, match="step 7 waits for"):
        told.choose(5, of_layer(1))
