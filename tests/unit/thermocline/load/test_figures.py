"""Figures of replies that are known."""

from __future__ import annotations

import pytest

from tests.unit.thermocline.load.made_runs import answered, failed
from thermocline.load.driver import Outcome
from thermocline.load.figures import Slo, figures, rows, spread

REPLIES = [
    answered(0, 100.0, 50.0, tokens=3, itl_ms=10.0, cached_tokens=40),
    answered(1, 101.0, 150.0, tokens=5, itl_ms=30.0, cached_tokens=0),
    failed(2, 102.0, "queue_full"),
    answered(3, 103.0, 250.0, tokens=1),
]


def outcome(**more: float) -> Outcome:
    return Outcome(list(REPLIES), 100.0, 104.0, **more)  # type: ignore[arg-type]


def test_quantiles_are_nearest_rank() -> None:
    """Of no values there is none."""
    found = spread([float(n) for n in range(1, 101)])

    assert found is not None
    assert (found.mean, found.p50, found.p90, found.p99) == (50.5, 51.0, 91.0, 100.0)
    assert spread([]) is None


def test_only_whole_answers_make_figures() -> None:
    """Errors are counted by kind, and are no throughput."""
    found = figures(outcome(), Slo())

    assert (found.requests, found.answered, found.errors) == (4, 3, {"queue_full": 1})
    assert (found.input_tokens, found.output_tokens) == (300, 9)
    assert (found.requests_per_s, found.input_tokens_per_s, found.output_tokens_per_s) == (0.75, 75.0, 2.25)
    assert found.ttft_ms is not None
    assert found.ttft_ms.mean == pytest.approx(150.0)
    assert found.end_to_end_ms is not None
    assert found.end_to_end_ms.mean == pytest.approx((70 + 270 + 250) / 3)
    assert found.goodput is None


def test_gaps_are_those_of_all_answers_and_token_times_those_of_each() -> None:
    """An answer of one token has neither."""
    found = figures(outcome(), Slo())

    assert found.inter_token_ms is not None
    assert found.inter_token_ms.mean == pytest.approx((2 * 10 + 4 * 30) / 6)
    assert found.token_ms is not None
    assert found.token_ms.mean == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=200.0), 2),
        (Slo(itl_ms=20.0), 2),
        (Slo(ttft_ms=100.0, itl_ms=20.0), 1),
        (Slo(ttft_ms=1.0), 0),
        (Slo(ttft_ms=1000.0, itl_ms=1000.0), 3),
    ],
)
def test_goodput_counts_answers_within_every_bound(slo: Slo, good: int) -> None:
    """As a part of all requests, those that failed too; a single token keeps any bound on tokens after it."""
    found = figures(outcome(), slo).goodput

    assert found is not None
    assert (found.requests_per_s, found.part) == (good / 4, good / 4)


def test_cached_tokens_are_unknown_only_where_nobody_says_them() -> None:
    """Nothing cached is a figure too."""
    assert figures(outcome(), Slo()).cached_tokens == 40
    assert figures(Outcome([answered(0, 100.0, 5.0, cached_tokens=0)], 100.0, 104.0), Slo()).cached_tokens == 0
    assert figures(Outcome([answered(0, 100.0, 5.0)], 100.0, 104.0), Slo()).cached_tokens is None


def test_a_server_that_went_away_is_told() -> None:
    """With what was under way, which is neither answered nor left out."""
    found = figures(outcome(gone_s=2.5, abandoned=7), Slo(ttft_ms=1000.0))

    assert (found.server_gone_after_s, found.requests) == (2.5, 11)
    assert found.errors == {"abandoned": 7, "queue_full": 1}
    assert found.goodput is not None
    assert found.goodput.part == 3 / 11


def test_sending_late_is_told_and_part_of_the_latency() -> None:
    """From when a request was due, not from when the client came round to it."""
    late = answered(0, 100.0, 500.0, sent_s=100.4)

    found = figures(Outcome([late], 100.0, 104.0), Slo())

    assert found.late_ms is not None
    assert found.late_ms.p99 == pytest.approx(400.0)
    assert found.ttft_ms is not None
    assert found.ttft_ms.mean == pytest.approx(500.0)


def test_no_answer_at_all_is_a_result() -> None:
    """Of zeros, without times."""
    found = figures(Outcome([failed(0, 100.0, "timeout")], 100.0, 100.0), Slo(ttft_ms=5.0))

    assert (found.answered, found.ttft_ms, found.requests_per_s) == (0, None, 0.0)


def test_rows_are_in_order_of_the_intended_start() -> None:
    """One a request, with times from the start of the run."""
    found = rows(Outcome(REPLIES[::-1], 100.0, 104.0))

    assert [row.number for row in found] == [0, 1, 2, 3]
    assert found[1].due_ms == 1000.0
    assert found[1].ttft_ms == pytest.approx(150.0)
    assert (found[2].error, found[2].ttft_ms) == ("queue_full", None)
    assert found[3].token_ms is None
