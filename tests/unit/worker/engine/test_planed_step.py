"""Models whose pages do not hold K and V of all layers alike: what is kept, what it costs, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import DynamicCache

from services.worker.bootstrap import make_disk_reads
from services.worker.config import WorkerConfig
from services.worker.engine import latent_attention, latents
from services.worker.engine.attention import AttentionCall
from services.worker.engine.cache_argument import given_cache
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.device_checks import check_device
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.planed_step import PlanedStep
from services.worker.evaluation.runner_scorer import RunnerScorer
from services.worker.importance.obstacles import obstacle_to_parts
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import HeadsKept, Kept, LatentsKept, StateKept, identity_map, map_planes
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import HiddenStatesUnsupported
from shared.errors import ConfigError, UnsupportedModel
from tests.checkpoints import UNLIKE
from tests.engine_driver import Request, page_tables, random_prompt, run_step
from tests.run_name import shm_prefix

LoadRunner = Callable[..., ModelRunner]

FLOAT32 = 4
KEPT_VALUES = {
    "mla": 3 * (24 + 8),
    "gemma4": 2 * 2 * (2 * 16) + 2 * 2 * (2 * 32),
    "gemma4_padded": 2 * 2 * (2 * 16) + 2 * 2 * (2 * 24),
    "mimo": 2 * (24 + 16) + 2 * 4 * (24 + 16),
}
"""Values of a token: latents of three layers; K and V of two layers with a window and two without, of six; and of two
heads without a window and twice four with one."""

TOKEN_VALUES = {
    "mla": 4 * 32,
    "gemma4": KEPT_VALUES["gemma4"],
    "gemma4_padded": 8 * 48,
    "mimo": 2 * 2 * 24 + 2 * 2 * 4 * 24,
}
"""With an odd last plane, with rows of 32 values in planes of 48, and with V as wide as K."""


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", UNLIKE)
def test_a_token_costs_what_the_formula_says(family: str, page_size: int, load_runner: LoadRunner) -> None:
    """Bytes of a token are those of its planes, and the map knows which of them are padding."""
    runner = load_runner(family, page_size=page_size, tokens=128)
    planes = runner.pool.planes

    assert runner.geometry.token_bytes == TOKEN_VALUES[family] * FLOAT32
    assert planes.content_bytes == page_size * KEPT_VALUES[family] * FLOAT32
    assert planes.padding_bytes == page_size * (TOKEN_VALUES[family] - KEPT_VALUES[family]) * FLOAT32


def test_pages_hold_the_latents_that_the_library_caches(load_runner: LoadRunner, reference: Callable[..., Any]) -> None:
    """Compressed KV after its norm and scale, and the shared key after its rotation."""
    runner, prompt = load_runner("mla"), random_prompt(40, seed=3)
    (table,) = page_tables(runner, [40], seed=4)
    run_step(runner, [(Request(prompt, table), 40)])
    cache = DynamicCache()
    with torch.inference_mode():
        model = reference("mla")
        model(torch.tensor([prompt]), **given_cache(model.forward, cache))

    slots = torch.from_numpy(table[np.arange(40) // 16] * 16 + np.arange(40) % 16).long()
    for layer, kept in enumerate(cache.layers):
        expected = torch.cat((kept.keys[0, 0], kept.values[0, 0]), dim=-1)
        found = runner.pool.k(layer).flatten(0, 1)[slots, 0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class Landing:
    """Loads whose units land when a layer waits for them: until then they hold what no answer survives."""

    def __init__(self, runner: ModelRunner, pages: np.ndarray) -> None:
        self._tensor, self._pages = runner.pool.tensor, torch.from_numpy(pages).long()
        self._saved = self._tensor[:, :, self._pages].clone()
        self._landed = 0
        self.waited: list[int] = []
        self._tensor[:, :, self._pages] = float("nan")

    def wait(self, layer: int) -> None:
        self.waited.append(layer)
        while self._landed <= layer:
            self._tensor[self._landed][:, self._pages] = self._saved[self._landed]
            self._landed += 1


@pytest.mark.parametrize("family", UNLIKE)
def test_a_layer_waits_for_the_units_of_its_planes(family: str, load_runner: LoadRunner) -> None:
    """Nothing is read before its load has landed, and no layer waits for later units than it reads."""
    runner, prompt = load_runner(family), random_prompt(60, seed=11)
    (table,) = page_tables(runner, [60], seed=12)
    request = Request(prompt, table)
    run_step(runner, [(request, 48)])
    expected = run_step(runner, [(request, 12)])
    gate = Landing(runner, table[:3])

    loaded = run_step(runner, [(Request(prompt, table, computed=48), 12)], gate=gate)

    assert torch.equal(loaded, expected)
    planes = runner.pool.planes
    assert gate.waited == [planes.last_unit(layer) for layer in range(len(planes.layers))]
    assert max(gate.waited) == runner.geometry.layers - 1


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(24, 16), (16, 24)])
def test_heads_of_a_layer_in_several_planes_are_attended_to(
    k_dim: int, v_dim: int, has_sinks: bool, decode_kernel: str
) -> None:
    """The narrower of K and V is padded, and the padding changes nothing; each head has its own sink."""
    planes = map_planes([HeadsKept(1, 24, 24), HeadsKept(2, k_dim, v_dim)], 4, "float32")
    assert len(planes.parts_of(1)) == 2
    pool = DevicePool.create(planes.geometry, 8, device="cpu", shm_prefix=shm_prefix("planed"), planes=planes)
    draws = torch.Generator().manual_seed(1)
    rows = 9
    query, key = (torch.randn(1, heads, rows, k_dim, generator=draws) for heads in (4, 2))
    value = torch.randn(1, 2, rows, v_dim, generator=draws)
    sinks = torch.randn(4, generator=draws) if has_sinks else None
    call = AttentionCall(1, query, key, value, 0.2, None, None, {}, sinks=sinks)
    backend, pages, found = CpuAttention(pool), np.array([5, 2, 7], dtype=np.int32), []
    try:
        for first, last in ((0, 6), (6, 8), (8, 9)):
            meta = ForwardMeta.build([Segment(last - first, first, pages)], 4, "cpu")
            part = [each[:, :, first:last] for each in (query, key, value)]
            found.append(
                PlanedStep(meta, pool, backend).attend(replace(call, query=part[0], key=part[1], value=part[2]))
            )
    finally:
        pool.close()

    scores = query[0] @ key[0].repeat_interleave(2, 0).transpose(1, 2) * 0.2
    scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
    last_score = torch.full((4,), float("-inf")) if sinks is None else sinks
    weights = torch.cat((scores, last_score[:, None, None].expand(-1, rows, 1)), dim=-1).softmax(-1)[..., :-1]
    expected = (weights @ value[0].repeat_interleave(2, 0)).transpose(0, 1)
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-4)


def test_latents_that_are_expanded_wrongly_are_found_out(
    load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model gives by its own attention, which expands them itself, is what ours is held against."""
    right = latents.Latents.values

    def swapped(self: latents.Latents, output: torch.Tensor) -> torch.Tensor:
        return right(self, output).flip(1)

    monkeypatch.setattr(latents.Latents, "values", swapped)

    with pytest.raises(UnsupportedModel, match="gives deepseek_v3 other logits"):
        load_runner("mla")


@pytest.mark.parametrize("made_bytes", [1, latent_attention.EXPANDED_BYTES])
def test_both_forms_of_attention_to_latents_agree(
    made_bytes: int, load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and single rows in one step, whichever are absorbed, and however few heads are expanded at once."""
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", made_bytes)
    runner, logits = load_runner("mla"), []
    tables = page_tables(runner, [90, 70, 60], seed=5)
    for most in (float("inf"), 1, 20, 0):
        monkeypatch.setattr(latents.Latents, "absorbed_rows", most)
        requests = [Request(random_prompt(90 - 10 * n, seed=n), table) for n, table in enumerate(tables)]
        run_step(runner, [(requests[0], 60), (requests[1], 30)])
        logits.append(run_step(runner, [(requests[1], 1), (requests[0], 30), (requests[2], 17)]))

    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], atol=1e-3, rtol=1e-3)
    assert not torch.equal(logits[0], logits[3])


def test_expanding_begins_where_it_takes_fewer_operations(load_runner: LoadRunner) -> None:
    """A key is expanded in rank * (nope + value) products a head; a row saves 2 * (rank - nope) products with it."""
    runner = load_runner("mla")
    module = runner.model.model.layers[0].self_attn

    assert module.latents.absorbed_rows == 24 * (8 + 12) / (2 * (24 - 8))


def test_what_kernels_for_gpus_do_not_read_is_refused() -> None:
    """Rows that are too wide, latents and states in exact mode; no bound is of a CPU, or of layers that are alike."""
    heads, latents = map_planes([HeadsKept(2, 16, 16), HeadsKept(2, 32, 24)], 16, "float32"), LatentsKept(512, 64)
    refused: dict[str, list[Kept]] = {
        r"latents of 1024 \+ 64 values \(at most 512 \+ 128\).*choose --device cpu": [LatentsKept(1024, 64)],
        r"heads of 640 values \(at most 512\)": [HeadsKept(1, 640, 128), HeadsKept(1, 64, 64)],
    }

    for match, kept in refused.items():
        planes = map_planes(kept, 16, "float32")
        check_device(planes, "cpu")
        with pytest.raises(UnsupportedModel, match=match):
            check_device(planes, "cuda:0")
    without_kernel: list[list[Kept]] = [[latents], [latents, StateKept(64)]]
    for kept in without_kernel:
        planes = map_planes(kept, 16, "float32")
        check_device(planes, "cuda:0")
        with pytest.raises(UnsupportedModel, match=r"--exact: its pages hold latents.*, for which there is no exact"):
            check_device(planes, "cuda:0", is_exact=True)
    for planes in (heads, identity_map(heads.geometry), map_planes([HeadsKept(1, 640, 640)] * 2, 16, "float32")):
        check_device(planes, "cuda:0", is_exact=True)


@pytest.mark.parametrize(("family", "contents"), [("mla", "latents"), ("gemma4", "K and V of different sizes")])
def test_what_counts_on_k_and_v_of_all_layers_is_refused(family: str, contents: str, load_runner: LoadRunner) -> None:
    """The fused forward, hidden states and parts of prefixes, each with what pages hold instead."""
    runner = load_runner(family)

    with pytest.raises(ConfigError, match=f"--forward fused: .*{contents}"):
        load_runner(family, forward="fused")
    with pytest.raises(HiddenStatesUnsupported, match=contents):
        KvProjection(runner)
    with pytest.raises(ConfigError, match=contents):
        RunnerScorer(runner)


def test_no_part_of_such_a_prefix_is_read(load_runner: LoadRunner) -> None:
    """The worker says so when it starts, and why."""
    bus: Any = None
    runner = load_runner("mla")
    obstacle = obstacle_to_parts(runner, 2**20)

    with capture_logs() as logged:
        assert make_disk_reads(WorkerConfig(model="unused"), runner, bus, obstacle) is None
    assert [line["reason"] for line in logged if line["event"] == "worker_reads_no_parts"] == ["pages hold latents"]
