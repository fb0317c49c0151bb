"""Cells to test decisions on."""

from typing import Any

import pytest

from shared.messages.cell_events import CellConfig
from shared.messages.worker_events import RestorationCosts
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.restoring_cells import restoring_cell
from tests.unit.scheduler.core.saving_hidden import saving_cell


@pytest.fixture
def make_cell() -> MakeCell:
    """Build a cell with one worker and, unless ``host_pages`` is 0, a storage whose pool is ready.

    What leaves a pool next is least recently used, so that a test can tell what it will be.
    """

    def make(
        *,
        page_size: int = 4,
        pages: int = 32,
        host_pages: int = 0,
        workers: int = 1,
        disk_chunks: int = 0,
        has_remote: bool = False,
        hidden_pages: int = 0,
        costs: RestorationCosts | None = None,
        reads_no_parts: str = "",
        keeps_sparse: bool = False,
        disk_bytes_per_s: float = 1e9,
        shapes: bytes = b"",
        **config: Any,
    ) -> CellModel:
        settings: dict[str, Any] = {"policy": "lru", "lease_tokens": 4, "reserve_fraction": 0.0}
        cell = CellModel(CellConfig(**settings | config), page_size=page_size)
        cell.restoration, cell.reads_no_parts = costs, reads_no_parts
        if host_pages:
            cell.add_storage(
                "storage",
                pages=host_pages,
                disk_chunks=disk_chunks,
                has_remote=has_remote,
                hidden_pages=hidden_pages,
                keeps_sparse=keeps_sparse,
                disk_bytes_per_s=disk_bytes_per_s,
                shapes=shapes,
            )
        for number in range(workers):
            cell.add_worker(f"worker-{number}", pages=pages)
        cell.drain()
        return cell

    return make


@pytest.fixture
def make_restoring_cell(make_cell: MakeCell) -> MakeCell:
    """Build a cell whose disk may hold hidden states, which it brings back."""
    return lambda **settings: restoring_cell(make_cell, **settings)


@pytest.fixture
def make_saving_cell(make_cell: MakeCell) -> MakeCell:
    """Build a cell that saves hidden states."""
    return lambda **settings: saving_cell(make_cell, **settings)
