"""Views of a worker's layer-first pool."""

import numpy as np
import pytest

from shared.errors import TransportError
from shared.memory import DevicePoolView, SharedSegment
from shared.messages.pools import KvGeometry, PoolHandle

GEOMETRY = KvGeometry(layers=3, kv_heads=2, head_dim=8, page_size=4, dtype="float16")
PAGES = 7


@pytest.fixture
def segment(shm_prefix: str) -> SharedSegment:
    made = SharedSegment.create(shm_prefix, "device", PAGES * GEOMETRY.page_bytes)
    made.array[:] = np.random.default_rng(0).integers(0, 256, made.nbytes, dtype=np.uint8)
    return made


def _handle(segment: SharedSegment, **change: object) -> PoolHandle:
    fields = {
        "kind": "shm",
        "layout": "layer_first",
        "name": segment.name,
        "nbytes": segment.nbytes,
        "pages": PAGES,
        "geometry": GEOMETRY,
    } | change
    return PoolHandle(**fields)  # type: ignore[arg-type]


def test_the_view_has_the_documented_shape(segment: SharedSegment) -> None:
    """Half ``h`` of page ``p`` in layer ``l`` lies at ((l * 2 + h) * pages + p) * half_bytes."""
    view = DevicePoolView.attach(_handle(segment))

    start = ((2 * 2 + 1) * PAGES + 5) * GEOMETRY.half_bytes
    assert view.halves.shape == (3, 2, PAGES, GEOMETRY.half_bytes)
    assert (view.halves[2, 1, 5] == segment.array[start : start + GEOMETRY.half_bytes]).all()


def test_nobody_but_the_worker_writes_kv(segment: SharedSegment) -> None:
    """The view is read-only unless its maker says otherwise."""
    view = DevicePoolView.attach(_handle(segment))

    assert not view.halves.flags.writeable
    assert DevicePoolView.attach(_handle(segment), writable=True).halves.flags.writeable


def test_a_run_is_copied_into_page_first_order(segment: SharedSegment) -> None:
    """copy_run moves K then V of every layer of each page, and nothing else."""
    view = DevicePoolView.attach(_handle(segment))
    host = np.zeros((10, 3, 2 * GEOMETRY.half_bytes), np.uint8)

    view.copy_run((2, 6, 3), host)

    for offset in range(3):
        for layer in range(3):
            expected = np.concatenate([view.halves[layer, 0, 2 + offset], view.halves[layer, 1, 2 + offset]])
            assert (host[6 + offset, layer] == expected).all()
    assert not host[:6].any()
    assert not host[9:].any()


def test_the_view_outlives_its_owner(segment: SharedSegment) -> None:
    """After the owner unlinks and unmaps, a mapping made before still reads; closing it gives it back."""
    view = DevicePoolView.attach(_handle(segment))
    expected = segment.array.copy()
    segment.unlink()
    segment.close()

    assert (view.halves.reshape(-1) == expected).all()
    assert view.close()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "cuda_ipc"},
        {"layout": "page_first"},
        {"pages": PAGES + 1},
        {"pages": 0},
        {"name": "gone"},
        {"nbytes": 1},
    ],
    ids=str,
)
def test_a_handle_that_cannot_be_mapped_is_refused(segment: SharedSegment, change: dict[str, object]) -> None:
    """Other kinds, other layouts and sizes that disagree are TransportErrors."""
    with pytest.raises(TransportError):
        DevicePoolView.attach(_handle(segment, **change))
