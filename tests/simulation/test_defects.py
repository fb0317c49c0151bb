"""The simulation has teeth: defects that are put into the core on purpose are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.defects import DEFECTS
from tests.simulation.running import run_seed

MOST_SEEDS = 60
"""From the seed on that found a defect first; decisions that changed since may leave it to one of the next."""


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_of_the_core_is_found(monkeypatch: pytest.MonkeyPatch, defect: Callable[..., None]) -> None:
    """Some seed breaks a property once the core breaks this rule."""
    first = DEFECTS[defect]
    defect(monkeypatch)

    assert any(run_seed(seed).broken for seed in range(first, first + MOST_SEEDS))
