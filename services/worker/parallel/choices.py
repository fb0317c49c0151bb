"""What layers of a prefix attend over in a group: rank 0 chooses for all ranks, by queries and keys of all heads.

Rank 0 chooses and reads as a single worker does, so a group chooses what a single worker would, wherever probe heads
lie. It gives every part of the pool its heads of what was read, and tells the others which tokens these are. A choice
that fails must not end the pass in one rank alone, because the others would wait in a collective forever: the pass
continues in all ranks without it, and its result is discarded at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.importance.identification import Rows
from services.worker.importance.important_prefix import ImportantPrefix
from services.worker.importance.selection_failed import SelectionFailed
from services.worker.parallel.gates import TellingGate
from services.worker.parallel.orders import TokensChosen
from shared.errors import InvariantViolated
from shared.messages.base import pack_int32


@dataclass(frozen=True, slots=True)
class LayerAsked:
    """What a layer chooses by, see :meth:`ImportantPrefix.choose`: ``rows`` and ``keys`` are of all heads."""

    layer: int
    rows: Rows
    keys: torch.Tensor
    at: torch.Tensor


Choose = Callable[[int, LayerAsked], TokensChosen]
"""Returns what a layer of the prefix of this number attends over. Every rank calls it for the same layers."""


class TellingChoices:
    """The choices of rank 0 in one step, which tell the other ranks."""

    def __init__(
        self,
        number: int,
        prefixes: Mapping[int, ImportantPrefix],
        gate: TellingGate | None,
        tell: Callable[[TokensChosen], None],
    ) -> None:
        """Choose for ``prefixes``, by their numbers, in step ``number``, whose loads ``gate`` waits for."""
        self._number, self._prefixes, self._gate, self._tell = number, prefixes, gate, tell
        self._failed: SelectionFailed | None = None

    def choose(self, prefix: int, asked: LayerAsked) -> TokensChosen:
        """Choose and read, and tell the other ranks. A failure is kept for :meth:`settle`."""
        chosen = self._chosen(prefix, asked)
        self._tell(chosen)
        return chosen

    def settle(self) -> None:
        """Raise SelectionFailed, after the pass, if a choice failed, so that the pass's results must not be used."""
        if self._failed is not None:
            raise self._failed

    def _chosen(self, number: int, asked: LayerAsked) -> TokensChosen:
        void = TokensChosen(number=self._number, prefix=number, layer=asked.layer, is_void=True)
        # Tokens that are chosen by undefined KV would stay chosen when the pass is repeated.
        if self._gate is not None and self._gate.is_rejected:
            return void
        prefix = self._prefixes[number]
        try:
            prefix.choose(asked.layer, asked.rows, asked.keys, asked.at)
            positions = prefix.positions[asked.layer]
            return TokensChosen(
                number=self._number,
                prefix=number,
                layer=asked.layer,
                sets=len(positions),
                tokens=pack_int32(positions.flatten().cpu().numpy()),
            )
        except Exception as error:  # Whatever it is, it is one request's misfortune.
            self._failed = SelectionFailed(prefix.name)
            self._failed.__cause__ = error
            return void


class ToldChoices:
    """The choices of one step in another rank, which come in messages of rank 0."""

    def __init__(self, number: int, receive: Callable[[], Any]) -> None:
        """Begin step ``number``; ``receive`` waits for the next order and returns it."""
        self._number, self._receive = number, receive

    def choose(self, prefix: int, asked: LayerAsked) -> TokensChosen:
        """Wait for rank 0's choice. Raises ChannelClosed when rank 0 is gone, which bounds its reads."""
        order = self._receive()
        if not isinstance(order, TokensChosen):
            raise InvariantViolated(f"step {self._number} waits for a choice and got {order}")
        if (order.number, order.prefix, order.layer) != (self._number, prefix, asked.layer):
            raise InvariantViolated(f"step {self._number} waits for layer {asked.layer} of {prefix} and got {order}")
        return order
