"""One model type: a tiny random checkpoint of it, answered by the library and over our paged attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from bench.model_support.tiny_configs import CONTEXT, tiny_configs
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_faults import in_one_line
from services.worker.engine.model_loading import load_config, own_context
from services.worker.engine.model_runner import ModelRunner
from services.worker.parallel.group_runner import GroupRunner
from shared.errors import OperatorError
from shared.model_context import first_of

PAGE_SIZE = 8
PROMPT_TOKENS = 60
NEW_TOKENS = 20
_CHUNK = 13
_PREFIX = "modelsupport"
# Where the library's best two logits are nearer than this, rounding may decide, and another seed does not leave it to.
_MARGIN = 1e-3
_SEEDS = 3

ITS_OWN = "attends by code of its own"
CONTEXT_NEEDED = "needs `--max-context-tokens`, because its configuration names no longest context"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``outcome`` is served, refused, untried (the library itself has no tiny model of it) or differs."""

    outcome: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PagedAnswers:
    """Answers that should be alike; ``how`` says what is unlike other models in how they come about."""

    answers: tuple[list[int], ...]
    how: str


Answers = Callable[[Path, list[int], int], PagedAnswers]
"""Answers to a prompt by the model of a folder, over a context of so many tokens."""


def try_type(model_type: str, directory: Path, seed: int, answers: Answers | None = None) -> Outcome:
    """Build the smallest model of ``model_type`` that the library itself can run, and try it; ``answers`` are by
    default :func:`paged_answers`.
    """
    return try_configs(tiny_configs(model_type), directory, seed, answers)


def try_configs(configs: Iterator[Any], directory: Path, seed: int, answers: Answers | None = None) -> Outcome:
    """The same for the first of ``configs`` that the library can run; ``directory`` is for its checkpoint."""
    fault = "it has no configuration"
    try:
        for number, config in enumerate(configs):
            path = directory / str(number)
            config.save_pretrained(path)
            try:
                load_config(path)
            except OperatorError as refused:
                return Outcome("refused", refused.message.replace(str(path), "the checkpoint"))
            try:
                save_random(config, path, seed)
                answer = library_answer(path, prompt_of(seed))
            except Exception as error:
                fault = in_one_line(error)
                continue
            return _try_checkpoint(config, path, answer, directory, seed, answers or paged_answers)
    except Exception as error:
        fault = in_one_line(error)
    return Outcome("untried", f"the library itself does not run a tiny model of it: {fault}")


def save_random(config: Any, path: Path, seed: int) -> Path:
    """A random checkpoint of ``config`` in float32, the same for the same seed."""
    torch.manual_seed(seed)
    model = library_class(config)._from_config(config, attn_implementation="eager")
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.float().save_pretrained(path)
    return path


def library_class(config: Any) -> Any:
    """The library's class that answers prompts for all of ``config``."""
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"no class of the library answers prompts for {config.model_type}")


@torch.inference_mode()
def library_answer(path: Path, prompt: list[int]) -> tuple[list[int], float]:
    """Greedy tokens that the library's own ``generate`` gives with eager attention, and the least margin by which it
    chose one.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    model = library_class(config).from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    # ``generate`` counts positions from 0 where a model, called without any, counts from behind the padding token.
    first = first_of(config)
    told = {"position_ids": torch.arange(first, first + len(prompt))[None]} if first else {}
    made = model.generate(
        torch.tensor([prompt]),
        **told,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits[0].topk(2).values for logits in made.logits]
    answer: list[int] = made.sequences[0, len(prompt) :].tolist()
    return answer, min((float(two[0] - two[1]) for two in best), default=0.0)


def prompt_of(seed: int) -> list[int]:
    """Ordinary tokens, none of them special."""
    prompt: list[int] = np.random.default_rng(seed).integers(6, 300, PROMPT_TOKENS).tolist()
    return prompt


def _try_checkpoint(
    config: Any, path: Path, answer: tuple[list[int], float], directory: Path, seed: int, answers: Answers
) -> Outcome:
    for number in range(_SEEDS):
        try:
            context = 0 if own_context(load_config(path)) else CONTEXT
            found = answers(path, prompt_of(seed + number), context)
        except OperatorError as refused:
            return Outcome("refused", refused.message.replace(str(path), "the checkpoint"))
        expected, margin = answer
        if all(each == expected for each in found.answers):
            return Outcome("served", found.how)
        if margin >= _MARGIN:
            return Outcome("differs", f"library {expected}, paged {found.answers}")
        path = save_random(config, directory / f"seed-{number + 1}", seed + number + 1)
        answer = library_answer(path, prompt_of(seed + number + 1))
    return Outcome("untried", f"in {_SEEDS} seeds the library's best two tokens were too near each other to compare")


def paged_answers(path: Path, prompt: list[int], context: int = 0) -> PagedAnswers:
    """Greedy tokens over paged attention: prefilled in one piece, in chunks, and over a prefix that another has left.
    ``context`` is the longest that is served, in tokens; 0 is the model's own.

    Raises OperatorError with the reason when the model is refused.
    """
    pages = 3 * -(-(len(prompt) + NEW_TOKENS) // PAGE_SIZE)
    runner = ModelRunner.load(
        path,
        dtype="float32",
        device="cpu",
        page_size=PAGE_SIZE,
        device_kv_bytes=None,
        pages=max(pages, 2 * -(-min(CONTEXT, 64) // PAGE_SIZE)),
        threads=1,
        shm_prefix=_PREFIX,
        context_tokens=context,
    )
    try:
        tables = np.split(np.random.default_rng(0).permutation(pages).astype(np.int32), 3)
        notes = (ITS_OWN, runner.attends_itself), (CONTEXT_NEEDED, context > 0)
        return PagedAnswers(answers_of(runner, prompt, tables), "; ".join(note for note, applies in notes if applies))
    finally:
        runner.close()


def answers_of(
    runner: ModelRunner | GroupRunner, prompt: list[int], tables: list[np.ndarray]
) -> tuple[list[int], list[int], list[int]]:
    """The answer to ``prompt`` in one piece, in chunks, and over the first one's pages, each with its own table."""
    whole = _decode(runner, prompt, tables[0], start=0, chunk=len(prompt))
    chunked = _decode(runner, prompt, tables[1], start=0, chunk=_CHUNK)
    shared = len(prompt) // PAGE_SIZE - 1
    reusing = np.concatenate([tables[0][:shared], tables[2][shared:]])
    return whole, chunked, _decode(runner, prompt, reusing, start=shared * PAGE_SIZE, chunk=len(prompt))


def _decode(
    runner: ModelRunner | GroupRunner, prompt: list[int], table: np.ndarray, *, start: int, chunk: int
) -> list[int]:
    """The first ``start`` tokens of ``prompt`` are in the pages already; the rest is computed by ``chunk``."""
    tokens, computed = list(prompt), start
    while len(tokens) < len(prompt) + NEW_TOKENS:
        rows = min(chunk, len(tokens) - computed)
        meta = ForwardMeta.build([Segment(rows, computed, table, running=0)], PAGE_SIZE, runner.pool.device)
        ids = torch.tensor(tokens[computed : computed + rows])
        positions = torch.arange(computed, computed + rows)
        logits = runner.forward(ids, positions, meta, torch.tensor([rows - 1]))
        computed += rows
        if computed == len(tokens):
            tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]
