"""The split of workloads into those to develop with and those held out."""

from fractions import Fraction

import pytest

from bench.held_out import HELD_OUT_FAMILIES, REPORT_SEEDS, SPENT_SEEDS, HeldOutError, is_held_out, requests_of
from thermocline.simulate.workloads import WORKLOADS


def test_a_third_is_held_out() -> None:
    """Of all families and seeds, two families whole and every sixth seed of the others."""
    cells = [(family, seed) for family in WORKLOADS for seed in range(60)]

    assert Fraction(sum(is_held_out(*cell) for cell in cells), len(cells)) == Fraction(1, 3)
    assert set(HELD_OUT_FAMILIES) < set(WORKLOADS)


@pytest.mark.parametrize(("family", "seed"), [("tenants", 1), ("drift", 5), ("agents", 6), ("chat", 12)])
def test_development_is_refused_what_is_held_out(family: str, seed: int) -> None:
    """Only the report gets it."""
    with pytest.raises(HeldOutError, match=family):
        requests_of(family, seed)


@pytest.mark.parametrize("seed", SPENT_SEEDS)
def test_a_report_is_refused_what_was_reported(seed: int) -> None:
    """Nobody can have been blind to it since."""
    with pytest.raises(HeldOutError, match="reported before"):
        requests_of("tenants", seed, is_report=True)


def test_the_next_report_is_on_held_out_seeds_that_are_not_spent() -> None:
    """All ten families are held out with each of them."""
    assert all(is_held_out(family, seed) for family in WORKLOADS for seed in REPORT_SEEDS)
    assert not set(REPORT_SEEDS) & set(SPENT_SEEDS)


@pytest.mark.parametrize("family", sorted(set(WORKLOADS) - set(HELD_OUT_FAMILIES)))
def test_a_workload_comes_in_order_of_time_and_repeats_itself(family: str) -> None:
    """The same seed gives the same requests, some of whose blocks are asked for again."""
    requests = requests_of(family, 1)
    times = [request.time_ns for request in requests]
    blocks = [block for request in requests for block in request.blocks]

    assert requests == requests_of(family, 1)
    assert times == sorted(times)
    assert len(set(blocks)) < len(blocks)
