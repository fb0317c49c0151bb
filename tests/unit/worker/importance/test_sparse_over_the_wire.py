"""The executor, and the storage that its requests' sparse prefixes are read through, with a bus and memory between."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from services.worker.importance.disk_prefix import DiskPrefix
from shared.errors import IntegrityError
from tests.unit.worker.driven_executor import batch, chunk
from tests.unit.worker.importance.sparse_cell import ANSWER, MakeCell, SparseCell
from tests.unit.worker.importance.sparse_wire import SparseWire


class WiredCells:
    """Cells that read over a wire, all closed at the end."""

    def __init__(self, make_cell: MakeCell) -> None:
        self._make_cell = make_cell
        self._wires: list[SparseWire] = []

    def make(self, family: str) -> tuple[SparseCell, SparseWire]:
        cell = self._make_cell(family)
        wire = SparseWire(cell.kv, cell.runner.geometry, slot_bytes=4096, slots=4)
        self._wires.append(wire)
        cell.driven.sparse._open_source = partial(DiskPrefix, reads=wire.reads())
        return cell, wire

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


@pytest.fixture
def wired(make_cell: MakeCell) -> Iterator[WiredCells]:
    made = WiredCells(make_cell)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("family", "ratio"), [("llama_mha", 0.2), ("agreeing", 0.2), ("gemma2", 0.2), ("llama_mha", 1.0)]
)
def test_the_answer_is_that_of_the_same_tokens_in_memory(
    family: str, ratio: float, wired: WiredCells, make_cell: MakeCell
) -> None:
    """Reads are split over many small slots, and keys of the next layer are prefetched on another thread."""
    cell, _ = wired.make(family)
    plain = make_cell(family)
    for each in (plain, cell):
        prompt = each.prompt(20, seed=4)
        each.driven.give(each.sparse(prompt, "r", ratio=ratio), batch(chunk(192, 200)), batch(chunk(200, 212)))
        each.driven.run()

    assert [done.failed for done in cell.driven.done()] == [()] * 3
    assert cell.driven.tokens() == plain.driven.tokens()
    assert len(cell.driven.tokens()) == ANSWER
    usage = cell.driven.items()[0].usage
    assert usage is not None
    assert usage.importance is not None
    assert usage.importance.disk_bytes > 0


def test_a_storage_that_cannot_read_costs_the_prefix_alone(wired: WiredCells) -> None:
    """Its error comes back as a refusal, and the request beside it has its answer."""
    cell, wire = wired.make("llama_mha")
    wire.reader.error = IntegrityError("a block is damaged")
    prompt, other = cell.prompt(9, seed=1), cell.prompt(7, seed=2)

    cell.driven.give(cell.sparse(prompt, "r", ratio=0.2), cell.exact(other, "beside"))
    cell.driven.give(batch(chunk(192, 201), chunk(192, 199, request_id="beside")))
    cell.driven.run()

    assert cell.driven.done()[-1].sparse_refused == cell.driven.done()[-1].failed == ("r",)
    assert len(cell.driven.tokens("beside")) == ANSWER
