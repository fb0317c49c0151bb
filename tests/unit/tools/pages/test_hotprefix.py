"""What HotPrefix's page makes of the switches' results."""

import pytest

from tools.pages.hotprefix import over_everything, summary


def row(hits: float, ttft_ms: float, copied: int) -> dict[str, dict[str, float]]:
    """A workload with everything admitted, which has half of the hits, a TTFT of 100 ms and 10 copied tokens."""
    everything = {"hit_ratio": 0.5, "ttft_mean_ms": 100.0, "backed_up_tokens": 10}
    return {"all": everything, "own": {"hit_ratio": hits, "ttft_mean_ms": ttft_ms, "backed_up_tokens": copied}}


ROWS = [row(0.25, 200.0, 5), row(0.5, 100.5, 10), row(1.0, 50.0, 20)]


def test_ratios_are_to_everything_admitted() -> None:
    """Of each workload, in its order."""
    assert over_everything(ROWS, "own", "hit_ratio") == pytest.approx([0.5, 1.0, 2.0])


def test_the_summary_has_means_extremes_and_counts() -> None:
    """A change of TTFT of up to 1% is neither better nor worse."""
    assert summary(ROWS, "own") == "1.00× (0.50 to 2.00) | 1.00× (0.50 to 2.00) | 1 / 1 of 3 | 1.00×"


def test_a_workload_in_which_nothing_was_copied_has_no_ratio() -> None:
    """Nothing cannot be divided by."""
    empty = row(0.5, 100.0, 0)
    empty["all"]["backed_up_tokens"] = 0

    assert over_everything([empty], "own", "backed_up_tokens") == []
    assert summary([empty, ROWS[1]], "own").endswith("1.00×")
