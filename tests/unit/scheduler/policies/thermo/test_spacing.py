"""Picked tokens are about evenly spaced."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.policies.thermo.spacing import Spacing


@pytest.mark.parametrize("size", [1, 7, 40])
def test_one_token_in_so_many_is_picked(size: int) -> None:
    """Whatever pieces the tokens come in, as long as those are smaller than the spacing."""
    spacing = Spacing()

    picked = sum(spacing.picks(size, 100.0) for _ in range(100_000 // size))

    assert picked == pytest.approx(1000, rel=0.05)


def test_goes_on_from_a_snapshot() -> None:
    """The same pieces are picked by one that was encoded and decoded."""
    spacing = Spacing()
    for _ in range(50):
        spacing.picks(3, 10.0)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(spacing), type=Spacing)

    assert [copy.picks(3, 10.0) for _ in range(200)] == [spacing.picks(3, 10.0) for _ in range(200)]
