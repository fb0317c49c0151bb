"""Groups of ranks on GPUs: NCCL between them, a part of the pool on each, mapped by CUDA IPC."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from services.storage.pools import open_device_pool
from services.worker.kv.movers.batched_cuda import BatchedCudaMover
from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.parallel.group_runner import load_group
from services.worker.parallel.orders import StartRank
from services.worker.parallel.parts_mover import PartsMover
from shared.memory import HostPoolView, unlink_all
from tests.checkpoints import make_checkpoint
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt
from tests.reference import Reference
from tests.run_name import shm_prefix

RANKS = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} NVIDIA GPUs"
    ),
]


def test_a_group_on_gpus_answers_and_moves_pages_as_one_rank_does(tmp_path: Path) -> None:
    """Tokens as Hugging Face generates them; pages that were loaded are backed up again as they were."""
    model = make_checkpoint("llama", tmp_path / "model")
    start = StartRank(
        rank=0, ranks=RANKS, model_dir=str(model), dtype="float32", device="cuda", threads=0, page_size=16,
        shm_prefix=shm_prefix("group"), store_port=0, timeout_ms=60_000,
    )  # fmt: skip
    group = load_group(start, device_kv_bytes=0, pages=32)
    try:
        reference, seeds = Reference(model), itertools.count()
        prompts = [
            reference.decided(partial(next, (random_prompt(length, seed) for seed in seeds)), 12)
            for length in (37, 5, 70)
        ]
        tables = page_tables(group, [len(prompt) + 12 for prompt in prompts], seed=3)
        requests = [Request(list(prompt), pages) for prompt, pages in zip(prompts, tables, strict=True)]
        decode_greedily(group, requests, [16, 5, 33], 12)
        for request, prompt in zip(requests, prompts, strict=True):
            expected = reference.greedy(prompt, 12)
            assert request.output[: len(expected)] == expected

        host = HostPoolView.create(shm_prefix("group"), group.geometry, 4)
        host.pages[...] = np.random.default_rng(1).integers(0, 256, host.pages.shape, dtype=np.uint8)
        memory = PageMemory(PageLayout.page_first(group.geometry, 4), array=host.flat_pages())
        mover = PartsMover(group.geometry, group.parts.parts, BatchedCudaMover)
        host_pages, device_pages = np.arange(2, dtype=np.int32), np.array([7, 30], dtype=np.int32)
        mover.load(memory, range(group.geometry.layers), host_pages, device_pages)
        mover.drain()
        mover.store(memory, range(group.geometry.layers), device_pages, host_pages + 2)

        assert (host.pages[2:] == host.pages[:2]).all()
        view = open_device_pool(group.pool.handle())
        assert len(view.handle.parts) == RANKS
    finally:
        group.close()
        unlink_all(shm_prefix("group"))
