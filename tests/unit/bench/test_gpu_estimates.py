"""Estimates of GPU speed: the arithmetic by hand, the committed table, and how measured figures are marked."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_estimates
from bench.gpu_estimates import DEVICES, Device, table
from bench.results_file import RESULTS
from services.worker.kv.movers.gpu_assisted import LOAD_PROGRAMS
from thermocline.simulate.profiles import load_hardware

H200 = Device("H200", 132, load_hardware("h200-pcie5"))
KERNELS = {"few": 300, "many": 1400}
SPEEDS = {"batched": {"verified_gb_s": 20.0}, "gpu_assisted_2": {"verified_gb_s": 54.0}}
MEASURED: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "parts": {
        "decode": {"results": {"points": [{"requests": 1, "context": 1024, "graph_ms": 5.0, "floor_ms": 3.5}]}},
        "movers": {"results": {"page_sizes": {
            "16": {"peak_gb_s": 60.0, "movers": SPEEDS},
            "1": {"peak_gb_s": 50.0, "movers": {"batched": {"verified_gb_s": 40.0}}},
        }}},
        "interference": {"results": {"programs": {
            f"load_{LOAD_PROGRAMS}": {"prefill": {"slowdown": 1.02}, "decode": {"slowdown": 1.04}},
        }}},
        "prefill": {"state": "left out"},
    },
}  # fmt: skip


def test_the_committed_table_is_what_the_code_computes() -> None:
    """Renew it with ``python -m bench.gpu_estimates``."""
    committed = json.loads((RESULTS / "gpu_estimates.json").read_text())["results"]
    found = gpu_estimates.evidence(RESULTS / "gpu.json")

    assert committed["rows"] == [asdict(row) for row in table(found, gpu_estimates.kernels_of_a_step(RESULTS))]


def test_a_step_reads_all_weights_but_the_embedding() -> None:
    """8,030,261,248 parameters less 128,256 x 4,096, two bytes each; 128 KiB of KV a token."""
    assert gpu_estimates.weight_bytes() == 2 * (8_030_261_248 - 128_256 * 4096)
    assert gpu_estimates.token_bytes() == 131_072


def test_attention_of_few_programs_waits_for_memory() -> None:
    """Eight KV heads times two splits, 64 keys of 256 bytes each in flight for 0.8 us; many fill the bandwidth."""
    assert gpu_estimates.attention_bytes_per_s(H200, 1, 1024) == pytest.approx(16 * 64 * 256 / 0.8e-6)
    assert gpu_estimates.attention_bytes_per_s(H200, 64, 4096) == H200.read_bytes_per_s


def test_the_budget_of_kernels_meets_the_target_and_no_more() -> None:
    """With as many a step is fast enough, with one more it is not."""
    budget = gpu_estimates.kernel_budget(H200, 185.0)

    assert 1 / gpu_estimates.decode_s(H200, budget) >= 185.0 > 1 / gpu_estimates.decode_s(H200, budget + 1)


def test_products_of_a_prompt_are_counted() -> None:
    """One token without context: two a weight, and four a query head, its width and the one key that it sees."""
    weights = 8_030_261_248 - 2 * 128_256 * 4096

    assert gpu_estimates.prefill_flop(1) == 2 * weights + 4 * 32 * 32 * 128


def test_the_kernel_fills_the_link_with_enough_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in flight over the time of a tile (Little's law), at most the link: by programs and tiles of each."""
    monkeypatch.setattr(gpu_estimates, "TILES_AHEAD", 1)
    one = gpu_estimates.gathered_bytes_per_s(H200, 1)

    assert one == pytest.approx(65_536 / (1.5e-6 + 65_536 / 57.6e9))
    assert gpu_estimates.gathered_bytes_per_s(H200, 2) == pytest.approx(2 * one)
    assert gpu_estimates.gathered_bytes_per_s(H200, 32) == pytest.approx(57.6e9)
    monkeypatch.setattr(gpu_estimates, "TILES_AHEAD", 2)
    assert gpu_estimates.gathered_bytes_per_s(H200, 1) == pytest.approx(2 * one)


def test_kernels_are_those_that_were_counted(tmp_path: Path) -> None:
    """The fewest first, of one request; where nothing was counted, so many a layer."""
    assert list(gpu_estimates.kernels_of_a_step(tmp_path).values()) == [320, 960]
    cases = [
        {"rows": 1, "forward": "portable", "kernels": 1366},
        {"rows": 1, "forward": "fused", "kernels": 327},
        {"rows": 64, "forward": "fused", "kernels": 330},
    ]
    (tmp_path / "gpu_step.json").write_text(json.dumps({"results": {"cases": cases}}))

    assert gpu_estimates.kernels_of_a_step(tmp_path) == {"327 kernels (fused)": 327, "1,366 kernels (portable)": 1366}


def test_copies_of_small_pages_are_bound_by_their_number() -> None:
    """A row of one token is 2 KiB, and a copy takes 3.5 us whatever it carries."""
    assert gpu_estimates.copied_bytes_per_s(H200, 1) == pytest.approx(2048 / (3.5e-6 + 2048 / 57.6e9))


def test_what_a_gpu_measured_is_marked_on_its_device_alone() -> None:
    """Speeds of its parts as targets have them; what was left out stays an estimate."""
    rows = {(row.device, row.key): row.measured for row in table(MEASURED, KERNELS)}

    assert rows["H200", "decode"] == 200.0
    assert rows["H200", "decode_floor"] == pytest.approx(1e3 / 3.5)
    assert rows["H200", "loads"] == 0.8
    assert rows["H200", "slowdown"] == pytest.approx(0.04)
    assert rows["H200", "prefill"] is None
    assert {measured for (device, _), measured in rows.items() if device != "H200"} == {None}
    assert {device for device, _ in rows} == {name for name, _ in DEVICES.values()}


def test_a_run_without_a_gpu_measures_nothing() -> None:
    """Its figures are of a processor."""
    assert {row.measured for row in table({**MEASURED, "gpu": None}, KERNELS)} == {None}
