"""The cost model: units, monotony, and the figures of the papers that it is meant to give."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from thermocline.simulate.cost import (
    Costs,
    backup_s,
    chunk_attention_s,
    costs_of,
    decode_token_s,
    device_kv_tokens,
    efficiency,
    hidden_after_s,
    linear_s,
    load_s,
    overlapped_s,
    step_s,
)
from thermocline.simulate.profiles import load_hardware, load_model


def _costs(hardware: str = "h200-pcie5", model: str = "llama-3.1-8b", **options: object) -> Costs:
    return costs_of(load_hardware(hardware), load_model(model), **({"page_size": 32} | options))  # type: ignore[arg-type]


def test_decode_of_one_is_bound_by_reading_weights() -> None:
    """A step of one row takes as long as reading 16 GB at 85% of 4.8 TB/s, and eight rows take no longer."""
    costs = _costs()

    assert linear_s(costs, 1, 1) == pytest.approx(8.03e9 * 2 / (4.8e12 * 0.85), rel=1e-3)
    assert linear_s(costs, 8, 8) == linear_s(costs, 1, 1)


def test_prefill_is_bound_by_arithmetic() -> None:
    """4,096 rows take two FLOP a parameter and row at the efficiency of so many rows."""
    flop = 2 * load_model("llama-3.1-8b").layer_parameters * 4096

    assert linear_s(_costs(), 4096, 0) == pytest.approx(flop / (989e12 * 0.62), rel=1e-6)


def test_attention_of_chunks_adds_up() -> None:
    """Attention of a prompt in two chunks takes as long as in one, where arithmetic is the bound."""
    costs = _costs()
    whole = chunk_attention_s(costs, 0, 8192)

    assert chunk_attention_s(costs, 0, 4096) + chunk_attention_s(costs, 4096, 8192) == pytest.approx(whole, rel=1e-3)
    assert chunk_attention_s(costs, 0, 16_384) == pytest.approx(4 * whole, rel=1e-3)


def test_decode_attention_reads_the_context() -> None:
    """A decoding request's attention takes as long as reading its KV at the profile's efficiency."""
    assert decode_token_s(_costs()) * 1000 == pytest.approx(1000 * 128 * 1024 / (4.8e12 * 0.7))


@pytest.mark.parametrize("hardware", ["cpu-2core", "a6000-pcie3", "a100-pcie4", "h200-pcie5", "gh200"])
def test_more_work_never_takes_less_time(hardware: str) -> None:
    """A step takes longer with more rows, more requests or more context, on every machine."""
    costs = _costs(hardware, "thermocline-mha" if hardware.startswith("cpu") else "llama-3.1-8b")
    by_rows = [step_s(costs, [(0, rows)], 0, 0) for rows in (1, 2, 16, 17, 100, 512, 2048, 5000)]
    by_context = [step_s(costs, [(start, start + 512)], 0, 0) for start in (0, 1024, 8192, 65_536)]
    by_requests = [step_s(costs, (), count, 1000 * count) for count in (1, 2, 8, 64, 256)]

    for times in (by_rows, by_context, by_requests):
        assert times == sorted(times)
        assert times[0] > 0
    assert step_s(costs, (), 0, 0) == 0


def test_efficiency_is_interpolated_over_the_logarithm_of_rows() -> None:
    """Between two points of the curve it lies between them; beyond the ends it is flat."""
    costs = _costs()

    assert efficiency(costs, 64) == pytest.approx(0.35)
    assert efficiency(costs, 128) == pytest.approx((0.35 + 0.5) / 2)
    assert efficiency(costs, 10**6) == pytest.approx(0.62)
    assert efficiency(costs, 0) == efficiency(costs, 1) == pytest.approx(0.05)


def _link_use(costs: Costs, tokens: int, peak_gb_s: float) -> float:
    return tokens * costs.kv_token_bytes / load_s(costs, tokens) / (peak_gb_s * 1e9)


def test_copying_pages_one_by_one_reaches_what_strata_measured() -> None:
    """8,192 tokens of Llama-3.1-8B in pages of 32: about 22% of PCIe 5.0 and 5% of Grace Hopper's link (Figure 3)."""
    assert _link_use(_costs(io="per-page"), 8192, 64) == pytest.approx(0.22, abs=0.01)
    assert _link_use(_costs("gh200", io="per-page"), 8192, 384) == pytest.approx(0.05, abs=0.005)


def test_large_copies_reach_three_quarters_of_the_link() -> None:
    """Copies of 1-2 MiB reach 75-80% of PCIe 5.0 (Strata 3.1); that is a page of 512 or 1,024 tokens here."""
    assert 0.72 < _link_use(_costs(io="per-page", page_size=512), 8192, 64) < 0.83
    assert 0.75 < _link_use(_costs(io="per-page", page_size=1024), 8192, 64) < 0.86


def test_assisted_loads_do_not_depend_on_the_page_size() -> None:
    """A gather kernel reaches 75-80% of PCIe 5.0 whatever the page size (Strata 4.2)."""
    times = {load_s(_costs(page_size=size), 8192) for size in (1, 16, 32, 64)}

    assert len(times) == 1
    assert 0.75 <= _link_use(_costs(), 8192, 64) <= 0.80


def test_loads_are_of_whole_pages_and_nothing_takes_no_time() -> None:
    """One token costs as much as its page, and no token costs nothing."""
    costs = _costs()

    assert load_s(costs, 1) == load_s(costs, 32) < load_s(costs, 33)
    assert load_s(costs, 0) == backup_s(costs, 0) == 0


def test_a_load_hides_behind_computation_but_for_one_layer() -> None:
    """Layer by layer, a load that is shorter than the computation stalls it for one layer's load only."""
    costs = _costs()
    wall, stall = overlapped_s(costs, 0.32, 0.16)

    assert stall == pytest.approx(0.16 / 32)
    assert wall == pytest.approx(0.32 + stall)


def test_a_long_load_stalls_for_what_it_is_longer() -> None:
    """A load that is longer than the computation ends one layer's computation before the step does."""
    wall, stall = overlapped_s(_costs(), 0.16, 0.64)

    assert wall == pytest.approx(0.64 + 0.16 / 32)
    assert stall == pytest.approx(wall - 0.16)


def test_overlap_is_the_same_as_layer_after_layer() -> None:
    """The closed form equals a simulation of the layers one by one, with and without a head start."""
    costs = _costs()
    for compute_s, loading_s in ((0.3, 0.1), (0.1, 0.3), (0.2, 0.2), (0.0, 0.1)):
        for head_start_s in (0.0, 0.05, 0.15, 0.4):
            end = head_start_s
            for layer in range(32):
                end = max(end, (layer + 1) * loading_s / 32) + compute_s / 32
            wall, stall = overlapped_s(costs, compute_s, loading_s, head_start_s)

            assert wall == pytest.approx(end - head_start_s)
            assert stall == pytest.approx(wall - compute_s)


def test_a_step_that_starts_late_enough_never_stalls() -> None:
    """After the time that hides a load there is no stall, and just before it there is."""
    costs = _costs()
    for compute_s, loading_s in ((0.3, 0.1), (0.1, 0.3)):
        after_s = hidden_after_s(costs, compute_s, loading_s)

        assert overlapped_s(costs, compute_s, loading_s, after_s)[1] == pytest.approx(0, abs=1e-12)
        assert overlapped_s(costs, compute_s, loading_s, after_s * 0.9)[1] > 0


def test_a_step_without_loads_does_not_stall() -> None:
    """Nothing loaded, nothing waited for."""
    assert overlapped_s(_costs(), 0.3, 0.0) == (0.3, 0.0)


def test_tensor_parallelism_divides_work_and_adds_reductions() -> None:
    """Four devices prefill faster than one, by less than four times, and have room for a larger model."""
    one = step_s(_costs(model="llama-3.1-70b"), [(0, 2048)], 0, 0)
    four = step_s(_costs(model="llama-3.1-70b", tensor_parallel=4), [(0, 2048)], 0, 0)
    hardware, model = load_hardware("a100-pcie4"), load_model("llama-3.1-70b")

    assert one / 4 < four < one
    assert device_kv_tokens(hardware, model) == 0
    assert device_kv_tokens(hardware, model, 4) > 100_000


def test_profiles_that_do_not_fit_each_other_are_refused() -> None:
    """No rate for the model's dtype, or heads that do not divide, is an error of the operator."""
    with pytest.raises(ConfigError, match="float16"):
        _costs("cpu-2core", "opt-13b")
    with pytest.raises(ConfigError, match="do not divide"):
        _costs(tensor_parallel=5)
