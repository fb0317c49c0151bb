"""What the benchmark of quantised models makes of its figures."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.quantised_speed import alternate, reached


def test_ratios_are_of_neighbouring_rounds() -> None:
    """Above 1 where something is faster than bfloat16; the round that warms up does not count."""
    times: dict[str, list[float]] = {"bfloat16": [9.0, 0.004, 0.008, 0.006], "int8": [9.0, 0.002, 0.002, 0.006]}

    found = alternate({name: partial(next, iter(each)) for name, each in times.items()}, 3)

    assert found == {
        "bfloat16": {"ms": 6.0, "faster_than_bfloat16": 1.0},
        "int8": {"ms": 2.0, "faster_than_bfloat16": 2.0},
    }


def test_targets_are_said_for_what_was_measured() -> None:
    """Without llama.cpp there is nothing to say of it."""
    decode: dict[str, Any] = {
        name: {"ms": ms}
        for name, ms in {"bfloat16": 10.0, "int8": 5.0, "int8_group32": 6.0, "int4_group128": 4.0}.items()
    }

    assert reached(decode) == {
        "decode_step_of_bfloat16_over_int8": {"ratio": 2.0, "target": 1.7},
        "decode_step_of_bfloat16_over_int4": {"ratio": 2.5, "target": 2.5},
    }
    found = reached(decode | {"Q8_0": {"ms": 9.0}})
    assert found["decode_step_of_llama.cpp_Q8_0_over_int8_in_groups_of_32"] == {"ratio": 1.5, "target": 1.0}
