"""Greedy answers of one checkpoint, by the library's own generate and over the paged pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from services.worker.engine.model_runner import ModelRunner
from shared.model_context import first_of
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt

PROMPT_TOKENS = 40
NEW_TOKENS = 20


def generated(path: Path, *, auto_class: Any = AutoModelForCausalLM) -> list[int]:
    """By the library, with eager attention in float32."""
    model = auto_class.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return greedy_tokens(model, random_prompt(PROMPT_TOKENS, seed=1), NEW_TOKENS)


def greedy_tokens(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """By the library's model, told its positions where it counts from elsewhere than 0, as ``generate`` does not."""
    first = first_of(model.config)
    told = {"position_ids": torch.arange(first, first + len(prompt))[None]} if first else {}
    with torch.inference_mode():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, **told)
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer


def paged(path: Path, *, context: int = 0, forward: str = "auto") -> list[int]:
    """Ours, of two requests of other chunks in one batch, which must agree."""
    runner = ModelRunner.load(
        path,
        dtype="float32",
        device="cpu",
        page_size=16,
        device_kv_bytes=None,
        pages=32,
        threads=1,
        shm_prefix="answerstest",
        forward=forward,  # type: ignore[arg-type]
        context_tokens=context,
    )
    try:
        prompt = random_prompt(PROMPT_TOKENS, seed=1)
        tables = page_tables(runner, [PROMPT_TOKENS + NEW_TOKENS] * 2, seed=2)
        requests = [Request(list(prompt), table) for table in tables]
        decode_greedily(runner, requests, chunks=[11, PROMPT_TOKENS], new_tokens=NEW_TOKENS)
    finally:
        runner.close()
    assert requests[0].output == requests[1].output
    return requests[0].output


def assert_answers_as(model: Any, runner: ModelRunner) -> None:
    """Of prompts of several chunks and windows, computed in pieces, beside one another and behind a prefix that another
    has left, ``runner`` gives the library's own answers; it is closed.
    """
    prompts = [random_prompt(70, seed=1), random_prompt(40, seed=2), random_prompt(70, seed=1)]
    try:
        tables = page_tables(runner, [100, 60, 100], seed=3)
        shared = 48 // runner.geometry.page_size
        tables[2][:shared] = tables[0][:shared]
        requests = [Request(list(prompt), table) for prompt, table in zip(prompts, tables, strict=True)]
        decode_greedily(runner, requests[:2], chunks=[33, 11], new_tokens=16)
        requests[2].computed = 48
        decode_greedily(runner, requests[2:], chunks=[22], new_tokens=16)
    finally:
        runner.close()
    answers = [greedy_tokens(model, prompt, 16) for prompt in prompts[:2]]
    assert [request.output for request in requests] == [*answers, answers[0]]
