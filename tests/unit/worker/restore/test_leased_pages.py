"""Chunks go into leased pages whole and sealed, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from services.worker.restore.leased_pages import LeasedPages, LeasedRun, SavedHidden, lease_fault
from services.worker.restore.pieces import PieceRows
from shared.errors import IntegrityError, InvariantViolated
from shared.memory import HostPoolView
from shared.messages.base import pack_int32
from tests.unit.worker.pools import GEOMETRY, host_pool, identity_of
from tests.unit.worker.restore.hidden_pages import hidden_geometry
from tests.unit.worker.restore.saved_hidden import ROOT, identities_of

HIDDEN_GEOMETRY = hidden_geometry(GEOMETRY, 1, 1, 8)
ROW_BYTES = HIDDEN_GEOMETRY.unit_bytes // HIDDEN_GEOMETRY.page_size
TOKENS = list(range(1, 300))


class Leased:
    """Pages of one lease over a pool of 48."""

    def __init__(self, host: HostPoolView, pages: list[int], depth: int = 0) -> None:
        self.answers: list[SavedHidden] = []
        self.pages = LeasedPages(self.answers.append)
        before = identities_of(TOKENS, 4)[depth // 4 - 1] if depth else ROOT
        self.pages.open("a", LeasedRun(7, host, depth, pages, before, TOKENS))

    def take(self, first: int, tokens: int = 64) -> bool:
        return self.pages.take(PieceRows("a", first, rows_of(first, tokens)))


def rows_of(first: int, tokens: int) -> np.ndarray:
    """Rows that tell unit and position."""
    rows = np.zeros((HIDDEN_GEOMETRY.units, tokens, ROW_BYTES), dtype=np.uint8)
    rows[:, :, 0] = np.arange(HIDDEN_GEOMETRY.units)[:, None]
    rows[:, :, 1], rows[:, :, 2] = np.arange(first, first + tokens) % 256, np.arange(first, first + tokens) // 256
    return rows


@pytest.fixture
def host() -> Iterator[HostPoolView]:
    """A pool of three chunks."""
    with host_pool(48, HIDDEN_GEOMETRY) as made:
        yield made


def test_a_chunk_lies_page_by_page(host: HostPoolView) -> None:
    """In the pages of the lease in their order, whatever their numbers; names and seals go on from its parent."""
    pages = np.random.default_rng(1).permutation(48)[:32].tolist()
    leased = Leased(host, pages, depth=64)

    assert leased.take(64)
    assert leased.take(128)
    leased.pages.end("a")

    for number, page in enumerate(pages):
        first = 64 + 4 * number
        expected = rows_of(first, 4).reshape(HIDDEN_GEOMETRY.units, -1)
        np.testing.assert_array_equal(host.pages[page], expected)
        for unit in range(HIDDEN_GEOMETRY.units):
            host.verify_layer(page, unit, identities_of(TOKENS, 4)[first // 4])
    assert leased.answers == [SavedHidden(7, 2, pack_int32(TOKENS[64:192]))]


def test_a_tail_is_let_go(host: HostPoolView) -> None:
    """It is no whole chunk; no page of it is sealed."""
    leased = Leased(host, list(range(32)))

    assert leased.take(0)
    assert leased.take(64, tokens=63)
    leased.pages.end("a")

    assert leased.answers == [SavedHidden(7, 1, pack_int32(TOKENS[:64]))]
    assert not host.identities[16:].any()


def test_a_chunk_without_pages_is_refused(host: HostPoolView) -> None:
    """Pages of half a chunk are none; more of them make it whole."""
    leased = Leased(host, list(range(24)))
    assert leased.take(0)
    assert not leased.take(64)
    leased.pages.end("a")
    assert leased.answers == [SavedHidden(7, 1, pack_int32(TOKENS[:64]), lacked_pages=True)]

    leased = Leased(host, list(range(24)))
    assert leased.take(0)
    leased.pages.extend("a", range(24, 32))
    assert leased.take(64)
    leased.pages.end("a")
    assert leased.answers == [SavedHidden(7, 2, pack_int32(TOKENS[:128]))]


def test_a_page_that_is_being_written_verifies_as_nothing(host: HostPoolView, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as what it held before nor as what it was to hold."""
    host.pages[0] = 9
    host.seal_page(0, identity_of("before"))
    leased = Leased(host, list(range(16)))

    def fail(page: int, identity: bytes) -> None:
        raise OSError("killed here")

    monkeypatch.setattr(host, "seal_page", fail)
    with pytest.raises(OSError, match="killed"):
        leased.take(0)
    leased.pages.end("a")

    for identity in (identity_of("before"), identities_of(TOKENS, 4)[0]):
        with pytest.raises(IntegrityError):
            host.verify_layer(0, 0, identity)
    assert leased.answers == [SavedHidden(7)]


def test_a_chunk_out_of_turn_is_a_mistake(host: HostPoolView) -> None:
    """It would be sealed under another chunk's name."""
    leased = Leased(host, list(range(48)))

    with pytest.raises(InvariantViolated, match="out of turn"):
        leased.take(64)


def test_an_end_is_answered_once(host: HostPoolView) -> None:
    """Pages that come later are nobody's."""
    leased = Leased(host, list(range(16)))

    leased.pages.end("a")
    leased.pages.extend("a", [20])
    leased.pages.end("a")

    assert leased.answers == [SavedHidden(7)]


@pytest.mark.parametrize(
    ("depth", "parent", "pages", "fault"),
    [
        (64, bytes(16), [0, 47], ""),
        (0, bytes(16), [], ""),
        (32, bytes(16), [0], "begins at token 32"),
        (-64, bytes(16), [0], "begins at token -64"),
        (0, b"", [0], "no identity"),
        (0, bytes(16), [0, 48], "outside the pool"),
        (0, bytes(16), [-1], "outside the pool"),
    ],
)
def test_a_senseless_lease_is_said(host: HostPoolView, depth: int, parent: bytes, pages: list[int], fault: str) -> None:
    """Before anything is written under it."""
    found = lease_fault(depth, parent, pages, host)

    assert fault in found
    assert bool(found) == bool(fault)
