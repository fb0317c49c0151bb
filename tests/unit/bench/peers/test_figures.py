"""Comparing with peers: figures, ratios, targets, and the file of results."""

import json
from pathlib import Path

import pytest

from bench.peers.figures import Processor, agreement, figures_of, medians, ratio, times_better
from bench.peers.passes import DocumentQuestions, Pass
from bench.peers.processor_time import parse_stat, trees
from bench.peers.results import merged, results_of, save
from bench.peers.rounds import Measured
from bench.peers.systems import Bounds, Shape
from bench.peers.targets import judged
from thermocline.load.driver import Outcome
from thermocline.load.reply import Reply

SHAPE = Shape(layers=1, kv_heads=1, head_dim=8, vocabulary=100, context=64)
BOUNDS = Bounds(model=Path("m"), shape=SHAPE, threads=2, device_tokens=16_384, host_bytes=2**30, max_running=8)


def reply(number: int, ttft_s: float, *, cached: int | None = 0) -> Reply:
    made = Reply(number, 0.0, 0.0, first_s=ttft_s, last_s=ttft_s + 0.3, ended_s=ttft_s + 0.4)
    made.prompt_tokens, made.output_tokens, made.cached_tokens = 100, 4, cached
    return made


def outcome(*replies: Reply) -> Outcome:
    return Outcome(replies=list(replies), began_s=0.0, ended_s=2.0)


def a_pass(firsts: frozenset[int]) -> Pass:
    workload = DocumentQuestions(1, 3, number=0, seed=1)
    return Pass(name="cold", workload=workload, requests=3, places=1, firsts=firsts)


def test_figures_tell_first_questions_from_repeats() -> None:
    """Means of either, besides those of all."""
    found = figures_of(
        a_pass(frozenset({0})),
        outcome(reply(0, 1.0), reply(1, 0.1, cached=50), reply(2, 0.3, cached=70)),
        Processor(1.5, 0.1, 0.2),
    )

    assert found["first_ttft_mean_ms"] == pytest.approx(1000)
    assert found["repeat_ttft_mean_ms"] == pytest.approx(200)
    assert found["ttft_mean_ms"] == pytest.approx(1400 / 3)
    assert found["requests_per_s"] == pytest.approx(1.5)
    assert found["token_p50_ms"] == pytest.approx(100)
    assert found["prefill_tokens_per_s"] == pytest.approx(100 / 0.3)
    assert found["cached_part"] == pytest.approx(120 / 300)
    assert found["processor_others_s"] == 0.1


def test_a_server_that_does_not_say_what_was_cached_has_no_such_figure() -> None:
    """It is not taken for nothing."""
    found = figures_of(a_pass(frozenset()), outcome(reply(0, 1.0, cached=None)), Processor(0, 0, 0))

    assert "cached_part" not in found
    assert "first_ttft_mean_ms" not in found


def test_better_is_a_larger_rate_or_a_shorter_time() -> None:
    """Either way above 1."""
    assert times_better("requests_per_s", 2.0, 1.0) == 2.0
    assert times_better("ttft_mean_ms", 1.0, 2.0) == 2.0
    assert times_better("ttft_mean_ms", 0.0, 2.0) == float("inf")


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    """Not the ratio of the medians: neighbours share what the machine did."""
    ours = [{"ttft_mean_ms": 1.0}, {"ttft_mean_ms": 10.0}, {"ttft_mean_ms": 2.0}]
    theirs = [{"ttft_mean_ms": 3.0}, {"ttft_mean_ms": 20.0}, {"ttft_mean_ms": 8.0}]

    found = ratio("ttft_mean_ms", ours, theirs)
    assert found is not None
    assert (found.median, found.least, found.most) == (3.0, 2.0, 4.0)
    assert ratio("requests_per_s", ours, theirs) is None


def test_medians_are_of_what_every_round_has() -> None:
    """A figure that one round lacks is left out."""
    assert medians([{"a": 1.0, "b": 1.0}, {"a": 3.0}, {"a": 2.0, "b": 5.0}]) == {"a": 2.0}


def test_agreement_counts_whole_answers_and_leading_tokens() -> None:
    """None where a server does not say its tokens."""
    found = agreement({0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}, {0: [1, 2, 3, 4], 1: [1, 9, 3, 4]})

    assert found == {"requests": 2, "equal": 0.5, "leading": 0.625}
    assert agreement({0: [1]}, {0: []}) is None


def measured(ours_ms: float = 100.0, theirs_ms: float = 250.0) -> Measured:
    def figures(ttft_ms: float) -> dict[str, float]:
        return {"ttft_mean_ms": ttft_ms, "ttft_p50_ms": ttft_ms, "requests_per_s": 1.0}

    return Measured(
        figures={
            "ours": {"cold": [figures(ours_ms)], "host": [figures(ours_ms)]},
            "lmcache": {"cold": [figures(theirs_ms)], "host": [figures(theirs_ms)]},
        },
        answers={"ours": {"cold": {0: [1, 2]}}, "lmcache": {"cold": {0: [1, 2]}}},
    )


def test_a_target_is_judged_only_where_both_systems_were_measured() -> None:
    """Met, not met, and not there."""
    rows = {(row["peer"], row["says"]): row for row in judged("documents", measured().figures)}

    assert rows["lmcache", "cold, mean TTFT"]["is_met"]
    assert rows["lmcache", "cold, mean TTFT"]["ratio"] == 2.5
    assert rows["lmcache", "cold, mean TTFT"]["pass"] == "cold"
    assert not rows["lmcache", "cold, requests/s"]["is_met"]
    assert not any(peer == "vllm" for peer, _ in rows)


def test_runs_of_other_systems_stay_in_the_file_and_the_same_run_is_replaced(tmp_path: Path) -> None:
    """A run keeps its own command and commit."""
    results = results_of("documents", measured(), BOUNDS, model="generated")
    save("documents", results, seed=1, folder=tmp_path)
    path = save("documents", {**results, "model": "bundled"}, seed=1, folder=tmp_path)
    again = results_of("documents", measured(ours_ms=50.0), BOUNDS, model="generated")
    save("documents", again, seed=2, folder=tmp_path)

    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert list(runs) == ["generated: ours, lmcache", "bundled: ours, lmcache"]
    assert runs["generated: ours, lmcache"]["seed"] == 2
    assert {"commit", "hardware", "command", "date"} <= set(runs["bundled: ours, lmcache"])
    assert merged(None, {"benchmark": "peers_fits", "results": results})["benchmark"] == "peers_fits"


def test_a_line_of_the_kernels_table_is_read_whatever_the_command_is_called() -> None:
    """Names may hold brackets and spaces."""
    line = "12 (a (b) c) S 7 12 12 0 -1 4194560 100 0 0 0 30 12 0 0 20 0 1 0 100 0 0"
    assert parse_stat(line) == (7, 42)


def test_a_tree_is_a_process_with_all_its_children() -> None:
    """And with no other; a root that has ended has none."""
    processes = {1: (0, 5), 10: (1, 100), 11: (10, 20), 12: (11, 3), 20: (1, 1000)}

    assert sorted(trees(processes, [10])) == [10, 11, 12]
    assert sorted(trees(processes, [10, 20])) == [10, 11, 12, 20]
    assert trees(processes, [99]) == []
