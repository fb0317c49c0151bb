"""Numbers in events that cannot be: whatever stands in them, the fold goes on and its invariants hold."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from services.scheduler.core import Stamped, check_invariants, decode_state, encode_state, new_state, step
from shared.messages import storage_events, worker_events
from shared.messages.pools import KvGeometry
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import prompt, put_on_disk
from tests.unit.scheduler.core.restoring_cells import put_hidden

INTEGERS = (-(2**63), -(2**31), -1, 0, 1, 2**31, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 1e308)
MOST_OF_A_KIND = 3
FOLLOWING = 8
EVENTS = (storage_events.__name__, worker_events.__name__)


def distorted(message: msgspec.Struct) -> Iterator[Any]:
    """Copies of a message, each with another value in one of its numbers, or in one of the structs that it holds."""
    for field in message.__struct_fields__:
        value = getattr(message, field)
        others: Iterable[Any] = ()
        if type(value) in (int, float):
            others = INTEGERS if type(value) is int else FLOATS
        elif isinstance(value, msgspec.Struct) and not isinstance(value, KvGeometry):
            others = distorted(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            others = ((other, *value[1:]) for other in distorted(value[0]))
        for other in others:
            if field != "pages" or other < 2**31 - 1 or other > 2**32:  # A pool takes a byte for each of its pages.
                yield msgspec.structs.replace(message, **{field: other})


def each_distorted(log: list[Stamped]) -> dict[str, int]:
    """Fold a log; each event of a worker or a storage is folded distorted in many ways before, in a copy of the state.

    Behind each, the copy takes the event itself, as one that comes again, and some of those that followed.
    """
    state = new_state()
    tried: dict[str, int] = {}
    for place, stamped in enumerate(log):
        kind = type(stamped.input)
        if kind.__module__ in EVENTS and tried.get(kind.__name__, 0) < MOST_OF_A_KIND:
            tried[kind.__name__] = tried.get(kind.__name__, 0) + 1
            before = encode_state(state)
            for message in distorted(stamped.input):
                copy = decode_state(before)
                step(copy, Stamped(stamped.seq, stamped.time_ns, message))
                check_invariants(copy)
                for following in log[place : place + FOLLOWING]:
                    step(copy, Stamped(following.seq + 1, following.time_ns, following.input))
                check_invariants(copy)
                decode_state(encode_state(copy))
        step(state, stamped)
    return tried


@pytest.fixture
def loading_cell(make_cell: MakeCell) -> CellModel:
    """A cell that backs up, saves, loads, promotes and fetches KV."""
    cell = make_cell(page_size=32, pages=12, host_pages=16, disk_chunks=20, prefetch_wait="full", promotion="hotness")
    put_on_disk(cell, prompt(2, kind=9))
    for kind in (9, 1, 2, 3, 1, 9):
        cell.serve(prompt(2, kind=kind), max_tokens=3)
    cell.lose_worker("worker-0")
    return cell


@pytest.fixture
def hidden_cell(make_restoring_cell: MakeCell) -> CellModel:
    """A cell that saves and restores hidden states."""
    cell = make_restoring_cell(disk_writes="through")
    put_hidden(cell, prompt(2))
    for kind in (1, 2):
        cell.serve(prompt(2, kind=kind), max_tokens=40, ignore_eos=True)
    return cell


def test_no_number_of_an_event_about_kv_breaks_an_invariant(loading_cell: CellModel) -> None:
    """Joins, pools, backups, saves, fetches, batches and ends, each with numbers that cannot be."""
    tried = each_distorted(loading_cell.log)

    assert {"WorkerJoined", "StorageJoined", "HostPoolCreated", "BackupDone", "ChunksSaved", "ChunksFetched"} <= {
        *tried
    }
    assert {"BatchDone", "RequestFinished"} <= {*tried}


def test_no_number_of_an_event_about_hidden_states_breaks_an_invariant(hidden_cell: CellModel) -> None:
    """Profiles, leases and fetches of hidden states, each with numbers that cannot be."""
    tried = each_distorted(hidden_cell.log)

    assert {"WorkerJoined", "HiddenSaved", "ChunksFetched", "ChunksSaved"} <= {*tried}
