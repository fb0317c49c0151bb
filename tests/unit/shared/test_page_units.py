"""Pages are hashed and copied alike by C code and by Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from structlog.testing import capture_logs

from shared.errors import InvariantViolated
from shared.ids import DIGEST_BYTES
from shared.native import build, page_units
from shared.native.page_units import MIN_HASHED_BYTES, hash_pages, native_hash

SHAPES = [(4, 12, 16_384), (5, 1, MIN_HASHED_BYTES), (3, 2, 1024), (4, 3, MIN_HASHED_BYTES - 1), (2, 2, 1), (0, 2, 512)]
"""Pages, units and bytes of a unit; the C code takes no units shorter than ``MIN_HASHED_BYTES``."""


@pytest.fixture(params=["native", "portable"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who hashes."""
    if request.param == "portable":
        monkeypatch.setattr(page_units, "native_hash", lambda: None)
    elif shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return str(request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_units_are_hashed_by_their_pages_and_copied_where_they_are_wanted(
    way: str, shape: tuple[int, int, int], offset: int
) -> None:
    """Each checksum is xxhash's, seeded by the page's identity; pages that are not wanted are hashed only."""
    pages, units, unit_bytes = shape
    random = np.random.default_rng(3)
    source = random.integers(0, 256, shape, dtype=np.uint8)
    identities = random.bytes(DIGEST_BYTES * pages)
    places = np.array([*range(pages, 0, -1)], np.int32)
    places[: pages // 2] = -1
    nbytes = (pages + 2) * units * unit_bytes
    target = np.full(nbytes + offset, 7, np.uint8)[offset:].reshape(pages + 2, units, unit_bytes)
    before = target.copy()

    assert (page_units.native_hash() is not None) == (way == "native")
    found = hash_pages(source, identities, target, places)

    for page in range(pages):
        seed = int.from_bytes(identities[DIGEST_BYTES * page :][:8], "little")
        assert found[page].tolist() == [
            xxhash.xxh3_64_intdigest(source[page, unit].tobytes(), seed=seed) for unit in range(units)
        ]
    wanted = {int(place): page for page, place in enumerate(places) if place >= 0}
    for place in range(pages + 2):
        assert np.array_equal(target[place], source[wanted[place]] if place in wanted else before[place])
    assert np.array_equal(hash_pages(source, identities), found)


@pytest.mark.parametrize("places", [[0, 2], [0], [-1, 5]])
def test_places_that_the_target_lacks_are_refused(way: str, places: list[int]) -> None:
    """C code would write behind its end."""
    target = np.zeros((2, 2, 512), np.uint8)

    with pytest.raises(InvariantViolated):
        hash_pages(np.ones((2, 2, 512), np.uint8), bytes(2 * DIGEST_BYTES), target, np.array(places, np.int32))

    assert not target.any()


@pytest.mark.parametrize("fault", ["no compiler", "other checksums"])
def test_without_the_c_code_there_is_a_shortfall_to_tell_of(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is announced once, with the reason."""
    monkeypatch.setattr(build, "missing", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if fault == "no compiler":
        monkeypatch.setenv("CC", "/nowhere/cc")
    else:
        monkeypatch.setattr(page_units, "_agrees", lambda native: False)
        if shutil.which("cc") is None:
            pytest.skip("needs a C compiler")

    with capture_logs() as logged:
        assert native_hash.__wrapped__() is None

    assert [(each["event"], each["library"]) for each in logged] == [("native_code_missing", "page_units")]
    assert list(build.missing) == ["page_units"]
