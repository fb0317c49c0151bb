"""Estimates of GPU speed: the arithmetic by hand, the committed table, and how measured figures are marked."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_estimates import batch, llama, one_request, overlap, prompts, shared_document, transfers, vllm_step
from bench.gpu_estimates.rows import KIB, Device, devices
from bench.gpu_estimates.table import evidence, table
from bench.gpu_estimates.targets import TARGETS
from bench.results_file import RESULTS
from services.worker.kv.movers.gpu_assisted import LOAD_PROGRAMS
from thermocline.simulate.profiles import load_hardware

H200 = Device("H200", 132, 227 * KIB, load_hardware("h200-pcie5"))
SPEEDS = {"batched": {"verified_gb_s": 20.0}, "gpu_assisted_2": {"verified_gb_s": 54.0}}
MEASURED: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "parts": {
        "decode": {"results": {
            "points": [
                {"requests": 1, "context": 1024, "graph_ms": 5.0, "floor_ms": 3.5},
                {"requests": 64, "context": 4096, "graph_ms": 16.0, "floor_ms": 12.0},
            ],
            "shared": [{"requests": 64, "context": 4096, "speedup": 1.7}],
        }},
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

TARGETS_OF_SPEED = [
    "default mover", "loads", "slowdown", "backups", "kernels", "batch 1", "batch 64", "attention", "prefill",
    "shared document", "device-sized defaults", "overlap", "no host read",
]  # fmt: skip


def test_the_committed_table_is_what_the_code_computes() -> None:
    """Renew it with ``python -m bench.gpu_estimates``."""
    committed = json.loads((RESULTS / "gpu_estimates.json").read_text())["results"]
    found = evidence(RESULTS / "gpu.json")

    assert committed["rows"] == [asdict(row) for row in table(found, RESULTS)]


def test_every_target_has_an_estimate_or_a_reason() -> None:
    """Rows of the device that the targets name, the ends of a range around its estimate; and no aim is nobody's."""
    rows = {row.key: row for row in table(None, RESULTS) if row.device == "H200"}

    assert [target.key for target in TARGETS] == TARGETS_OF_SPEED
    for target in TARGETS:
        assert bool(target.rows) != bool(target.reason), target.key
        for key in target.rows:
            assert rows[key].estimate > 0
    assert {row.key for row in rows.values() if row.aim} <= {key for target in TARGETS for key in target.rows}
    for row in rows.values():
        if row.low is not None and row.high is not None:
            assert row.low <= row.estimate <= row.high, row.key


def test_a_step_reads_all_weights_but_the_embedding() -> None:
    """8,030,261,248 parameters less 128,256 x 4,096, two bytes each; 128 KiB of KV a token."""
    assert llama.weight_bytes() == 2 * (8_030_261_248 - 128_256 * 4096)
    assert llama.token_bytes() == 131_072


def test_products_of_layers_are_their_weights() -> None:
    """All but two vectors of each norm, and the last one's."""
    products = sum(columns * depth for columns, depth in llama.layer_products())

    assert 32 * (products + 2 * 4096) + 4096 == 8_030_261_248 - 2 * 128_256 * 4096


def test_attention_of_few_programs_waits_for_memory() -> None:
    """Eight KV heads times two splits, 64 keys of 256 bytes each in flight for 0.8 us; many fill the bandwidth."""
    assert one_request.attention_bytes_per_s(H200, 1, 1024) == pytest.approx(16 * 64 * 256 / 0.8e-6)
    assert one_request.attention_bytes_per_s(H200, 64, 4096) == H200.read_bytes_per_s


def test_the_budget_of_kernels_meets_the_target_and_no_more() -> None:
    """With as many a step is fast enough, with one more it is not."""
    budget = one_request.kernel_budget(H200, 185.0)

    assert 1 / one_request.decode_s(H200, budget) >= 185.0 > 1 / one_request.decode_s(H200, budget + 1)


def test_a_step_of_one_request_adds_up() -> None:
    """Weights, KV at the speed of few programs, kernels and the processor; no faster than weights are read."""
    kv = 1024 * 131_072 / one_request.attention_bytes_per_s(H200, 1, 1024)

    found = one_request.decode_s(H200, 300, share=0.5, kernel_us=1.0, host_us=100.0)

    assert found == pytest.approx(llama.weight_bytes() / 2.4e12 + kv + 400e-6)
    assert one_request.decode_s(H200, 0, 16_384, share=0.1, host_us=0.0) == pytest.approx(
        (llama.weight_bytes() + 16_384 * 131_072) / 0.48e12
    )


def test_products_of_a_prompt_are_counted() -> None:
    """One token without context: two a weight, and four a query head, its width and the one key that it sees."""
    assert llama.product_flop(1) == 2 * (8_030_261_248 - 2 * 128_256 * 4096)
    assert llama.product_flop(0, 1) == 2 * 128_256 * 4096
    assert llama.attention_flop(1) == 4 * 32 * 32 * 128
    assert llama.attention_flop(2, 3) == 4 * 32 * 32 * 128 * (4 + 5)


def test_a_prompt_takes_its_products_and_its_attention() -> None:
    """At the whole peak it is on the roofline; a share of it takes as much longer."""
    flop = llama.product_flop(2048, 1) + llama.attention_flop(2048)

    assert prompts.chunk_s(H200, 2048, 1.0, 1.0) == pytest.approx(flop / 989e12)
    assert prompts.chunk_s(H200, 2048, 0.5, 0.5) == pytest.approx(2 * flop / 989e12)
    assert prompts.assumed_shares(H200, 2048) == (0.58, 0.4)


def test_a_step_of_many_requests_adds_up() -> None:
    """Weights, logits and KV at their shares of the memory, a gap a kernel, and the processor."""
    machine = batch.Machine(memory=0.5, tensor=1.0, attention=0.25, gap_us=2.0)
    read = (llama.weight_bytes() + 16 * 64 * 128_256) / 2.4e12

    found = batch.step_s(H200, batch.System(kernels=300, host_us=100.0), machine, 1000)

    assert found == pytest.approx(read + 64 * 1000 * 131_072 / 1.2e12 + 700e-6)


def test_products_that_compute_longer_than_they_read_take_as_long_as_they_compute() -> None:
    """With 64 rows that is so below a fifth of the tensor cores' peak."""
    slow = replace(batch.LIKELY, tensor=0.1)
    none = batch.System(0, 0.0)

    longer = batch.step_s(H200, none, slow, 0) - batch.step_s(H200, none, batch.LIKELY, 0)

    read = llama.weight_bytes() / (4.8e12 * batch.LIKELY.memory)
    assert longer == pytest.approx(llama.product_flop(64, 64) / 98.9e12 - read)


def test_equal_systems_are_equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine; with attention behind, or the processor between steps, ours is slower everywhere. Ahead of
    the device the processor costs nothing as long as it needs less than a step.
    """
    monkeypatch.setattr(vllm_step, "kernels", lambda: (370, 370))
    alike = batch.Ours(370, (500.0, 250.0, 900.0), (800.0, 400.0, 1200.0))
    slow = batch.Ours(370, (500.0, 250.0, 900.0), (1e5, 1e5, 1e5))

    assert batch.ratios(H200, alike, 4096) == pytest.approx([1.0] * (1 + 2 * 2 * 16))
    assert max(batch.ratios(H200, alike, 4096, behind=0.9)) < 1.0
    assert max(batch.ratios(H200, alike, 4096, reads_first=True)) < 1.0
    assert max(batch.ratios(H200, slow, 4096)) < 0.3
    assert batch.step_s(H200, slow.systems()[0], batch.LIKELY, 4096) == 0.1


def test_attention_at_parity_makes_both_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It pays for kernels that vLLM has not, so it is above vLLM's share."""
    monkeypatch.setattr(vllm_step, "kernels", lambda: (300, 300))
    ours = batch.Ours(370, (500.0, 250.0, 900.0), (800.0, 400.0, 1200.0))

    need = batch.attention_at_parity(H200, ours, 4096)

    assert need > batch.LIKELY.attention
    mine = batch.step_s(H200, ours.systems()[0], replace(batch.LIKELY, attention=need), 4096)
    assert mine == pytest.approx(batch.step_s(H200, batch.theirs()[0], batch.LIKELY, 4096))


def test_launches_of_vllm_are_counted_by_layer() -> None:
    """Ten to twelve a layer, and what is launched once."""
    fewest, most = vllm_step.kernels()

    assert (sum(each.fewest for each in vllm_step.LAYER), sum(each.most for each in vllm_step.LAYER)) == (10, 12)
    assert fewest == 32 * 10 + sum(each.fewest for each in vllm_step.AROUND)
    assert most == 32 * 12 + sum(each.most for each in vllm_step.AROUND)


def test_the_processors_part_is_what_was_measured(tmp_path: Path) -> None:
    """With assumed launches; half of that is the least, and what is assumed to be unkind the most. Ahead of the device
    what is done beside it counts, too.
    """
    step = {
        "cases": [{"rows": 64, "forward": "fused", "kernels": 359, "around": 12}],
        "assumptions": {"unkind": {"host_us": 300, "request_us": 10}},
    }
    (tmp_path / "gpu_step.json").write_text(json.dumps({"results": step}))
    host = {"points": [{"requests": 64, "before_us": 440.0, "beside_us": 100.0}]}
    (tmp_path / "step_host.json").write_text(json.dumps({"results": host}))

    assert batch.ours_of(tmp_path) == batch.Ours(371, (500.0, 250.0, 940.0), (600.0, 300.0, 1040.0))


def test_a_document_is_read_once_for_sixteen() -> None:
    """64 questions about 4,096 tokens are four tiles; each reads one key of its own. Two questions have one tile."""
    assert shared_document.keys_read(64, 4096) == shared_document.Keys(64 * 4097, 4 * 4096 + 64)
    assert shared_document.keys_read(2, 8192) == shared_document.Keys(2 * 8193, 8192 + 2)
    assert shared_document.keys_read(2, 512) == shared_document.Keys(2 * 513, 2 * 513)


def test_what_the_cache_serves_is_not_gained() -> None:
    """Requests that read twice as fast lose half as much by reading all by themselves; who shares nothing, nothing."""
    keys, system = shared_document.keys_read(64, 4096), batch.System(372, 500.0)
    nothing = shared_document.Keys(1000, 1000)

    assert shared_document.gain(H200, 64, nothing, system) == 1.0
    slow, fast = (shared_document.gain(H200, 64, keys, system, rate) for rate in (1.0, 2.0))
    saved = keys.each * llama.token_bytes() / (4.8e12 * batch.LIKELY.attention)
    step = shared_document.step_s(H200, 64, keys.once, system)
    assert slow - fast == pytest.approx(saved / 2 / step)


def test_transfers_are_modelled_for_each_device() -> None:
    """Little's law: what programs have on their way over the link's latency, at most the link; tiles are as many as a
    multiprocessor's shared memory holds.
    """
    tiles = {device.name: device.tiles_ahead for device in devices()}
    assert tiles == {"H200": 3, "A100": 2, "RTX 4090": 1}
    slow = replace(H200, shared_bytes=100 * KIB)
    best, _, worst = transfers.LINK_LATENCY_US

    assert transfers.loaded_share(H200, 16, best) > 0.9
    assert transfers.loaded_share(H200, 16, worst) == pytest.approx(2 * 3 * 65_536 / 9e-6 / 57.6e9, rel=0.05)
    assert transfers.loaded_share(slow, 16, worst) == pytest.approx(
        transfers.loaded_share(H200, 16, worst) / 3, rel=0.05
    )


def test_copies_of_small_pages_are_bound_by_their_number() -> None:
    """A row of one token is 2 KiB, and a copy takes 3.5 us whatever it carries."""
    assert transfers.copied_bytes_per_s(H200, 1) == pytest.approx(2048 / (3.5e-6 + 2048 / 57.6e9))


def test_tiles_that_begin_another_wave_take_as_long_as_a_whole_one() -> None:
    """2,048 rows and 4,096 columns are 256 tiles: two waves on 128 multiprocessors, three on 127."""
    assert transfers.waves_lost(H200, 2048, 4) == 0.0
    assert transfers.waves(2048, 127) - transfers.waves(2048, 128) == 4096 + 4096 + 4096 + 14_336


def test_what_is_behind_a_read_is_what_the_device_waits_for() -> None:
    """The read, and the host's part up to the next launch; what is done beside the device is not in it. Where nobody
    reads first, all of the host's part is done beside the step before.
    """
    found = {row.key: row for row in overlap.estimates(H200, 327, RESULTS)}
    point = overlap.points(RESULTS)[64]

    assert found["read_first_64"].estimate == pytest.approx(1.5 + 5.0 + point["before_us"] + batch.LAUNCHES_US)
    whole = point["before_us"] + point["beside_us"] + batch.LAUNCHES_US
    step_s = batch.step_s(H200, batch.System(batch.ours_of(RESULTS).kernels, 0.0), batch.LIKELY, 1024)
    assert found["host_share_64"].estimate == pytest.approx(whole / 1e6 / step_s)
    assert found["beside_64"].estimate == point["beside_us"] / (point["beside_us"] + point["before_us"])


def test_what_a_gpu_measured_is_marked_on_its_device_alone() -> None:
    """Speeds of its parts as targets have them; what was left out stays an estimate."""
    rows = {(row.device, row.key): row.measured for row in table(MEASURED, RESULTS)}

    assert rows["H200", "decode"] == 200.0
    assert rows["H200", "decode_floor"] == pytest.approx(1e3 / 3.5)
    assert rows["H200", "ours_64_4096"] == 4000.0
    assert rows["H200", "ours_64_1024"] is None
    assert rows["H200", "shared_64_4096"] == 1.7
    assert (rows["H200", "loads_1"], rows["H200", "loads_16"], rows["H200", "loads_32"]) == (0.8, 0.9, None)
    assert rows["H200", "slowdown_decode"] == pytest.approx(0.04)
    assert rows["H200", "prefill_2048"] is None
    assert {measured for (device, _), measured in rows.items() if device != "H200"} == {None}
    assert {device for device, _ in rows} == {device.name for device in devices()}


def test_the_how_to_says_what_is_estimated() -> None:
    """Of a card of 24 GB, which it is written for."""
    rows = {row.key: row.estimate for row in table(None, RESULTS) if row.device == "RTX 4090"}
    page = (RESULTS.parents[1] / "docs" / "how-to" / "gpu.md").read_text(encoding="utf-8")

    assert f"about {rows['decode']:.0f} tokens a second for one request" in page
    assert f"prompts at about {round(rows['prefill_2048'], -3):,.0f} tokens a second" in page


def test_a_run_without_a_gpu_measures_nothing() -> None:
    """Its figures are of a processor."""
    assert {row.measured for row in table({**MEASURED, "gpu": None}, RESULTS)} == {None}


def test_kernels_are_those_that_were_counted(tmp_path: Path) -> None:
    """The fewest first, of one request; where nothing was counted, so many a layer."""
    assert list(one_request.kernels_of_a_step(tmp_path).values()) == [320, 960]
    cases = [
        {"rows": 1, "forward": "portable", "kernels": 1366},
        {"rows": 1, "forward": "fused", "kernels": 327},
        {"rows": 64, "forward": "fused", "kernels": 330},
    ]
    (tmp_path / "gpu_step.json").write_text(json.dumps({"results": {"cases": cases}}))

    assert one_request.kernels_of_a_step(tmp_path) == {"327 kernels (fused)": 327, "1,366 kernels (portable)": 1366}
