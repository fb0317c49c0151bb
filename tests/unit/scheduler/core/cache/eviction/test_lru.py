"""LRU on a fixed trace."""

import pytest

from services.scheduler.core import status
from shared.messages.cell_events import CellConfig
from tests.stateful.cell_model import CellModel

# Which of nine prompts, of two pages each, is asked for next; written once, never to change.
TRACE = [0, 1, 2, 3, 0, 1, 4, 0, 5, 6, 0, 1, 2, 7, 0, 3, 8, 1, 0, 4, 2, 5, 0, 1, 6, 6, 0, 7, 3, 1, 0, 2, 8, 8, 0, 1]


def hits(capacity_prompts: int) -> tuple[list[int], dict[str, int]]:
    """Cached tokens of each request of the trace, on a device that holds so many prompts beside the running one."""
    cell = CellModel(CellConfig(policy="lru", lease_tokens=1, reserve_fraction=0.0), page_size=4)
    cell.add_worker("worker", pages=2 * capacity_prompts + 3)
    for prompt in TRACE:
        cell.serve([prompt + 1] * 8 + [100], max_tokens=1)
    return [admitted.cached_tokens for admitted in cell.admitted], status(cell.state, "x").counters


def reference(capacity_prompts: int) -> list[int]:
    """The same by a list in order of use."""
    order: list[int] = []
    found = []
    for prompt in TRACE:
        found.append(8 if prompt in order else 0)
        order = [other for other in order if other != prompt] + [prompt]
        # The running request needs a page of its own beside its two; the rest of the pool holds older prompts.
        order = order[-(capacity_prompts + 1) :]
    return found


@pytest.mark.parametrize(("capacity", "golden"), [(1, 2), (2, 6), (3, 13), (5, 17), (8, 27)])
def test_golden_hits_of_the_fixed_trace(capacity: int, golden: int) -> None:
    """The number of hits on the trace is what it always was."""
    found, counters = hits(capacity)

    assert sum(hit > 0 for hit in found) == golden
    assert found == reference(capacity)
    assert counters["hit_tokens_device"] == sum(found)
