"""Models whose layers carry states on a GPU: the library's tokens, launched kernel by kernel and in CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.worker.engine.model_runner import ModelRunner
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt
from tests.reference import Reference
from tests.run_name import shm_prefix
from tests.state_checkpoints import STATE_FAMILIES, make_state_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NEW_TOKENS = 40


def decided(truth: Reference, length: int, seeds: Iterator[int]) -> list[int]:
    """A prompt behind which rounding decides no token."""
    return truth.decided(lambda: random_prompt(length, seed=next(seeds)), NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_tokens_equal_generate(family: str, has_graphs: bool, tmp_path: Path) -> None:
    """Chunks that end within pages and with them, and decode steps over the ends of pages, in mixed batches."""
    directory = make_state_checkpoint(family, tmp_path)
    truth, seeds = Reference(directory), itertools.count()
    prompts = [decided(truth, length, seeds) for length in (5, 32, 75)]
    runner = ModelRunner.load(
        directory, dtype="float32", device="cuda", page_size=16, device_kv_bytes=None, pages=256, threads=0,
        shm_prefix=shm_prefix("states"),
    )  # fmt: skip
    try:
        runner.warm_up()
        if has_graphs and not runner.attends_itself:
            graphs = runner.capture_decode(4)
            assert graphs.fault == ""
        tables = page_tables(runner, [len(prompt) + NEW_TOKENS for prompt in prompts], seed=1)
        requests = [
            Request(list(prompt), table, slot=slot)
            for slot, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
        ]
        decode_greedily(runner, requests, chunks=[5, 16, 31], new_tokens=NEW_TOKENS)
    finally:
        runner.close()

    assert [each.output for each in requests] == [
        truth.greedy(prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts
    ]
