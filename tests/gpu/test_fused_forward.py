"""The fused forward on a GPU: kernels give their oracles' numbers, logits are the portable path's, weights lie once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker import kernels
from services.worker.engine.fused_gpu.forward import GpuForward
from services.worker.engine.model_runner import ModelRunner
from tests.checkpoints import make_checkpoint
from tests.engine_driver import Request, page_tables, random_prompt, run_step
from tests.run_name import shm_prefix
from tests.unit.worker.kernels import oracles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.06}
"""Of logits, relative to their spread: torch may multiply matrices of float32 in TF32."""


def load(directory: Path, dtype: str, forward: Any) -> ModelRunner:
    return ModelRunner.load(
        directory, dtype=dtype, device="cuda", page_size=16, device_kv_bytes=None, pages=512, threads=0,
        shm_prefix=shm_prefix("fused"), forward=forward,
    )  # fmt: skip


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Of the last rows of mixed steps: chunks of two prompts, then both decode beside a third one's chunk."""
    tables = page_tables(runner, [120, 90, 200], seed=1)
    requests = [
        Request(random_prompt(length, seed=length), table) for length, table in zip((80, 60, 190), tables, strict=True)
    ]
    first, second, third = requests
    steps = [[(first, 79)], [(second, 40), (first, 1)], [(second, 19)], [(second, 1), (third, 150)], [(third, 40)]]
    return torch.cat([run_step(runner, step) for step in steps])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_logits_are_the_portable_paths(family: str, dtype: str, tmp_path: Path) -> None:
    """For every model of the family, by default."""
    directory, found = make_checkpoint(family, tmp_path), {}
    for forward in ("auto", "portable"):
        runner = load(directory, dtype, forward)
        try:
            assert isinstance(runner._fused, GpuForward) == (forward == "auto")
            runner.warm_up()
            found[forward] = logits_of(runner)
        finally:
            runner.close()

    spread = found["portable"].std(dim=-1, keepdim=True)
    deviation = ((found["auto"] - found["portable"]) / spread).square().mean(dim=-1).sqrt()
    assert deviation.max().item() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_give_their_oracles_numbers(dtype: torch.dtype) -> None:
    """At the sizes of Llama-3.1-8B, on every number."""
    torch.manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    x, delta, weight, gate_up, qkv = made(5, 4096), made(5, 4096), made(4096), made(5, 28_672), made(5, 48 * 128)
    angles, pools = torch.randn(99, 64, device="cuda"), (made(4, 16, 8, 128), made(4, 16, 8, 128))
    slots, positions = (torch.tensor(each, device="cuda") for each in ([63, 0, 17, -1, 5], [0, 98, 3, 3, 50]))
    left = []
    for module in (kernels, oracles):
        mine, out, heads = x.clone(), torch.empty_like(x), qkv.clone()
        k_pool, v_pool = (pool.clone() for pool in pools)
        module.add_rms_norm(mine, delta, weight, 1e-5, out)
        module.rope_write(
            heads, positions, angles.cos().to(dtype), angles.sin().to(dtype), (k_pool, v_pool, slots),
            heads=(32, 8), norms=(weight[:128].contiguous(), weight[128:256].contiguous(), 1e-6),
        )  # fmt: skip
        left.append([mine, out, module.silu_mul(gate_up), heads, k_pool, v_pool])

    for found, expected in zip(*left, strict=True):
        steps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, atol=steps * expected.float().abs().mean().item(), rtol=steps)


def test_weights_are_on_the_device_once(tmp_path: Path) -> None:
    """Merged, they take what they took before."""
    taken = {}
    directory = make_checkpoint("llama", tmp_path)
    for forward in ("portable", "fused"):
        runner = load(directory, "bfloat16", forward)
        try:
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in runner.model.parameters()}
            taken[forward] = sum(storage.nbytes() for storage in storages.values())
        finally:
            runner.close()

    assert taken["fused"] == taken["portable"]
