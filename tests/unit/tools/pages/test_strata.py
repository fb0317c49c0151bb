"""What Strata's page reads off runs that are compared."""

from __future__ import annotations

import pytest

from tools.pages.strata import better, counted_in


def test_better_is_more_throughput_and_less_time() -> None:
    """Runs of several seeds count together."""
    ours = [{"output_tokens_per_s": 100.0, "ttft_ms": 90.0}, {"output_tokens_per_s": 120.0, "ttft_ms": 30.0}]
    base = [{"output_tokens_per_s": 100.0, "ttft_ms": 60.0}, {"output_tokens_per_s": 100.0, "ttft_ms": 40.0}]

    assert better(ours, base, "output_tokens_per_s") == pytest.approx(0.1)
    assert better(ours, base, "ttft_ms") == pytest.approx(-0.2)


def test_counters_that_a_run_lacks_are_none() -> None:
    """A core counts only what happened."""
    assert counted_in([{"counters": {"batches_split": 3}}, {"counters": {}}], "batches_split") == 3
