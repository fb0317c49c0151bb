"""What is cached, node by node."""

from services.scheduler.core import list_cache
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.status import ListCache
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import prompt
from tests.unit.scheduler.core.saving_hidden import saving_cell


def test_chunks_are_listed_by_form(make_cell: MakeCell) -> None:
    """Those that end in a node, by the storage that has their KV or their state."""
    cell = saving_cell(make_cell)
    cell.submit(prompt(2), max_tokens=1)
    cell.drain()
    cell.feed(CellConfigured(config=CellConfig(restoring="kv", state_form="0/1/0")))
    cell.submit([*prompt(2, tail=0), *range(500, 570)], max_tokens=1)
    cell.drain()

    nodes = list_cache(cell.state, ListCache()).nodes

    assert [(node.depth, node.disk, node.state) for node in nodes] == [
        (0, {"storage": 2}, {"storage": 2}),
        (128, {"storage": 1}, {}),
    ]
