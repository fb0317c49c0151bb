"""States in captured decode steps: a graph goes on from slots alone, and the host moves states between pages and slots.

A row of such a step goes on from the state in its request's slot, and leaves the next one there, so the memory that a
graph reads and writes is always the same. What differs from step to step happens around the replay, a page of tokens
apart: a row that begins a page gets the state at the end of the page before into its slot, and one that ends a page
leaves its state in the page too. Rows of padding have a slot of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.worker.engine.forward_meta import Segment
from services.worker.engine.states.carried import pack, unpack
from services.worker.engine.states.going_on import Arguments
from services.worker.engine.states.layers import StateModule
from services.worker.engine.uploads import on_device
from services.worker.kv.device_pool import DevicePool


class StaticStates:
    """The state layers of a captured step, whose rows have the slots ``numbers`` (int64 [R], static memory)."""

    def __init__(self, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        """``slots`` uint8 [slots, nbytes] holds the states."""
        self._slots, self._numbers = slots, numbers

    def carry(self, module: StateModule, arguments: Arguments) -> Any:
        """Compute one token of each row from the state in its slot, and leave the next state there."""
        own = module.of(self._slots)
        states = unpack(own.index_select(0, self._numbers), module.parts)
        output, left = module.call({name: _apart(each) for name, each in arguments.items()}, states)
        own.index_copy_(0, self._numbers, pack(left, module.parts))
        return _together(output, len(self._numbers))


class SlottedSteps:
    """The slots of a runner around the replays of its graphs."""

    def __init__(self, modules: Sequence[StateModule], pool: DevicePool, slots: torch.Tensor) -> None:
        """``slots`` uint8 [slots + 1, nbytes] holds the states within pages of ``modules``, last that of padding."""
        self._modules, self._pool, self.slots = modules, pool, slots

    @property
    def padding(self) -> int:
        """The slot of rows of padding."""
        return len(self.slots) - 1

    def serves(self, segments: Sequence[Segment]) -> bool:
        """Return whether each row has a slot and goes on, and none from a page that another one ends in this step."""
        if any(segment.running < 0 or not segment.context for segment in segments):
            return False
        read = {page for page, _ in self._begun(segments)}
        return read.isdisjoint(page for page, _ in self._ended(segments))

    def bring(self, segments: Sequence[Segment]) -> None:
        """Give rows that begin a page the state at the end of the page before."""
        moves = self._begun(segments)
        if moves:
            pages, slots = self._numbers(moves)
            for module in self._modules:
                module.of(self.slots).index_copy_(0, slots, self._pool.states(module.entry, pages))

    def keep(self, segments: Sequence[Segment]) -> None:
        """Leave the states of rows that end a page in it; of rows that end the same one, those of the first."""
        moves = list({page: (page, slot) for page, slot in reversed(self._ended(segments))}.values())
        if moves:
            pages, slots = self._numbers(moves)
            for module in self._modules:
                self._pool.put_states(module.entry, pages, module.of(self.slots).index_select(0, slots))

    def _begun(self, segments: Sequence[Segment]) -> list[tuple[int, int]]:
        """Return the page before and the slot of each row that begins a page."""
        size = self._pool.geometry.page_size
        return [
            (int(segment.pages[segment.context // size - 1]), segment.running)
            for segment in segments
            if segment.context % size == 0
        ]

    def _ended(self, segments: Sequence[Segment]) -> list[tuple[int, int]]:
        """Return the page and the slot of each row that ends a page."""
        size = self._pool.geometry.page_size
        return [
            (int(segment.pages[segment.context // size]), segment.running)
            for segment in segments
            if segment.length % size == 0
        ]

    def _numbers(self, moves: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        pages, slots = torch.tensor(moves, dtype=torch.int64).T.contiguous()
        pages, slots = on_device((pages, slots), self._pool.device)
        return pages, slots


def _apart(value: Any) -> Any:
    """Return tensors [1, R, ...] as [R, 1, ...], also within tuples and keywords."""
    if isinstance(value, torch.Tensor):
        return value.transpose(0, 1)
    if isinstance(value, dict):
        return {name: _apart(each) for name, each in value.items()}
    return type(value)(map(_apart, value)) if isinstance(value, tuple | list) else value


def _together(output: Any, rows: int) -> Any:
    """Return tensors [rows, 1, ...] as [1, rows, ...], also within a tuple; parts without rows are left out."""
    if isinstance(output, tuple):
        return tuple(_together(part, rows) for part in output)
    has_rows = isinstance(output, torch.Tensor) and tuple(output.shape[:2]) == (rows, 1)
    return output.transpose(0, 1) if has_rows else None
