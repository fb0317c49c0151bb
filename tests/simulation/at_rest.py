"""How much the core remembers when nothing is under way: nothing of what is over, and little beside what is there."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from services.scheduler.core import CellState
from services.scheduler.core.cache.prompt_blocks import MOST_BLOCKS
from services.scheduler.core.step import MOST_GATEWAYS
from tests.simulation.contents import require

EMPTY = (
    "fetches",
    "late_reads",
    "leases",
    "pins",
    "requests",
    "roomy",
    "saves",
    "hidden_fetches",
    "hidden_saves",
    "storages.*.fetching.ahead",
    "storages.*.fetching.due",
    "storages.*.fetching.chunks",
    "storages.*.disk.saving",
    "storages.*.hidden.saving",
    "tenants",
    "timers",
    "transfers",
    "transient.marks",
    "transient.tree.nodes",
    "unplaced",
    "unwanted",
    "waiters",
    "workers.*.work.batches",
    "workers.*.line.deferred",
    "workers.*.lease_waits",
    "workers.*.line.load_waiters",
    "workers.*.work.running",
    "workers.*.line.queue.levels.*.lanes",
)
"""Collections that speak only of what is under way."""

BOUNDED = {
    "blocks": MOST_BLOCKS,
    "counters": 1_000,
    "ended": 4_096,
    "gateways": MOST_GATEWAYS,
    "storages.*.disk.taken": 16_384,
}
"""Collections with a bound of their own."""

EACH, MORE = 8, 128
"""Every other collection has at most so many entries for each node, chunk, worker and storage, and some."""


def check_sizes(state: CellState) -> None:
    """Raise :class:`Broken` where a collection is larger than what there is can explain."""
    chunks = sum(
        len(storage.disk.chunks) + len(storage.hidden.chunks) + len(storage.sparse.chunks)
        for storage in state.storages.values()
    )
    there = len(state.tree.nodes) + len(state.tree.roots) + chunks + len(state.workers) + len(state.storages)
    for path, size in collections(state):
        limit = 0 if path in EMPTY else BOUNDED.get(path, MORE + EACH * there)
        require(size <= limit, f"state.{path} has {size} entries at rest, of at most {limit}")


def collections(value: object, path: str = "") -> Iterator[tuple[str, int]]:
    """Path and size of every dictionary and list in a structure; ``*`` stands for any key."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from collections(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, dict):
        yield path, len(value)
        for held in value.values():
            if isinstance(held, msgspec.Struct | dict | list):
                yield from collections(held, f"{path}.*")
    elif isinstance(value, list):
        yield path, len(value)
        for held in value:
            if isinstance(held, msgspec.Struct | dict | list):
                yield from collections(held, f"{path}.*")
