"""What a status must say of a cell that nobody asks any more."""

import msgspec

from shared.messages.status import CellStatus, PoolStatus, WorkerStatus
from thermocline.chaos.at_rest import unrest

QUIET = CellStatus(
    scheduler_id="s",
    epoch=1,
    seq=9,
    model="m",
    page_size=16,
    queued=0,
    running=0,
    max_queued=9,
    max_context=64,
    workers=(WorkerStatus(worker_id="w", incarnation="i", running=0, waiting=0),),
    pools=(PoolStatus(owner="w", tier="device", total=8, free=3, cached=5, leased=0),),
)


def test_free_and_cached_pages_are_at_rest() -> None:
    """Nothing is wrong with a full cache."""
    assert unrest(QUIET) == []


def test_whatever_still_goes_on_is_named() -> None:
    """Each count, each worker, each pool."""
    leaking = PoolStatus(owner="w", tier="host", total=8, free=3, cached=4, leased=1)
    missing = PoolStatus(owner="w", tier="device", total=8, free=3, cached=4, leased=0)
    busy = WorkerStatus(worker_id="w", incarnation="i", running=1, waiting=0)

    found = unrest(msgspec.structs.replace(QUIET, fetches=2, pools=(leaking, missing), workers=(busy,)))

    assert len(found) == 4
    assert found[0] == "2 fetches"
    assert "host: 1 leased" in found[1]
    assert "device: 0 leased, 3 free, 4 cached of 8" in found[2]
    assert found[3] == "w: 1 running, 0 waiting"
