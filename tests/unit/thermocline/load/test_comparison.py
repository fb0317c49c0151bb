"""Ratios of runs, and how sure they are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.unit.thermocline.load.made_runs import answered, failed, report
from thermocline.load.comparison import Ratio, compare, differences
from thermocline.load.figures import Slo
from thermocline.load.report import Report


def run(ttft_ms: Sequence[float], **more: object) -> Report:
    return report([answered(n, n / 10, ttft) for n, ttft in enumerate(ttft_ms)], **more)  # type: ignore[arg-type]


def independent(seed: int, count: int = 400, mean: float = 100.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(0.5, 1.5) * mean for _ in range(count)]


def ratio_of(figure: str, base: Report, other: Report) -> Ratio:
    return next(one for one in compare(base, other) if one.figure == figure)


def test_a_run_is_as_fast_as_itself() -> None:
    """Every ratio is 1 and lies in its interval."""
    one = run(independent(1))

    ratios = [ratio for ratio in compare(one, one) if ratio.ratio is not None]

    assert {ratio.ratio for ratio in ratios} == {1.0}
    assert all(ratio.low <= 1 <= ratio.high for ratio in ratios if ratio.low is not None and ratio.high is not None)


def test_the_same_files_give_the_same_intervals() -> None:
    """Chance has a seed."""
    base, other = run(independent(1)), run(independent(2))

    assert compare(base, other) == compare(base, other)


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Of runs whose true ratio is known to be 2: in 30 pairs, nearly always, and never in a wide interval."""
    found = [
        ratio_of("TTFT mean, ms", run(independent(seed, 100)), run(independent(1000 + seed, 150, 200.0)))
        for seed in range(30)
    ]

    assert sum(one.low <= 2.0 <= one.high for one in found if one.low and one.high) in range(25, 31)
    assert all(one.high - one.low < 0.5 for one in found if one.low and one.high)


def test_requests_that_wait_together_make_a_figure_less_sure() -> None:
    """The same values in stretches, as queues make them, have a wider interval than shuffled."""
    stretches = [100.0 if n // 50 % 2 else 300.0 for n in range(400)]
    shuffled = random.Random(1).sample(stretches, len(stretches))
    base = run(independent(1))

    together, apart = (ratio_of("TTFT mean, ms", base, run(values)) for values in (stretches, shuffled))

    assert together.ratio == pytest.approx(apart.ratio)
    assert together.low is not None
    assert together.high is not None
    assert apart.low is not None
    assert apart.high is not None
    assert together.high - together.low > 1.5 * (apart.high - apart.low)


def test_quantiles_and_throughput_are_those_of_the_runs() -> None:
    """What a table compares is what each run's own table says."""
    base, other = run(independent(1)), run(independent(2), seconds=20.0)
    assert base.figures.ttft_ms is not None

    assert ratio_of("TTFT p99, ms", base, other).base == pytest.approx(base.figures.ttft_ms.p99)
    assert ratio_of("requests/s", base, other).ratio == pytest.approx(0.5)
    assert ratio_of("requests/s", base, other).low is None


def test_what_one_run_lacks_has_no_ratio() -> None:
    """No answers, no cached tokens, no SLO."""
    base, other = run(independent(1)), report([failed(0, 0.0, "timeout")], slo=Slo(ttft_ms=5.0))

    ratios = {one.figure: one.ratio for one in compare(base, other)}

    assert ratios["TTFT mean, ms"] is None
    assert ratios["goodput, requests/s"] is None
    assert ratios["cached part of input"] is None
    assert ratios["requests/s"] == 0.0


def test_a_single_request_can_be_compared() -> None:
    """Its interval is a point."""
    one = ratio_of("TTFT mean, ms", run([100.0]), run([50.0]))

    assert (one.ratio, one.low, one.high) == (0.5, 0.5, 0.5)


def test_what_is_not_the_same_is_named() -> None:
    """Settings, and failures that the figures leave out; a label may differ."""
    base = run([100.0], label="a")
    other = report(
        [answered(0, 0.0, 5.0), failed(1, 0.1, "timeout")], label="b", workload="burst", settings={"rate": 3.0}
    )

    assert differences(base, run([90.0], label="b")) == []
    assert differences(base, other) == [
        "workload: unshared and burst",
        "rate: 2.0 and 3.0",
        "b: 1 of 2 requests failed and are left out",
    ]
