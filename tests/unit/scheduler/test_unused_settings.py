"""Settings without effect are told: a form that the model cannot have, and copies that no worker reads."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler import core
from services.scheduler.unused_settings import with_unused_settings
from shared.messages.cell_events import CellConfig
from tests.stateful.cell_model import CellModel
from tests.stateful.model_hidden import COSTS


def told(cell: CellModel) -> list[tuple[str, str, str]]:
    """The component, the feature and the reason of each degradation."""
    status = with_unused_settings(core.status(cell.state, "scheduler"), cell.state)
    return [(each.component, each.what, each.reason) for each in status.degraded]


def a_cell(form: str = "auto", *, reads_no_parts: str = "", **storage: Any) -> CellModel:
    """A storage with a disk, and a worker whose costs are known."""
    cell = CellModel(CellConfig(hidden_form=form))
    cell.restoration, cell.reads_no_parts = COSTS, reads_no_parts
    cell.add_storage("s", **{"pages": 8, "disk_chunks": 8, "hidden_pages": 8} | storage)
    cell.add_worker("w", pages=8)
    cell.drain()
    return cell


def layers() -> int:
    geometry = a_cell().state.geometry
    assert geometry is not None
    return geometry.layers


@pytest.mark.parametrize("form", ["off", "auto", f"0/{layers()}/0", f"0/0/{layers()}"])
def test_a_form_that_is_kept_is_no_fault(form: str) -> None:
    """All KV is such a form, too."""
    assert told(a_cell(form)) == []


@pytest.mark.parametrize("form", ["8/24/0", "0/0/0", "0/0/99"])
def test_a_form_of_another_number_of_layers_is_told(form: str) -> None:
    """With both numbers, once, of the storage that does not keep it."""
    ((component, what, reason),) = told(a_cell(form))

    assert (component, what) == ("s", "hidden form")
    assert reason.startswith(f"prefixes are kept as KV: {form} has ")
    assert reason.endswith(f"the model has {layers()}")


def test_a_form_without_room_is_told() -> None:
    """Nor a disk to keep it on."""
    assert "--hidden-bytes is 0" in told(a_cell(f"0/{layers()}/0", hidden_pages=0))[0][2]
    assert "neither a disk" in told(a_cell(f"0/{layers()}/0", disk_chunks=0))[0][2]


def test_copies_that_no_worker_reads_are_told() -> None:
    """With the worker's reason; a storage without the setting lacks nothing."""
    assert told(a_cell(keeps_sparse=True)) == []
    assert told(a_cell(reads_no_parts="it has sinks")) == []
    assert told(a_cell(reads_no_parts="it has sinks", keeps_sparse=True)) == [
        ("w", "importance", "prefixes are read whole: it has sinks")
    ]


def test_a_worker_that_would_read_parts_comes_too_late() -> None:
    """The storage was told to keep no copies before."""
    cell = a_cell(reads_no_parts="it has sinks", keeps_sparse=True)
    cell.reads_no_parts = ""
    cell.add_worker("later", pages=8)
    cell.drain()

    assert [(component, what) for component, what, _ in told(cell)] == [("w", "importance"), ("s", "importance")]
