"""Powers and logarithms of plain arithmetic: right to the last bits, and the same bits everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
import xxhash

from services.scheduler import core, policies
from services.scheduler.policies.thermo.elementary import decay, exp2, exp2_one, log2, log2_one


def left(x: np.ndarray) -> np.ndarray:
    return decay(x)[0]


def gone(x: np.ndarray) -> np.ndarray:
    return decay(x)[1]


WIDE = np.concatenate([np.linspace(-740, 700, 4001), np.linspace(-2, 2, 4001), [0.0, 1e-300, -1e-300, 1e-9, -1e-9]])
_COUNT = np.arange(4001)
POSITIVE = np.concatenate(
    [np.ldexp(1 + _COUNT / 4001, _COUNT % 1990 - 995), np.linspace(0.01, 50, 4001), [1.0, 2.0, 0.5]]
)  # Nothing here may depend on the powers of the machine.


def true(function: str, x: float) -> float:
    """The nearest double of the true value."""
    with localcontext() as context:
        context.prec = 60
        value = Decimal(float(x))
        if function == "log2":
            return float(value.ln() / Decimal(2).ln())
        if function == "exp2":
            return float((value * Decimal(2).ln()).exp())
        left = (-value).exp()
        return float(left if function == "left" else 1 - left)


FUNCTIONS = [("exp2", exp2, WIDE), ("log2", log2, POSITIVE), ("left", left, np.abs(WIDE)), ("gone", gone, np.abs(WIDE))]


@pytest.mark.parametrize(("name", "function", "values"), FUNCTIONS, ids=[name for name, *_ in FUNCTIONS])
def test_values_are_right_to_the_last_bits(
    name: str, function: Callable[[np.ndarray], np.ndarray], values: np.ndarray
) -> None:
    """Two units in the last place of the true value, which has 60 decimal digits."""
    values = values[::7]
    expected = np.array([true(name, x) for x in values])

    found = function(values)

    assert np.all(np.abs(found - expected) <= 2 * np.spacing(np.abs(expected)))


def test_whole_powers_and_their_logarithms_are_exact() -> None:
    """They are what levels and edges are made of; what decays for long is gone."""
    powers = np.arange(-60, 61).astype(float)

    assert exp2(powers).tolist() == [2.0 ** int(power) for power in powers]
    assert log2(exp2(powers)).tolist() == powers.tolist()
    assert [one.tolist() for one in decay(np.array([0.0, 1e9, np.inf]))] == [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]


def test_the_bits_are_those_of_every_machine() -> None:
    """Another digest means that an operation is not the one of IEEE 754, or that the formulas changed."""
    bits = b"".join(function(values).astype("<f8").tobytes() for _, function, values in FUNCTIONS)

    assert xxhash.xxh3_64_hexdigest(bits) == "df2ad9ff865fa88c"


def test_shape_and_memory_order_change_nothing() -> None:
    """Each element is computed alone, whether the processor takes one or eight at a time."""
    table = WIDE[:4000].reshape(40, 100)

    for function in (exp2, lambda x: left(np.abs(x)), lambda x: gone(np.abs(x))):
        whole = function(table)
        assert np.array_equal(function(table.T).T, whole)
        assert [function(table[3, n : n + 1])[0] for n in range(9)] == whole[3, :9].tolist()


def test_one_number_gives_the_bits_of_many() -> None:
    """A prefix is scored alone in one place and among others in the next."""
    assert [exp2_one(float(x)) for x in WIDE] == exp2(WIDE).tolist()
    positive = np.abs(WIDE) + 1e-300

    assert [log2_one(float(x)) for x in positive] == log2(positive).tolist()


def test_nothing_that_decides_takes_a_power_or_a_logarithm_from_the_machine() -> None:
    """But one, the bin of an age: scores are continuous where a last bit chooses between two bins."""
    functions = "exp|exp2|expm1|log|log2|log10|log1p|power|float_power|cbrt|hypot|tanh|sin|cos"
    taken = re.compile(rf"\b(?:np|math)\.(?:{functions})\(|from math import .*\b(?:{functions}|pow)\b")
    sources = [source for package in (core, policies) for source in Path(package.__path__[0]).rglob("*.py")]

    found = {f"{source.name}: {match[0]}" for source in sources for match in taken.finditer(source.read_text())}

    assert len(sources) > 100
    assert found == {"law.py: from math import log2"}
