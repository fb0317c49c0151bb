"""The runner computes what Hugging Face computes, however a request is cut up, placed and mixed with others."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.model_runner import ModelRunner
from shared.errors import ConfigError
from tests.checkpoints import FAMILIES, SLIDING_WINDOW, UNLIKE
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt, run_step
from tests.reference import Reference
from tests.run_name import shm_prefix

LoadRunner = Callable[..., ModelRunner]
NEW_TOKENS = 18


@functools.cache
def truth(model: Any) -> Reference:
    """Greedy answers of Hugging Face's model, generated once for all cases that ask for them."""
    return Reference(model)


def decided_prompt(model: Any, start: list[int], length: int) -> list[int]:
    """``start`` and ``length`` more tokens, to which rounding decides none of ``NEW_TOKENS``."""
    seeds = itertools.count(length)
    return truth(model).decided(lambda: [*start, *random_prompt(length, seed=next(seeds))], NEW_TOKENS)


# Attention does not know of families: some stand for all that have heads like theirs, with a window or without.
KINDS = ("llama", "gemma2", *UNLIKE)
KERNELS = [
    *itertools.product([*FAMILIES, *UNLIKE], ["native"]),
    *itertools.product(["llama", "mistral", "opt", *UNLIKE], ["portable"]),
]
CASES = [
    *((family, 16, kernel) for family, kernel in KERNELS),
    *itertools.product(["llama", "gemma2", "mla", "gemma4"], [1, 64], ["native"]),
]


@pytest.mark.parametrize(("family", "page_size", "decode_kernel"), CASES, indirect=["decode_kernel"])
def test_greedy_tokens_equal_generate(
    family: str, page_size: int, decode_kernel: str, load_runner: LoadRunner, reference: Callable[..., Any]
) -> None:
    """Chunked prefill, mixed batches and shuffled pages change no token, windows exceeded or not."""
    runner = load_runner(family, page_size=page_size)
    model = reference(family)
    prompts = [decided_prompt(model, [], length) for length in (5, 50, 2 * SLIDING_WINDOW + 43)]
    tables = page_tables(runner, [len(prompt) + NEW_TOKENS for prompt in prompts], seed=page_size)
    requests = [Request(list(prompt), table) for prompt, table in zip(prompts, tables, strict=True)]

    decode_greedily(runner, requests, chunks=[5, 13, 31], new_tokens=NEW_TOKENS)

    assert [request.output for request in requests] == [truth(model).greedy(prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_prefix_hits_change_no_token(
    family: str, same_step: bool, load_runner: LoadRunner, reference: Callable[..., Any]
) -> None:
    """A request may use pages that another has filled, or fills in the very same step."""
    runner = load_runner(family)
    shared = random_prompt(48, seed=1)
    suffix = decided_prompt(reference(family), shared, 11)[len(shared) :]
    first_table, second_table = page_tables(runner, [len(shared) + 1, len(suffix) + NEW_TOKENS], seed=3)
    first = Request([*shared, 7], first_table)
    second = Request([*shared, *suffix], np.concatenate([first_table[:3], second_table]), computed=48)

    if same_step:
        logits = run_step(runner, [(first, 49), (second, 11)])[1]
    else:
        run_step(runner, [(first, 49)])
        logits = run_step(runner, [(second, 11)])[0]
    second.tokens.append(int(logits.argmax()))
    decode_greedily(runner, [second], chunks=[1], new_tokens=NEW_TOKENS)

    assert second.output == truth(reference(family)).greedy([*shared, *suffix], NEW_TOKENS)


@pytest.mark.parametrize("family", KINDS)
def test_long_chunks_after_context_give_the_same_logits(
    family: str, load_runner: LoadRunner, reference: Callable[..., Any]
) -> None:
    """Chunks longer than a block of query rows, after context, agree with one pass over the whole prompt."""
    runner = load_runner(family)
    prompt = random_prompt(400, seed=4)
    (table,) = page_tables(runner, [400], seed=5)
    request = Request(prompt, table)

    logits = torch.cat([run_step(runner, [(request, rows)]) for rows in (101, 298, 1)])

    with torch.inference_mode():
        expected = reference(family)(torch.tensor([prompt])).logits[0, [100, 398, 399]]
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", *UNLIKE])
def test_placement_does_not_change_a_bit(family: str, dtype: str, decode_kernel: str, load_runner: LoadRunner) -> None:
    """Consecutive pages, which are read in place, and shuffled ones, which are gathered, give equal logits."""
    runner = load_runner(family, dtype=dtype)
    results = []
    for seed in (None, 6):
        (table,) = page_tables(runner, [200], seed=seed)
        request = Request(random_prompt(200, seed=7), table)
        results.append(torch.cat([run_step(runner, [(request, rows)]) for rows in (90, 60, 49, 1)]))

    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "decode_kernel"), KERNELS, indirect=["decode_kernel"])
def test_a_decoding_request_does_not_notice_its_batch(
    family: str, dtype: str, decode_kernel: str, load_runner: LoadRunner
) -> None:
    """The logits of a decode token are equal to the bit alone and beside chunks and decode tokens of others."""
    runner = load_runner(family, dtype=dtype)
    tables = page_tables(runner, [64, 80, 120, 150], seed=8)
    requests = [Request(random_prompt(40 + 20 * n, seed=n), table) for n, table in enumerate(tables)]
    for request in requests[:3]:
        run_step(runner, [(request, len(request.tokens) - 1)])

    alone = run_step(runner, [(requests[0], 1)])[0]
    requests[0].computed -= 1
    together = run_step(runner, [(requests[1], 1), (requests[3], 33), (requests[0], 1), (requests[2], 1)])[2]

    assert torch.equal(alone, together)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_agrees_within_rounding(family: str, load_runner: LoadRunner, reference: Callable[..., Any]) -> None:
    """In bfloat16 the pool holds Hugging Face's KV and the logits its logits, up to bfloat16 rounding."""
    runner = load_runner(family, dtype="bfloat16")
    prompt = random_prompt(20, seed=9)
    (table,) = page_tables(runner, [20], seed=10)
    request = Request(prompt, table)

    logits = torch.cat([run_step(runner, [(request, rows)]) for rows in (9, 10, 1)])

    with torch.inference_mode():
        expected = reference(family, torch.bfloat16)(torch.tensor([prompt]), use_cache=True)
    slots = torch.tensor([int(table[place // 16]) * 16 + place % 16 for place in range(20)])
    pool = runner.pool.tensor.flatten(2, 3)[:, :, slots].float()
    first_layer = expected.past_key_values.layers[0]
    for half, kept in enumerate((first_layer.keys, first_layer.values)):
        torch.testing.assert_close(pool[0, half], kept[0].transpose(0, 1).float(), atol=0.02, rtol=0.02)
    deviation = (logits - expected.logits[0, [8, 18, 19]].float()).square().mean().sqrt()
    assert deviation < 0.1 * expected.logits.float().std()


class _LoadingGate:
    """Puts the saved KV of a layer into the pool when attention of that layer asks."""

    def __init__(self, runner: ModelRunner, saved: torch.Tensor, pages: np.ndarray) -> None:
        self.runner, self.saved, self.pages = runner, saved, torch.from_numpy(pages).long()
        self.waited: list[int] = []

    def wait(self, layer: int) -> None:
        self.waited.append(layer)
        self.runner.pool.tensor[layer][:, self.pages] = self.saved[layer]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_attention_waits_for_the_layers_loads(family: str, load_runner: LoadRunner) -> None:
    """KV that arrives during the step, layer by layer through the gate, gives the logits of KV that was there: in a
    fused forward and in the library's modules.
    """
    runner = load_runner(family)
    (table,) = page_tables(runner, [64], seed=11)
    prompt = random_prompt(60, seed=12)
    request = Request(prompt, table)
    run_step(runner, [(request, 48)])
    expected = run_step(runner, [(request, 12)])
    saved = runner.pool.tensor[:, :, torch.from_numpy(table[:3]).long()].clone()
    runner.pool.tensor.fill_(float("nan"))
    gate = _LoadingGate(runner, saved, table[:3])

    loaded = run_step(runner, [(Request(prompt, table, computed=48), 12)], gate=gate)

    assert torch.equal(loaded, expected)
    assert gate.waited == list(range(runner.geometry.layers))


def test_a_gate_that_raises_ends_the_step(load_runner: LoadRunner) -> None:
    """The gate's own error comes out of forward, and the runner goes on with the next step."""

    class Broken:
        def wait(self, layer: int) -> None:
            raise TimeoutError("load is late")

    runner = load_runner("llama")
    (table,) = page_tables(runner, [16], seed=None)

    with pytest.raises(TimeoutError, match="load is late"):
        run_step(runner, [(Request([7, 8, 9], table), 3)], gate=Broken())
    assert run_step(runner, [(Request([7, 8, 9], table), 3)]).isfinite().all()


def test_a_step_may_want_no_logits(load_runner: LoadRunner) -> None:
    """A step of chunks that end before their prompts returns an empty [0, vocab]."""
    runner = load_runner("llama")
    (table,) = page_tables(runner, [16], seed=None)
    from services.worker.engine.forward_meta import ForwardMeta, Segment

    meta = ForwardMeta.build([Segment(4, 0, table)], 16, "cpu")
    logits = runner.forward(torch.arange(4), torch.arange(4), meta, torch.empty(0, dtype=torch.int64))

    assert logits.shape == (0, 300)


def test_warm_up_leaves_the_runner_as_good_as_new(load_runner: LoadRunner, reference: Callable[..., Any]) -> None:
    """After a warm-up requests get the same tokens."""
    runner = load_runner("llama")
    runner.warm_up()
    (table,) = page_tables(runner, [60], seed=13)
    prompt = decided_prompt(reference("llama"), [], 30)
    request = Request(list(prompt), table)

    decode_greedily(runner, [request], chunks=[30], new_tokens=NEW_TOKENS)

    assert request.output == truth(reference("llama")).greedy(prompt, NEW_TOKENS)


def test_facts_of_the_model(load_runner: LoadRunner) -> None:
    """The runner tells geometry, context, vocabulary and EOS as the checkpoint has them."""
    runner = load_runner("qwen3", page_size=32)

    assert (runner.geometry.layers, runner.geometry.kv_heads, runner.geometry.head_dim) == (3, 2, 32)
    assert (runner.geometry.page_size, runner.geometry.dtype) == (32, "float32")
    assert (runner.max_context, runner.vocab_size, runner.eos_token_ids) == (2048, 300, (2,))


def test_the_pool_is_as_large_as_its_bytes_allow(checkpoint: Callable[[str], Path]) -> None:
    """Given bytes, the pool has as many whole pages as fit; too few are refused."""
    settings: dict[str, Any] = {
        "dtype": "auto", "device": "cpu", "page_size": 16, "pages": None, "threads": 1,
        "shm_prefix": shm_prefix("engine"),
    }  # fmt: skip
    page_bytes = 3 * 2 * 16 * 2 * 16 * 4

    runner = ModelRunner.load(checkpoint("llama"), device_kv_bytes=10 * page_bytes - 1, **settings)

    assert runner.pool.pages == 9
    runner.close()
    for too_little in (page_bytes - 1, None):
        with pytest.raises(ConfigError):
            ModelRunner.load(checkpoint("llama"), device_kv_bytes=too_little, **settings)
