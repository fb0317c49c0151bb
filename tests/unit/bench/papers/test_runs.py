"""The runs behind HotPrefix's and Strata's pages."""

import pytest

from bench.papers.hotprefix import QUESTIONS, Arrangement, Machine, Scale, config_of, measure, tokens_of
from bench.papers.hotprefix_machines import devices, half_tokens
from bench.papers.strata import FULL, burst_tokens, h200
from bench.papers.strata import Scale as StrataScale
from bench.papers.strata import measure as measure_strata
from bench.papers.strata_machines import HICACHE, copies, machine, replace_host, stalls
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.workloads.documents import DocumentOptions


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
