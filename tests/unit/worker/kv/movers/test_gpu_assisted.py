"""The GPU-assisted mover on streams that are late: nothing is declared loaded before it has arrived and was checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.layer_gate import LayerGate
from services.worker.kv.loads import Loads
from services.worker.kv.movers.gpu_assisted import GpuAssistedMover
from services.worker.kv.movers.piece_slots import SLOTS
from services.worker.kv.promotions import Promoted
from services.worker.kv.row_checks import RowChecks
from services.worker.kv.verification import Verification
from shared.memory import HostPoolView
from shared.messages.base import unpack_int32
from shared.messages.pools import KvGeometry
from tests.cuda.late_streams import late_streams
from tests.unit.worker.pools import SHM_PREFIX, PlayedPins, host_pool, made_loads, page_load, page_promotion

GEOMETRY = KvGeometry(layers=3, kv_heads=2, head_dim=16, page_size=4, dtype="float32")
PAGES = 20


@pytest.fixture
def host() -> Iterator[HostPoolView]:
    with host_pool(PAGES, GEOMETRY, [f"page-{page}" for page in range(PAGES)]) as view:
        yield view


@pytest.fixture
def device() -> Iterator[DevicePool]:
    pool = DevicePool.create(GEOMETRY, PAGES, device="cpu", shm_prefix=SHM_PREFIX)
    yield pool
    pool.close()


@pytest.fixture
def mover(device: DevicePool) -> Iterator[GpuAssistedMover]:
    with late_streams():
        made = GpuAssistedMover(device)
        made.piece_pages = 2
        yield made


@pytest.fixture
def loads(host: HostPoolView, mover: GpuAssistedMover) -> Iterator[Loads]:
    made = make_loads(mover)
    made.attach("s", host.handle)
    yield made
    made.close()


def make_loads(mover: GpuAssistedMover, geometry: KvGeometry = GEOMETRY, **options: Any) -> Loads:
    return made_loads(geometry, PAGES, mover, pins=PlayedPins(), **options)


def on_device(pool: DevicePool, page: int, layer: int) -> np.ndarray:
    row: np.ndarray = pool.memory().host_rows()[page, layer].reshape(-1)
    return row


def everything(pages: int = PAGES) -> Any:
    """A load of host page p to device page ``pages - 1 - p``."""
    return page_load(range(pages), range(pages - 1, -1, -1), [f"page-{page}" for page in range(pages)])


def released(monkeypatch: pytest.MonkeyPatch, device: DevicePool, host: HostPoolView) -> list[tuple[int, bool, str]]:
    """Filled at each release: the layer, whether its bytes are there, and why the gate is closed."""
    seen: list[tuple[int, bool, str]] = []
    release = LayerGate.release

    def watched(gate: LayerGate, layer: int) -> None:
        there = all(
            (on_device(device, PAGES - 1 - page, layer) == host.pages[page, layer]).all() for page in range(PAGES)
        )
        seen.append((layer, there, gate.rejected or ""))
        release(gate, layer)

    monkeypatch.setattr(LayerGate, "release", watched)
    return seen


def test_a_layer_is_declared_loaded_when_its_bytes_are_there(
    host: HostPoolView, device: DevicePool, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pieces than slots, each with numbers of its own."""
    assert PAGES // 2 > SLOTS
    seen = released(monkeypatch, device, host)

    result = loads.start([everything()]).finish()

    assert seen == [(0, True, ""), (1, True, ""), (2, True, "")]
    assert (result.failures, result.pages) == ([], PAGES)


def test_a_wrong_page_closes_the_gate_before_its_layer_is_declared(
    host: HostPoolView, device: DevicePool, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are on the device by then, as nothing is checked before it has arrived."""
    seen = released(monkeypatch, device, host)
    host.pages[13, 1, 5] ^= 1

    result = loads.start([everything()]).finish()

    assert [(layer, reason) for layer, _, reason in seen] == [
        (0, ""), (1, "checksum of layer 1"), (2, "checksum of layer 1"),
    ]  # fmt: skip
    (failure,) = result.failures
    assert unpack_int32(failure.host_pages) == [13]
    assert result.lost_pages == set(range(PAGES))
    assert (on_device(device, PAGES - 1 - 13, 1) == host.pages[13, 1]).all()


def test_what_nobody_checks_is_declared_when_it_is_there(
    host: HostPoolView, device: DevicePool, mover: GpuAssistedMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fence is behind copies as well as checks."""
    loads = make_loads(mover, verification=Verification("never"))
    loads.attach("s", host.handle)
    host.pages[3, 0, 0] ^= 1
    seen = released(monkeypatch, device, host)

    result = loads.start([everything()]).finish()

    assert seen == [(0, True, ""), (1, True, ""), (2, True, "")]
    assert result.failures == []
    loads.close()


def test_every_wrong_page_of_a_promotion_is_known(host: HostPoolView, loads: Loads) -> None:
    """The promotion fails, and nobody is told that its pages are there."""
    ended: list[Promoted] = []
    host.pages[2, 0, 0] ^= 1
    host.pages[5, 2, -1] ^= 1

    loads.promote(page_promotion(range(8), range(8), [f"page-{page}" for page in range(8)]), ended.append)

    (promoted,) = ended
    assert (promoted.is_ok, promoted.pages) == (False, 0)
    assert sorted(unpack_int32(promoted.bad_host_pages)) == [2, 5]


def test_a_verdict_waits_for_what_it_says(host: HostPoolView, mover: GpuAssistedMover, loads: Loads) -> None:
    """Nobody needs a fence to ask, and what was asked for later does not matter."""
    numbers = np.arange(PAGES, dtype=np.int32)
    checks = RowChecks(host.checksums[:, 1:2].copy(), host.identities, np.ones(PAGES, dtype=bool))
    checks.expected[[4, 19], 0] ^= np.uint64(1)
    source = loads.pools.find("s").memory()

    verdicts = [mover.load(source, range(1, 2), numbers, numbers[::-1].copy(), checks) for _ in range(2)]

    for verdict in reversed(verdicts):
        assert np.flatnonzero(verdict.wrong()).tolist() == [4, 19]


def test_rows_that_the_device_cannot_check_are_checked_before_they_are_copied(host: HostPoolView) -> None:
    """Rows of 240 bytes and fewer, and rows whose halves are no whole words."""
    for head_dim, page_size in ((15, 2), (16, 1), (5, 13)):
        geometry = KvGeometry(layers=2, kv_heads=1, head_dim=head_dim, page_size=page_size, dtype="bfloat16")
        pool = DevicePool.create(geometry, 3, device="cpu", shm_prefix=SHM_PREFIX)
        with host_pool(3, geometry, "abc") as small, late_streams():
            small.pages[1, 0, 0] ^= 1
            loads = make_loads(GpuAssistedMover(pool), geometry)
            loads.attach("s", small.handle)

            result = loads.start([page_load(range(3), range(3), "abc")]).finish()

            assert unpack_int32(result.failures[0].host_pages) == [1]
            assert not pool.memory().host_rows()[1, 0].any()
            assert (pool.memory().host_rows()[2].reshape(2, -1) == small.pages[2]).all()
            loads.close()
        pool.close()
