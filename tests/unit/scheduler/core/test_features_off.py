"""Features that are off run no code: hidden states, lossy prefixes, quotas and explanations."""

from typing import Any

import pytest

from services.scheduler.core import check_invariants
from shared.messages.cell_events import CellConfig
from tests.stateful import cell_model
from tests.stateful.cell_model import CellModel
from tools.structure import PACKAGE, PlainCell, calls_of

OPTIONAL = ("hidden", "sparse", "quotas", "explain")
"""Packages of the core that a cell may do without."""


def packages_of(modules: Any) -> Any:
    """The packages of the core that these modules lie in."""
    return {module.removeprefix(f"{PACKAGE}.").partition(".")[0] for module in modules}


def test_a_plain_request_runs_no_code_of_a_feature() -> None:
    """From acceptance to its end; nobody joins or leaves either, and nothing comes back from below."""
    ran = packages_of(calls_of(PlainCell().run))

    assert ran.isdisjoint({*OPTIONAL, "members", "restoring"})
    assert {"fold", "queue", "cache"} <= ran


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> CellModel:
    """A worker and host memory that hold less than a dozen prompts; nothing explains and nothing checks."""
    monkeypatch.setattr(cell_model, "check_invariants", lambda state: None)
    cell = CellModel(CellConfig(lease_tokens=4), page_size=2)
    cell.state.recollection = None
    cell.add_storage("storage", pages=24)
    cell.add_worker("worker", pages=30)
    cell.drain()
    return cell


def test_copies_in_host_memory_need_none_of_them(crowded: CellModel) -> None:
    """Backups, evictions, loads and the loss of a worker are no feature's business."""

    def run() -> None:
        for number in (*range(12), *range(12)):
            crowded.serve([number] * 20 + [1, 2, 3], max_tokens=3)
        crowded.lose_worker("worker")

    ran = packages_of(calls_of(run))

    assert crowded.state.counters["backups_done"] > 0
    assert crowded.state.counters["loads_started"] > 0
    assert ran.isdisjoint(OPTIONAL)
    check_invariants(crowded.state)
