"""The bench of what caching costs: that nothing can be found, and how its ratios are made."""

from __future__ import annotations

import random

import pytest

from bench.caching_cost import LOADS, Load, Turn, figures


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_no_two_prompts_begin_alike(load: Load) -> None:
    """Not even in their first page, over many rounds: what is measured is a cache that finds nothing."""
    rng = random.Random(1)
    prompts = [tuple(prompt) for _ in range(20) for prompt in load.prompts(rng, 2560)]

    least, most = load.prompt_tokens
    assert all(least <= len(prompt) <= most for prompt in prompts)
    assert len({prompt[:16] for prompt in prompts}) == len(prompts) == 20 * load.requests


def turn(rate: float, worker: float, storage: float) -> Turn:
    return Turn(rate, {"worker-0": worker, "storage": storage})


def test_a_ratio_is_of_one_round() -> None:
    """A slow round is slow for both ways, and does not count as a cost."""
    found = figures(
        {
            "off": [turn(100.0, 1.0, 0.0), turn(50.0, 2.0, 0.0), turn(80.0, 1.0, 0.0)],
            "everything": [turn(99.0, 1.0, 0.1), turn(50.0, 2.0, 0.0), turn(72.0, 1.0, 0.5)],
        }
    )

    assert found["off"]["throughput_ratio"]["median"] == found["off"]["cpu_ratio"]["median"] == 1.0
    assert found["everything"]["tokens_per_s"] == 72.0
    assert found["everything"]["throughput_ratio"]["median"] == 0.99
    assert found["everything"]["cpu_ratio"]["median"] == 1.1
    assert found["everything"]["cpu_ms_a_token_by_process"] == {"worker-0": 1000.0, "storage": 100.0}
