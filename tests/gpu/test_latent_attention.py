"""Attention to latents on a GPU, and whole models that keep them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.engine.key_splits import SPLIT_KEYS
from services.worker.engine.model_runner import ModelRunner
from services.worker.kernels import latent_attention, latent_write
from tests.cases import case
from tests.checkpoints import UNLIKE, make_checkpoint
from tests.engine_driver import Request, page_tables, random_prompt, run_step
from tests.run_name import shm_prefix
from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.paged_batches import Shape, make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SEGMENTS = {
    "decode": ((1, 0), (1, 511), (1, 4 * SPLIT_KEYS + 3)),
    "prompt": ((130, 0), (17, 0)),
    "mixed": ((1, 900), (60, 300), (1, 2), (64, 0)),
}
SIZES = [(16, 512, 64, 16), (128, 512, 64, 64), (40, 256, 32, 1), (3, 24, 8, 16)]
"""Heads, rank, rope, tokens of a page."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_the_kernel_equals_the_oracle(dtype: torch.dtype, segments: tuple[tuple[int, int], ...]) -> None:
    """For every data type and size, decode and chunks equal an oracle in double precision."""
    for heads, rank, rope, page_size in SIZES:
        batch = make_batch(Shape(segments, heads, 1, rank + rope, page_size, dtype), device="cuda")
        scaling = (rank + rope) ** -0.5

        found = latent_attention(batch.q, batch.k_pool, batch.paged, rank=rank, scaling=scaling)

        expected = oracles.latent_attention(batch.q, batch.k_pool, batch.paged, rank=rank, scaling=scaling)
        with case(heads=heads, rank=rank, rope=rope, page_size=page_size):
            torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_reach_their_slots() -> None:
    """To the bit, and no other slot is touched."""
    rows = torch.randn(50, 1, 576, device="cuda").bfloat16()
    pool = torch.randn(9, 16, 1, 576, device="cuda").bfloat16()
    slots = torch.randperm(9 * 16, device="cuda")[:50]
    slots[7] = -1
    expected = pool.clone()
    oracles.latent_write(rows, expected, slots)

    latent_write(rows, pool, slots)

    assert torch.equal(pool, expected)


@pytest.mark.parametrize("family", UNLIKE)
def test_models_give_the_logits_of_a_cpu(family: str, tmp_path: Path) -> None:
    """Of a prompt in chunks that are expanded and absorbed, and of tokens behind it."""
    directory, prompt = make_checkpoint(family, tmp_path), random_prompt(80, seed=1)
    found: dict[str, list[torch.Tensor]] = {}
    for device in ("cuda", "cpu"):
        runner = ModelRunner.load(
            directory, dtype="float32", device=device, page_size=16, device_kv_bytes=None, pages=16, threads=0,
            shm_prefix=shm_prefix("latents"),
        )  # fmt: skip
        try:
            (table,) = page_tables(runner, [80], seed=2)
            request = Request(prompt, table)
            found[device] = [run_step(runner, [(request, rows)]).cpu() for rows in (50, 9, 20, 1)]
        finally:
            runner.close()

    for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
