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


def generated(path: Path, *, prompt_tokens: int = PROMPT_TOKENS, auto_class: Any = AutoModelForCausalLM) -> list[int]:
    """By the library, with eager attention in float32."""
    model = auto_class.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return greedy_tokens(model, random_prompt(prompt_tokens, seed=1), NEW_TOKENS)


def greedy_tokens(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """By the library's model, told its positions where it counts from elsewhere than 0, as ``generate`` does not."""
    first = first_of(model.config)
    told = {"position_ids": torch.arange(first, first + len(prompt))[None]} if first else {}
    with torch.inference_mode():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, **told)
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer


def paged(path: Path, *, prompt_tokens: int = PROMPT_TOKENS, context: int = 0, forward: str = "auto") -> list[int]:
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
        prompt = random_prompt(prompt_tokens, seed=1)
        tables = page_tables(runner, [prompt_tokens + NEW_TOKENS] * 2, seed=2)
        requests = [Request(list(prompt), table) for table in tables]
        decode_greedily(runner, requests, chunks=[11, prompt_tokens], new_tokens=NEW_TOKENS)
    finally:
        runner.close()
    assert requests[0].output == requests[1].output
    return requests[0].output
