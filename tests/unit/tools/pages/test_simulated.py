"""What is read off simulated runs: curves, steps, partitions, and what offloading takes."""

from __future__ import annotations

from typing import Any

import pytest

from tools.pages import hcache, hotprefix, impress, strata
from tools.pages.papers import Entry


def row(output_tokens_per_s: float, ttft_ms: float) -> dict[str, Any]:
    return {"output_tokens_per_s": output_tokens_per_s, "ttft_ms": ttft_ms}


def test_throughput_at_a_ttft_lies_between_the_two_rates_around_it() -> None:
    """Half way between two points of a curve is half way between their throughputs."""
    curve = [row(10, 1000), row(20, 3000), row(30, 9000)]

    assert strata.throughput_at(curve, 2000) == 15
    assert strata.throughput_at(curve, 500) is None
    assert strata.throughput_at(curve, 10_000) == 30


def test_the_same_ttft_is_looked_for_where_both_curves_have_it() -> None:
    """The largest ratio of throughputs, and none where one curve begins above the other's end."""
    slow, fast = [row(10, 1_000), row(20, 30_000)], [row(10, 400), row(40, 5_000)]

    found = strata.best_at_same_ttft(fast, slow)

    assert found is not None
    assert found[1] == 5_000
    assert found[0] == pytest.approx(40 / strata.throughput_at(slow, 5_000))  # type: ignore[operator]
    assert strata.best_at_same_ttft([row(10, 90_000)], slow) is None


def test_the_share_of_stalls_is_of_steps() -> None:
    """Three seconds of waiting beside one of computing."""
    assert strata.stall_share({"stall_s": 3.0, "compute_s": 1.0}) == 0.75


def test_gains_are_told_over_the_step_before_and_of_the_baseline() -> None:
    """From 10 by 20 to 25, the last step adds a quarter to the one before, and half a baseline."""
    rows = {"baseline": row(10, 1), "+ IO": row(20, 1), "+ balanced batches": row(25, 1)}

    assert strata.gains(rows) == {"+ IO": (1.0, 1.0), "+ balanced batches": (0.25, 0.5)}


def test_blocking_adds_backups_but_not_promotions() -> None:
    """Offload seconds count every copy, and only backups lengthen a run whose batches wait for them."""
    found = {"seconds": 100.0, "backup_s": 10.0, "promotion_s": 5.0, "load_s": 1.0}

    derived = hotprefix.derived({"mmlu": {"lru": found, "batch": 8}})["mmlu"]["lru"]

    assert derived == {**found, "offload_s": 16.0, "offload_share": 16 / 116, "blocking_s": 110.0}


def test_a_schedule_is_written_as_in_the_paper() -> None:
    """Only methods that are used are named."""
    assert hcache.partition({"tokens": 0, "hidden": 31, "kv": 1}) == "31 H + 1 KV"


def test_hyperinfer_repeats_impress_under_other_numbers() -> None:
    """From Figure 15 on a number more; sections have another numbering, and links lead to IMPRESS's page."""
    entry = Entry(figure="Figure 15 (a)", what="over IMPRESS's", paper="2×", marking="measured", where="#anchor")
    early = Entry(figure="Figure 5", what="hits", paper="2×", marking="measured", where="data-plane.md")

    moved = impress.in_hyperinfer(entry)

    assert (moved.figure, moved.what, moved.where) == ("Figure 16 (a)", "over HyperInfer's", "impress.md#anchor")
    assert impress.in_hyperinfer(early) == early
