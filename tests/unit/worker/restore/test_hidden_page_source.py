"""Units of hidden pages are read as they were saved, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.restore import hidden_page_source
from services.worker.restore.hidden_page_source import HiddenOfPages, HiddenPages, KvOfPages
from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.refusals import PiecesRefused
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry
from tests.run_name import shm_prefix

MIXED = KvGeometry(layers=4, kv_heads=2, head_dim=4, page_size=4, dtype="float32", hidden=8, absent=1, from_hidden=2)
"""Layer 0 is absent, layers 1 and 2 are hidden states (units 0 and 1), layer 3 is K and V (units 2 and 3)."""
WIDE = KvGeometry(layers=4, kv_heads=2, head_dim=64, page_size=4, dtype="bfloat16", hidden=128, absent=1, from_hidden=2)
"""The same with units that are long enough for the C code."""
HELD = [6, 0, 3]


class Pool:
    """A hidden pool with three pages of random bytes in order of :data:`HELD`."""

    def __init__(self, geometry: KvGeometry) -> None:
        self.view = HostPoolView.create(shm_prefix("hidden"), geometry, 8)
        random = np.random.default_rng(1)
        self.view.pages[:] = random.integers(0, 256, self.view.pages.shape, dtype=np.uint8)
        self.identities = random.integers(1, 256, (3, 16), dtype=np.uint8)
        for page, identity in zip(HELD, self.identities, strict=True):
            self.view.seal_page(page, identity.tobytes())

    def pages(self) -> HiddenPages:
        return HiddenPages(self.view, np.array(HELD, dtype=np.int32), self.identities)

    def close(self) -> None:
        self.view.unlink()
        self.view.close()


@pytest.fixture(params=["narrow", "wide", "without C code"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Units that the C code is too good for, units that it copies, and a machine without a compiler."""
    if request.param == "without C code":
        monkeypatch.setattr(hidden_page_source, "native_rows", lambda: None)
    made = Pool(MIXED if request.param == "narrow" else WIDE)
    yield made
    made.close()


def room(geometry: KvGeometry, tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, geometry.hidden, dtype=HiddenShape(4, geometry.hidden, geometry.dtype).torch_dtype)


@pytest.mark.parametrize(("start", "end"), [(0, 12), (4, 8), (1, 11), (5, 6)])
def test_hidden_states_are_read(pool: Pool, start: int, end: int) -> None:
    """Of any rows, whole pages or not, in the order of the tokens."""
    source = HiddenOfPages(pool.pages())
    for layer, unit in ((1, 0), (2, 1)):
        into = room(pool.view.geometry, end - start)

        source.read(layer, start, end, into)

        held = np.concatenate([pool.view.pages[page, unit].reshape(4, -1) for page in HELD])
        assert (into.view(torch.uint8).numpy() == held[start:end]).all()
    assert source.tokens == 12


def test_kv_is_loaded_into_its_pages(pool: Pool) -> None:
    """K and V of each hidden page go to the device page of the same place; nothing else is written."""
    geometry = pool.view.geometry
    device = DevicePool.create(geometry.as_kv, 5, device="cpu", shm_prefix=shm_prefix("hidden"))
    source = KvOfPages(pool.pages(), device, np.array([2, 4, 0], dtype=np.int32))

    source.load(3)
    source.drain()

    rows = device.bytes_view()
    for page, device_page in zip(HELD, [2, 4, 0], strict=True):
        assert (rows[3, 0, device_page] == pool.view.pages[page, 2]).all()
        assert (rows[3, 1, device_page] == pool.view.pages[page, 3]).all()
    assert not rows[:3].any()
    assert not rows[3, :, [1, 3]].any()
    assert source.fence() is None
    device.close()


@pytest.mark.parametrize("unit", range(4))
def test_an_altered_unit_is_refused_and_no_other(pool: Pool, unit: int) -> None:
    """One flipped bit stops the reading of its own unit alone."""
    pool.view.pages[HELD[1], unit, 5] ^= 1
    geometry = pool.view.geometry
    device = DevicePool.create(geometry.as_kv, 3, device="cpu", shm_prefix=shm_prefix("hidden"))
    hidden = HiddenOfPages(pool.pages())
    kv = KvOfPages(pool.pages(), device, np.arange(3, dtype=np.int32))
    reads: list[Callable[[], None]] = [
        lambda: hidden.read(1, 0, 12, room(geometry, 12)),
        lambda: hidden.read(2, 0, 12, room(geometry, 12)),
        lambda: kv.load(3),
    ]

    for place, read in enumerate(reads):
        if place == min(unit, 2):
            with pytest.raises(PiecesRefused, match=f"unit {unit} of hidden page 0 is not what was saved"):
                read()
        else:
            read()
    device.close()


def test_pages_of_others_are_refused(pool: Pool) -> None:
    """Another identity, a page outside the pool, or no page at all."""
    wrong = pool.identities.copy()
    wrong[2, 15] ^= 1

    with pytest.raises(PiecesRefused, match="hidden page 3 holds something else"):
        HiddenPages(pool.view, np.array(HELD, dtype=np.int32), wrong)
    for pages in ([6, 0, 8], [6, -1, 3], []):
        with pytest.raises(PiecesRefused, match="outside the pool"):
            HiddenPages(pool.view, np.array(pages, dtype=np.int32), pool.identities[: len(pages)])
    with pytest.raises(PiecesRefused, match="2 identities"):
        HiddenPages(pool.view, np.array(HELD, dtype=np.int32), pool.identities[:2])


def test_a_page_that_is_given_away_is_noticed(pool: Pool) -> None:
    """Cleared and sealed anew after the first look: the last look fails."""
    pages = pool.pages()
    pool.view.clear(HELD[2])

    with pytest.raises(PiecesRefused, match="hidden page 3"):
        pages.confirm()
    pool.view.seal_page(HELD[2], b"another identity")
    with pytest.raises(PiecesRefused, match="hidden page 3"):
        pages.confirm()


def test_layers_that_pages_do_not_hold_are_refused(pool: Pool) -> None:
    """Absent layers, KV for a hidden layer, hidden states of a loaded one or of another width."""
    geometry = pool.view.geometry
    device = DevicePool.create(geometry.as_kv, 3, device="cpu", shm_prefix=shm_prefix("hidden"))
    hidden = HiddenOfPages(pool.pages())
    kv = KvOfPages(pool.pages(), device, np.arange(3, dtype=np.int32))

    for layer in (0, 3):
        with pytest.raises(PiecesRefused, match=f"in layer {layer}"):
            hidden.read(layer, 0, 12, room(geometry, 12))
    with pytest.raises(PiecesRefused, match="hold no hidden states"):
        hidden.read(1, 0, 12, room(geometry, 12)[:, :4])
    for layer in (0, 2):
        with pytest.raises(PiecesRefused, match=f"KV of layer {layer}"):
            kv.load(layer)
    device.close()


def test_a_part_is_a_source_of_its_own(pool: Pool) -> None:
    """Pages [1, 3) of three: their tokens count from 0."""
    into = room(pool.view.geometry, 8)

    HiddenOfPages(pool.pages().part(1, 3)).read(1, 0, 8, into)

    held = np.concatenate([pool.view.pages[page, 0].reshape(4, -1) for page in HELD[1:]])
    assert (into.view(torch.uint8).numpy() == held).all()
