"""Hidden states on a GPU: saved by copies on a stream of their own, restored by another, equal within rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.hidden_pieces import HiddenPieces
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.costs import costs_of
from services.worker.restore.hidden_source import PieceSource
from services.worker.restore.layer_mix import LayerMix
from services.worker.restore.profile import measure_restoration
from services.worker.restore.projection import KvProjection
from services.worker.restore.restoration import Restoration, Sources
from services.worker.restore.saving_step import SavedRows
from services.worker.restore.snapshot_ring import SnapshotRing
from services.worker.restore.staging import StagingMemory
from services.worker.restore.two_stage import TwoStageSaver
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.run_name import shm_prefix
from tests.unit.worker.restore.restoring import beside
from tests.unit.worker.restore.saved import Shelf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOKENS = 300
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative to the largest value: cuBLAS takes other kernels for other numbers of rows, and they round otherwise."""


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Every family."""
    return str(request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, family: str, tmp_path: Path) -> Iterator[ModelRunner]:
    """A runner on the GPU in every dtype."""
    made = ModelRunner.load(
        make_checkpoint(family, tmp_path), dtype=request.param, device="cuda", page_size=16, device_kv_bytes=None,
        pages=64, threads=0, shm_prefix=shm_prefix("restore"),
    )  # fmt: skip
    yield made
    made.close()


def forward(runner: ModelRunner, ids: torch.Tensor, context: int, table: np.ndarray) -> torch.Tensor:
    meta = ForwardMeta.build([Segment(len(ids), context, table)], 16, "cuda")
    positions = torch.arange(context, context + len(ids))
    return runner.forward(ids, positions, meta, torch.tensor([len(ids) - 1]))


@pytest.mark.parametrize("mix", ["hidden", "recompute and hidden"])
def test_a_prefix_comes_back(runner: ModelRunner, mix: str) -> None:
    """Prefilled in chunks, decoded, saved, wiped, restored with two staging buffers: the KV is as before."""
    projection = KvProjection(runner)
    shape, shelf = projection.shape, Shelf()
    layers = range(shape.layers)
    ring = SnapshotRing(shape, 16 << 20, device=runner.pool.device, shm_prefix=shm_prefix("restore"), layers=layers)
    saver = TwoStageSaver(ring, HiddenPieces(shelf, layers), max_sequences=1)
    table = np.random.default_rng(1).permutation(64)[:19].astype(np.int32)
    ids = torch.randint(6, 300, (TOKENS,), generator=torch.Generator().manual_seed(2))
    saver.begin("r", 0)
    for start, end in [(0, 130), (130, 270), *((place, place + 1) for place in range(270, TOKENS))]:
        with saver.step() as step, step.around([SavedRows("r", 0, end - start, start)], projection.inputs):
            forward(runner, ids[start:end], start, table)
    saver.close()
    ring.close()
    pages = torch.from_numpy(table).long().cuda()
    expected = runner.pool.tensor[:, :, pages].flatten(2, 3)[:, :, :TOKENS].clone()
    runner.pool.tensor.fill_(float("nan"))
    recomputed = 0 if mix == "hidden" else 2
    restoration = Restoration(
        runner,
        projection,
        Segment(TOKENS, 0, table),
        LayerMix(recomputed, shape.layers - recomputed, 0),
        Sources(hidden=PieceSource(shape, shelf.pieces, 0, TOKENS, layers), ids=ids),
        staging=StagingMemory(2 * TOKENS * shape.row_bytes, runner.pool.device),
        timeout_s=30.0,
    )

    beside(restoration.run)
    restoration.begin()
    restoration.wait_all()
    restoration.finish()

    found = runner.pool.tensor[:, :, pages].flatten(2, 3)[:, :, :TOKENS]
    assert saver.counts.rows == TOKENS
    # Layers that were recomputed in one chunk, after attention in other shapes, may drift a little further.
    scale = expected.float().abs().amax() * TOLERANCE[runner.geometry.dtype]
    assert (found.float() - expected.float()).abs().max() <= scale


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_the_profile_is_measured_on_a_gpu(runner: ModelRunner) -> None:
    """All four figures are positive, and costs follow from them."""
    profile = measure_restoration(runner, [256], rounds=1)

    (figure,) = profile.figures
    costs = costs_of(profile)
    assert (profile.device, profile.threads) == ("cuda", 0)
    assert min(costs.hidden_us, costs.token_us, costs.link_bytes_per_us) > 0
    assert min(figure.io_hidden_s, figure.io_kv_s, figure.compute_hidden_s, figure.compute_token_s) > 0
