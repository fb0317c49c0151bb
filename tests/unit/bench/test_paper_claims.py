"""The tables of the papers' pages: ratios and directions, and the runs behind HotPrefix's and Strata's."""

from math import inf

import pytest

from bench.papers import strata_page
from bench.papers.claims import Claim, claim_table, direction, paper_range, ratio, shown, speedup, table, times
from bench.papers.hotprefix import QUESTIONS, Arrangement, Machine, Scale, config_of, measure, tokens_of
from bench.papers.hotprefix_machines import devices, half_tokens
from bench.papers.simulated import Row, blocking_s, offload_s
from bench.papers.strata import FULL, burst_tokens, h200
from bench.papers.strata import Scale as StrataScale
from bench.papers.strata import measure as measure_strata
from bench.papers.strata_curves import best_at_same_ttft, stall_share, throughput_at
from bench.papers.strata_machines import HICACHE, copies, machine, replace_host, stalls
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.workloads.documents import DocumentOptions


def row(output_tokens_per_s: float, ttft_ms: float) -> Row:
    return {"output_tokens_per_s": output_tokens_per_s, "ttft_ms": ttft_ms}


def test_a_direction_reproduces_only_where_every_ratio_is_above_one() -> None:
    """All above 1 is yes, some is a count, none is no, and what lies within the tolerance is no difference."""
    assert direction([1.2, 1.01]) == "yes"
    assert direction([1.2, 1.001, 0.9]) == "in 1 of 3"
    assert direction([0.9, 1.001]) == "no"
    assert direction([0.998, 1.004]) == "no difference"
    assert direction([]) == "not simulated"


def test_a_ratio_of_nothing_is_told_apart_from_a_ratio_to_nothing() -> None:
    """0 over 0 is 1; anything else over 0 is infinite and shown as such."""
    assert ratio(0, 0) == 1
    assert ratio(3, 0) == inf
    assert times(ratio(3, 0)) == "∞"


def test_a_speedup_is_the_slow_time_over_the_fast_one() -> None:
    """Half the time is twice as fast."""
    rows: dict[str, Row] = {"old": {"seconds": 10.0}, "new": {"seconds": 5.0}}

    assert speedup(rows, "old", "new", lambda found: float(found["seconds"])) == 2


def test_a_claim_table_has_a_column_for_every_workload() -> None:
    """Every line has as many cells as the head, the paper's range second and the direction last."""
    claims = [(Claim("over LRU", 1.17, 2.38), [1.5, 0.9])]

    lines = claim_table(["mmlu", "bbh"], claims)

    assert lines == [
        "| claim | paper | mmlu | bbh | direction reproduces |",
        "|---|---|---|---|---|",
        "| over LRU | 1.17 to 2.38× | 1.50× | 0.90× | in 1 of 2 |",
    ]


def test_a_single_number_of_the_paper_is_no_range() -> None:
    """Equal ends are written once."""
    assert paper_range(Claim("", 7.77, 7.77)) == "7.77×"


def test_numbers_are_as_long_as_they_are_sure() -> None:
    """Small floats keep two decimals, large ones none, and counts have separators."""
    assert [shown(value) for value in (1.234, 56.78, 4321.9, 12_345, "x")] == ["1.23", "56.8", "4,322", "12,345", "x"]
    assert table(["a"], [[1]])[-1] == "| 1 |"


def test_blocking_adds_backups_but_not_promotions() -> None:
    """Offload seconds count every copy, and only backups lengthen a run whose batches wait for them."""
    found: Row = {"seconds": 100.0, "backup_s": 10.0, "promotion_s": 5.0, "load_s": 1.0}

    assert offload_s(found) == 16
    assert blocking_s(found) == 110


def test_throughput_at_a_ttft_lies_between_the_two_rates_around_it() -> None:
    """Half way between two points of a curve is half way between their throughputs."""
    curve = [row(10, 1000), row(20, 3000), row(30, 9000)]

    assert throughput_at(curve, 2000) == 15
    assert throughput_at(curve, 500) is None
    assert throughput_at(curve, 10_000) == 30


def test_gains_are_told_over_the_step_before_and_of_the_baseline() -> None:
    """From 10 by 20 to 25, the last step adds a quarter to the one before, and half a baseline."""
    rows = {"baseline": row(10, 1), "+ IO": row(20, 1), "+ balanced batches": row(25, 1)}

    assert strata_page.gains(rows) == {"+ IO": (1.0, 1.0), "+ balanced batches": (0.25, 0.5)}


def test_a_shorter_run_has_a_lower_threshold_and_a_shorter_aging_period() -> None:
    """A fifth of a dataset takes a fifth of the uses and of the requests."""
    whole, fifth = (config_of(Arrangement("hotprefix", host=True), part) for part in (1, 5))

    assert (whole.admission_frequency, whole.aging_requests) == (10, 64)
    assert (fifth.admission_frequency, fifth.aging_requests) == (2, 13)


def test_a_device_only_bar_promotes_nothing() -> None:
    """Without host memory there is nothing to promote, whatever the arrangement says."""
    assert config_of(Arrangement("lru"), 1).promotion == "off"
    assert config_of(Arrangement("lru", host=True), 1).promotion == "hotness"


def test_examples_are_counted_once_each() -> None:
    """All examples of MMLU's 57 subjects are a fraction of the prompts that they stand in."""
    scale = Scale(part=20, seed=1)

    examples, own = tokens_of("mmlu", scale)

    assert 57 * 100 < examples < 57 * 1000
    assert 90 < own < 140
    assert scale.questions("mmlu") == QUESTIONS["mmlu"] // 20


def test_a_run_says_what_running_requests_hold_of_the_device() -> None:
    """Between nothing and all; and the paper's rows take nothing from host memory on demand."""
    scale = Scale(part=200, seed=1)

    found = measure("mmlu", Arrangement("hotprefix", host=True), scale, batch=8, device_tokens=4000)

    assert found["requests"] == QUESTIONS["mmlu"] // 200
    assert 0 < found["held_share"] < 1
    assert found["host_hit_ratio"] == 0
    assert 0 < found["device_hit_ratio"] < 1


def test_the_least_of_a_burst_is_its_document_once_and_every_question() -> None:
    """What the document's last page lacks counts for every request but the first."""
    options = DocumentOptions(contexts=1, queries=4, prompt_tokens=1000)

    document, least = burst_tokens(options, StrataScale(queries=4, seed=1, page_size=32))

    assert document == 968
    assert least > document + 3 * (968 % 32)


def test_the_same_ttft_is_looked_for_where_both_curves_have_it() -> None:
    """The largest ratio of throughputs, and none where one curve begins above the other's end."""
    slow, fast = [row(10, 1_000), row(20, 30_000)], [row(10, 400), row(40, 5_000)]

    found = best_at_same_ttft(fast, slow)

    assert found is not None
    assert found[1] == 5_000
    assert found[0] == pytest.approx(40 / throughput_at(slow, 5_000))  # type: ignore[operator]
    assert best_at_same_ttft([row(10, 90_000)], slow) is None


def test_the_share_of_stalls_is_of_steps() -> None:
    """Three seconds of waiting beside one of computing."""
    assert stall_share({"stall_s": 3.0, "compute_s": 1.0}) == 0.75


def test_more_devices_have_more_in_flight_and_more_host_memory() -> None:
    """Two workers answer the same questions in less time, each with the paper's batch."""
    scale = Scale(part=100, seed=1)
    hardware, model = load_hardware("a6000-pcie3"), load_model("llama-2-13b")
    rows = [
        measure(
            "mmlu",
            Arrangement("hotprefix", host=True),
            scale,
            batch=16,
            device_tokens=8_000,
            machine=Machine(hardware, model, workers=workers),
        )
        for workers in (1, 2)
    ]

    assert rows[0]["requests"] == rows[1]["requests"]
    assert rows[1]["seconds"] < rows[0]["seconds"]


def test_devices_of_a_comparison_share_link_and_kv() -> None:
    """Figure 12 compares devices: PCIe 3.0 for all, and a capacity that all have room for."""
    found, model = devices(), load_model("llama-3.1-8b")
    tokens = half_tokens("mmlu", Scale(part=20, seed=1))

    assert len(found) == 4
    assert len({hardware.link for hardware in found.values()}) == 1
    assert all(Machine(hardware, model).fitting_tokens >= tokens for hardware in found.values())


def test_stalls_grow_with_what_is_loaded_and_less_with_assisted_copies() -> None:
    """Figure 1 at either size of batch; a copy by copy load is never hidden better."""
    rows = stalls()

    for new in {row["new_tokens"] for row in rows}:
        at = [row for row in rows if row["new_tokens"] == new]
        assert [row["assisted"] for row in at] == sorted(row["assisted"] for row in at)
        assert all(row["per-page"] >= row["assisted"] >= 0 for row in at)


def test_the_link_reaches_what_the_paper_says_it_does() -> None:
    """Figure 3: 22% of PCIe 5.0 and 5% of Grace Hopper's link at 32 tokens a page; assisted copies do not care."""
    found = {(each["hardware"], each["page_size"]): each for each in copies()}

    assert found["h200-pcie5", 32]["per_page_share"] == pytest.approx(0.22, abs=0.01)
    assert found["gh200", 32]["per_page_share"] == pytest.approx(0.05, abs=0.01)
    assert found["h200-pcie5", 1]["assisted_ms"] == pytest.approx(found["h200-pcie5", 1024]["assisted_ms"])


def test_a_cell_without_host_memory_hits_on_the_device_alone() -> None:
    """SGLang without a hierarchy, beside HiCache and Strata on the same machine; 70B takes four devices."""
    scale = StrataScale(queries=30, seed=1, page_size=32)
    options = DocumentOptions(contexts=5, queries=30, prompt_tokens=4_000)
    alone = measure_strata(HICACHE, options, scale, on=replace_host(h200(), 0))
    whole = measure_strata(FULL, options, scale, on=h200())

    assert alone["host_hit_ratio"] == 0
    assert whole["requests"] == alone["requests"] == 30
    assert machine("llama-3.1-70b").tensor_parallel == 4
