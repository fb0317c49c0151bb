"""HCache's tables: times of a layer, pipelines, TTFT alone and among conversations."""

import pytest

from bench.papers.hcache import A100, TESTBED, ablation, partitions, split, storage
from bench.papers.hcache_platform import Platform, pipelined_us, speed
from bench.papers.hcache_queue import METHODS, serve
from bench.papers.hcache_reuse import REQUESTS, reuse
from bench.papers.hcache_ttft import balanced, resources, ttft
from services.scheduler.core.hidden.partition import LayerTimes, closed_form, made


def test_times_follow_from_the_profile() -> None:
    """One disk of 6.9 GB/s, and 58% of 312 TFLOPS at 1,024 rows, beside 10 us that a layer costs in any case."""
    platform = Platform(A100, "llama-2-7b", disks=1)
    times = platform.times(1024)

    assert times.io_hidden == pytest.approx(1024 * 8192 / 6.9e3)
    assert times.io_kv == 2 * times.io_hidden
    assert times.compute_hidden == pytest.approx(1024 * 4 * 4096**2 / (0.58 * 312e6) + 10)
    assert times.compute_tokens > 5 * times.compute_hidden


def test_a_group_of_devices_shares_reading_and_computing() -> None:
    """Each of four reads a quarter; gathering hidden states costs something."""
    one, four = (Platform("h800", "opt-30b", degree, disks=1).times(4096) for degree in (1, 4))

    assert one.io_hidden == pytest.approx(4 * four.io_hidden)
    assert one.compute_hidden / 4 < four.compute_hidden < one.compute_hidden


def test_a_pipeline_waits_for_its_first_layer_and_for_nothing_else() -> None:
    """Hidden states at 3 us a layer are projected in 2; KV follows on the link; tokens come before all."""
    times = LayerTimes(io_kv=6.0, io_hidden=3.0, compute_hidden=2.0, compute_tokens=10.0)

    assert pipelined_us(made(times, hidden=4), times) == 4 * 3 + 2
    assert pipelined_us(made(times, hidden=1, kv=2), times) == 3 + 12
    assert pipelined_us(made(times, tokens=1, hidden=2), times) == 10 + 2 + 2
    assert speed(made(times, kv=1), times, 12) == pytest.approx(2e6)


def test_the_schedules_of_table_3_go_the_papers_way() -> None:
    """On the testbed most layers are hidden states, beside KV for 7B and 13B and beside tokens for 30B."""
    found = {row["model"]: row["best"] for row in storage() if row["disks"] and row["tokens"] == 1024}

    assert all(found[model]["hidden"] > 0.75 * TESTBED[model].layers for model in found)
    assert found["llama-2-7b"]["kv"]
    assert not found["llama-2-7b"]["tokens"]
    assert found["llama-2-13b"]["kv"]
    assert not found["llama-2-13b"]["tokens"]
    assert found["opt-30b"]["tokens"]
    assert not found["opt-30b"]["kv"]


def test_hidden_states_alone_lose_where_computing_is_scarce() -> None:
    """Slower than KV in the IO-sufficient setting; the scheduler is the fastest in all three (Figure 12)."""
    found = {row["setting"]: row for row in ablation()}

    assert found["IO-sufficient"]["hidden"] < found["IO-sufficient"]["kv"]
    for row in found.values():
        assert row["planner"] == max(row[name] for name in ("tokens", "kv", "hidden", "naive", "planner"))


def test_partitions_by_token_are_slower_than_by_layer() -> None:
    """Whole tiles and waves cost more than whole layers (Figure 13)."""
    found = partitions()

    assert found["layer_speed"] > max(found["naive_speed"], found["rounded_speed"])
    assert found["rounded"]["hidden"] % 256 == 0


def test_the_papers_formula_gives_its_schedule() -> None:
    """31 layers from hidden states and one as KV, where computing is a little slower than reading (Table 3)."""
    times = LayerTimes(io_kv=2.0, io_hidden=1.0, compute_hidden=1.1, compute_tokens=7.0)

    assert split(closed_form(32, times)) == {"tokens": 0, "hidden": 31, "kv": 1}


def test_more_skew_means_more_hits_and_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short run over few contexts: hits rise, and every method's TTFT falls (Figure 15)."""
    monkeypatch.setattr("bench.papers.hcache_reuse.REQUESTS", REQUESTS // 20)
    monkeypatch.setattr("bench.papers.hcache_reuse.CONTEXTS", (20,))
    monkeypatch.setattr("bench.papers.hcache_reuse.SKEWS", (0.0, 2.0))
    uniform, skewed = reuse(TESTBED["llama-2-7b"], seed=1)

    assert skewed["hit_ratio"] > uniform["hit_ratio"]
    for method in ("tokens", "kv", "hcache"):
        assert skewed["ttft_ms"][method] < uniform["ttft_ms"][method]
    assert uniform["ttft_ms"]["ideal"] < uniform["ttft_ms"]["hcache"] < uniform["ttft_ms"]["kv"]


def test_restoring_lies_between_nothing_and_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """TTFT alone, on every task: ideal, the planner's two ways, KV, recomputing (Figures 4 and 10)."""
    monkeypatch.setattr("bench.papers.hcache_ttft.REQUESTS", 5)

    for row in ttft(TESTBED, seed=1):
        assert row["ideal"] < row["hcache"] < row["kv"] < row["recomputed"]


def test_hidden_states_save_six_sevenths_of_the_arithmetic_and_half_of_the_bytes() -> None:
    """Section 3.2 on every model of the testbed, which all have as many heads for K and V as for queries."""
    rows = resources(TESTBED)

    assert min(row["compute"] for row in rows) >= 6
    assert {row["bytes"] for row in rows} == {2.0}


def test_transfer_and_projection_are_balanced_within_what_a_link_can_do() -> None:
    """Section 6.1.3: some ten gigabytes a second for each model."""
    assert all(10 < row["gb_s"] < 60 for row in balanced(TESTBED))


def test_conversations_are_the_same_whatever_restores_them() -> None:
    """Same rounds and histories; nothing is quicker than restoring nothing, and recomputing is the slowest."""
    found = {method: serve(TESTBED["llama-2-7b"], method, 1.0, seed=1, end_s=60.0) for method in METHODS}

    assert len({(row["rounds"], row["history_tokens"]) for row in found.values()}) == 1
    assert found["ideal"]["ttft_ms"] == min(row["ttft_ms"] for row in found.values())
    assert found["recomputed"]["ttft_ms"] == max(row["ttft_ms"] for row in found.values())
    assert found["hcache"]["tbt_ms"] >= found["ideal"]["tbt_ms"]


def test_a_run_in_which_nobody_comes_says_so() -> None:
    """Instead of a mean of nothing; and there are four ways to restore."""
    with pytest.raises(ValueError, match="none arrives"):
        serve(TESTBED["llama-2-7b"], "kv", 0.001, seed=1, end_s=1.0)
    with pytest.raises(KeyError):
        serve(TESTBED["llama-2-7b"], "copy", 1.0, seed=1)
