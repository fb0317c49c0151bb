"""One step over layers that carry states: each is called piece by piece, from the state in a page or a slot.

Pieces are cut by :mod:`services.worker.engine.states.pieces`. Those of one length are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.states.carried import pack, unpack
from services.worker.engine.states.going_on import Arguments
from services.worker.engine.states.layers import StateModule
from services.worker.engine.states.pieces import Piece, cut, in_order
from services.worker.engine.states.running import slots_over
from services.worker.engine.uploads import on_device
from services.worker.kv.device_pool import DevicePool


@dataclass(frozen=True, slots=True)
class _Places:
    """The pieces of a group that are in pages or slots, and the numbers of these, int64 on the device."""

    pieces: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, numbers: Sequence[int]) -> _Places | None:
        """Return the places of ``numbers`` that are not -1; None where there are none."""
        kept = [(piece, number) for piece, number in enumerate(numbers) if number >= 0]
        if not kept:
            return None
        both = torch.tensor(kept, dtype=torch.int64).T.contiguous()
        return cls(both[0], both[1])


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces that are computed together: n of r rows each; ``rows`` int64 [n * r] are their rows in the batch."""

    count: int
    rows: torch.Tensor
    begins: bool
    from_pages: _Places | None
    from_slots: _Places | None
    to_pages: _Places | None
    to_slots: _Places | None

    @classmethod
    def of(cls, pieces: Sequence[Piece], written: set[int]) -> _Group:
        """Return the group of ``pieces``, with numbers on the host.

        ``written`` are the pages that earlier pieces fill; the pages of these are added, and only the first piece that
        fills a page writes it.
        """
        targets: list[int] = []
        for piece in pieces:
            targets.append(-1 if piece.target_page in written else piece.target_page)
            written.add(piece.target_page)
        rows = [torch.arange(piece.first_row, piece.first_row + piece.rows) for piece in pieces]
        return cls(
            count=len(pieces),
            rows=torch.cat(rows),
            begins=pieces[0].begins,
            from_pages=_Places.of([piece.source_page for piece in pieces]),
            from_slots=_Places.of([piece.source_slot for piece in pieces]),
            to_pages=_Places.of(targets),
            to_slots=_Places.of([piece.target_slot for piece in pieces]),
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All its numbers."""
        places = (self.from_pages, self.from_slots, self.to_pages, self.to_slots)
        return [self.rows, *(each for place in places if place for each in (place.pieces, place.numbers))]

    def of_tensors(self, tensors: Iterator[torch.Tensor]) -> _Group:
        """Return the group with the next of ``tensors``, in the order of :attr:`tensors`, in place of its own."""

        def next_places(places: _Places | None) -> _Places | None:
            return places and _Places(next(tensors), next(tensors))

        return replace(
            self,
            rows=next(tensors),
            from_pages=next_places(self.from_pages),
            from_slots=next_places(self.from_slots),
            to_pages=next_places(self.to_pages),
            to_slots=next_places(self.to_slots),
        )


def _sent(groups: Sequence[_Group], device: torch.device) -> list[_Group]:
    """Return ``groups`` with their numbers on ``device``, in one copy."""
    tensors = iter(on_device([each for group in groups for each in group.tensors], device))
    return [group.of_tensors(tensors) for group in groups]


class Slotted(Protocol):
    """Something with states within pages, of ``nbytes`` bytes a slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""


def slot_memory(modules: Sequence[Slotted], pages: int, device: torch.device) -> torch.Tensor:
    """Return memory for the states within pages of requests over a pool of ``pages`` pages, uint8 [slots, nbytes].

    The last slot is for rows of padding (:mod:`services.worker.engine.states.captured`). On a CPU an unused slot takes
    no memory.
    """
    nbytes = sum(module.nbytes for module in modules)
    slots = torch.empty((slots_over(pages, device.type) + 1, nbytes), dtype=torch.uint8, device=device)
    slots[-1].zero_()
    return slots


class StateStep:
    """The state layers of one forward pass."""

    def __init__(self, meta: ForwardMeta, pool: DevicePool, slots: torch.Tensor) -> None:
        """``slots`` uint8 [slots, nbytes] holds the states within pages."""
        self._meta, self._pool, self._slots = meta, pool, slots
        written: set[int] = set()
        groups = [_Group.of(pieces, written) for pieces in in_order(cut(meta.segments, meta.page_size))]
        self._groups = _sent(groups, pool.device)
        self._reads_pages = any(group.from_pages is not None for group in self._groups)

    def carry(self, module: StateModule, arguments: Arguments) -> Any:
        """Compute the call group by group, and write each piece's last state to its page or slot."""
        if self._reads_pages and self._meta.gate is not None:
            self._meta.gate.wait(self._pool.planes.last_unit(module.entry))
        outputs: Any = None
        for group in self._groups:
            states = None if group.begins else unpack(self._read(module, group), module.parts)
            output, left = module.call({name: _take(each, group) for name, each in arguments.items()}, states)
            self._write(module, group, pack(left, module.parts))
            outputs = _put(outputs, output, group, self._meta.rows)
        return outputs

    def _read(self, module: StateModule, group: _Group) -> torch.Tensor:
        packed = self._slots.new_empty((group.count, module.nbytes))
        if group.from_pages is not None:
            packed.index_copy_(0, group.from_pages.pieces, self._pool.states(module.entry, group.from_pages.numbers))
        if group.from_slots is not None:
            packed.index_copy_(
                0, group.from_slots.pieces, module.of(self._slots).index_select(0, group.from_slots.numbers)
            )
        return packed

    def _write(self, module: StateModule, group: _Group, packed: torch.Tensor) -> None:
        if group.to_pages is not None:
            self._pool.put_states(module.entry, group.to_pages.numbers, packed.index_select(0, group.to_pages.pieces))
        if group.to_slots is not None:
            module.of(self._slots).index_copy_(0, group.to_slots.numbers, packed.index_select(0, group.to_slots.pieces))


def _take(value: Any, group: _Group) -> Any:
    """Return the rows of ``group``: tensors [1, T, ...] become [n, r, ...], also within tuples and keywords."""
    if isinstance(value, torch.Tensor):
        rows = value[0].index_select(0, group.rows)
        return rows.view(group.count, -1, *rows.shape[1:])
    if isinstance(value, dict):
        return {name: _take(each, group) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_take(each, group) for each in value)
    return value


def _put(outputs: Any, output: Any, group: _Group, total: int) -> Any:
    """Write tensors of ``output`` [n, r, ...] into ``outputs`` [1, total, ...]; parts without rows are left out."""
    if isinstance(output, tuple):
        outputs = outputs or (None,) * len(output)
        return tuple(_put(whole, part, group, total) for whole, part in zip(outputs, output, strict=True))
    rows = len(group.rows) // group.count
    if not isinstance(output, torch.Tensor) or tuple(output.shape[:2]) != (group.count, rows):
        return None
    if outputs is None:
        outputs = output.new_empty((1, total, *output.shape[2:]))
    outputs[0].index_copy_(0, group.rows, output.flatten(0, 1))
    return outputs
