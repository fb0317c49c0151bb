"""The runner over K and V of eight bits: what the library's model computes that attends to rounded K and V, however a
request is cut up, placed, mixed with others and found again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.model_runner import ModelRunner
from shared.errors import UnsupportedModel
from shared.messages.pools import FLOAT8, SCALE_BYTES
from tests.checkpoints import FAMILIES, SLIDING_WINDOW
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt, run_step
from tests.rounded_reference import RoundedReference
from tests.unit.worker.runners import LoadRunner

NEW_TOKENS = 12


@functools.cache
def truth(model: Any) -> RoundedReference:
    """Greedy answers of the library's model over rounded K and V, generated once for all cases that ask for them."""
    return RoundedReference(model)


def decided_prompt(model: Any, length: int) -> list[int]:
    """Tokens to which rounding decides none of ``NEW_TOKENS``."""
    seeds = itertools.count(length)
    return truth(model).decided(lambda: random_prompt(length, seed=next(seeds)), NEW_TOKENS)


CASES = [
    *itertools.product(FAMILIES, [16], ["native"]),
    *itertools.product(["llama", "mistral", "opt"], [16], ["portable"]),
    *itertools.product(["llama", "gemma2"], [1, 64], ["native"]),
]


@pytest.mark.parametrize(("family", "page_size", "decode_kernel"), CASES, indirect=["decode_kernel"])
def test_greedy_tokens_are_those_over_rounded_keys_and_values(
    family: str, page_size: int, decode_kernel: str, load_runner: LoadRunner, reference: Callable[..., Any]
) -> None:
    """Chunked prefill, mixed batches and shuffled pages change no token, windows exceeded or not."""
    runner = load_runner(family, page_size=page_size, kv_dtype="fp8")
    prompts = [decided_prompt(reference(family), length) for length in (5, 2 * SLIDING_WINDOW + 43)]
    tables = page_tables(runner, [len(prompt) + NEW_TOKENS for prompt in prompts], seed=page_size)
    requests = [Request(list(prompt), table) for prompt, table in zip(prompts, tables, strict=True)]

    decode_greedily(runner, requests, chunks=[5, 13], new_tokens=NEW_TOKENS)

    expected = [truth(reference(family)).greedy(prompt, NEW_TOKENS) for prompt in prompts]
    assert [request.output for request in requests] == expected


def last_logits(runner: ModelRunner, prompt: list[int], chunks: list[int], seed: int) -> torch.Tensor:
    """Logits of a prompt's last token, which is computed in chunks that end at these places, over pages of its own."""
    (table,) = page_tables(runner, [len(prompt)], seed=seed)
    request = Request(list(prompt), table)
    return [run_step(runner, [(request, end - start)]) for start, end in itertools.pairwise([0, *chunks, len(prompt)])][
        -1
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_no_bit_depends_on_chunks_pages_or_hits(page_size: int, dtype: str, load_runner: LoadRunner) -> None:
    """A prompt that is computed whole, in chunks, token by token or behind what another left has the same logits."""
    runner, prompt = load_runner("llama", page_size=page_size, dtype=dtype, kv_dtype="fp8"), random_prompt(80, seed=9)

    whole = last_logits(runner, prompt, [], seed=0)

    for chunks in ([1], [17, 33], [79], list(range(60, 80))):
        assert torch.equal(last_logits(runner, prompt, chunks, seed=len(chunks)), whole)
    first, second = page_tables(runner, [128, 64], seed=2)
    full = 64 // page_size
    run_step(runner, [(Request([*prompt[:64], 7, 8], first), 66)])
    hit = Request(list(prompt), np.concatenate([first[:full], second]), computed=64)
    beside = Request(random_prompt(20, seed=4), first[full + 2 * 64 // page_size :])
    found = run_step(runner, [(beside, 1), (hit, 16)]) if len(beside.pages) else run_step(runner, [(hit, 16)])
    assert torch.equal(found[-1], whole[-1])


def test_a_token_takes_half_of_bfloat16_and_a_scale_a_head(load_runner: LoadRunner) -> None:
    """Bytes that a pool takes are those of the formula, and a page holds nothing else."""
    runner = load_runner("qwen3", kv_dtype="fp8")
    plain = load_runner("qwen3", dtype="bfloat16")

    scales = 2 * plain.geometry.layers * plain.geometry.kv_heads * SCALE_BYTES

    assert runner.geometry.dtype == FLOAT8
    assert runner.geometry.token_bytes == plain.geometry.token_bytes // 2 + scales
    assert runner.pool.tensor.nbytes == runner.pool.pages * 16 * runner.geometry.token_bytes
    assert runner.pool.planes.padding_bytes == 0


@pytest.mark.parametrize(("family", "reason"), [("mla", "latents"), ("gemma4", "of different sizes"), ("bloom", "own")])
def test_other_pages_are_refused(family: str, reason: str, load_runner: LoadRunner) -> None:
    """The sentence names the setting and what pages hold."""
    with pytest.raises(UnsupportedModel, match=f"--kv-dtype fp8: .*{reason}"):
        load_runner(family, kv_dtype="fp8")
