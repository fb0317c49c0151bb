"""Axes of a sweep: what they are read from, what is refused, and which simulations they make."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from thermocline.simulate.__main__ import parse
from thermocline.simulate.axes import FIXED, MOST_RUNS, OPTIONS, read_axes, runs_of


def test_values_have_the_type_of_their_flag() -> None:
    """Flags by their names, with dashes or without; capacity is the devices' pool; others numbers where they can be."""
    given = ["policy=lru,sieve", "capacity=100,200", "backup-share=0.5,1", "lease_tokens=8,16", "promotion=a,1"]
    axes = read_axes(given)

    assert [(axis.key, axis.values) for axis in axes] == [
        ("policy", ("lru", "sieve")),
        ("device_tokens", (100, 200)),
        ("backup_share", (0.5, 1.0)),
        ("lease_tokens", (8, 16)),
        ("promotion", ("a", "1")),
    ]
    assert [axis.is_number for axis in axes] == [False, True, True, True, False]


def test_one_value_has_no_axis() -> None:
    """A chart needs two places at least."""
    (axis,) = read_axes(["capacity=100"])

    assert not axis.is_number


def test_every_flag_can_be_swept_or_is_refused_by_name() -> None:
    """A flag that is added or renamed is here as well, so none is taken for a setting of the cell."""
    assert sorted([*OPTIONS, *FIXED]) == sorted(vars(parse([])))
    for name in FIXED:
        with pytest.raises(ConfigError, match=f"{name} cannot be swept; of the flags only policy, "):
            read_axes([f"{name}=1,2"])


def test_every_combination_is_run_in_order() -> None:
    """The last setting changes fastest; what is swept replaces what the line says, and the rest stays."""
    options = parse(["--policy", "fifo", "--seed", "7", "--set", "lease_tokens=4", "--sweep", "policy=lru,sieve"])
    runs = runs_of(options, read_axes(["policy=lru,sieve", "lease_tokens=8,16"]))

    assert [str(run) for run in runs] == [
        "policy=lru, lease_tokens=8",
        "policy=lru, lease_tokens=16",
        "policy=sieve, lease_tokens=8",
        "policy=sieve, lease_tokens=16",
    ]
    assert [(run.options.policy, run.options.settings) for run in runs][1] == ("lru", ["lease_tokens=16"])
    assert {run.options.seed for run in runs} == {7}
    assert options.settings == ["lease_tokens=4"]


@pytest.mark.parametrize(
    ("assignments", "complaint"),
    [
        (["policy"], "--sweep policy: must be key=value,value"),
        (["policy=lru,"], "must be key=value,value"),
        (["=1"], "must be key=value,value"),
        (["capacity=10,many"], "--sweep capacity=10,many: must be whole numbers"),
        (["capacity=10,1.5"], "must be whole numbers"),
        (["time_scale=fast"], "must be numbers"),
        (["capacity=10,10"], "a value is given twice"),
        (["capacity=10,010"], "a value is given twice"),
        (["capacity=10", "device-tokens=20"], "device_tokens is swept twice"),
        (["io=assisted,by-hand"], "'by-hand' is none of assisted, per-page"),
        (["kv-dtype=auto,fp4"], "'fp4' is none of auto, fp8"),
        (["seed=" + ",".join(map(str, range(MOST_RUNS + 1)))], "1,001 simulations; 1,000 are the most"),
        (["policy", "time_scale=fast"], "must be key=value,value; --sweep time_scale=fast"),
    ],
)
def test_what_makes_no_sense_is_refused(assignments: list[str], complaint: str) -> None:
    """With every fault."""
    with pytest.raises(ConfigError) as refused:
        read_axes(assignments)

    assert complaint in refused.value.message


def test_a_thousand_simulations_may_be_asked_for() -> None:
    """The bound itself is allowed."""
    axes = read_axes(["seed=" + ",".join(map(str, range(100))), "capacity=" + ",".join(map(str, range(1, 11)))])

    assert len(runs_of(parse([]), axes)) == MOST_RUNS
