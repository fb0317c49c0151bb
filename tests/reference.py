"""The truth that served answers are held against: Hugging Face on the same checkpoint, where rounding decides nothing.

Logits depend in their last bits on the shape of the batch that computes them. Over the checkpoints of
:mod:`tests.checkpoints`, of which 400 tokens each were computed at once and one by one, logits differed by 3.3e-5 at
most, and cumulative probabilities at a temperature of 0.8 by 3e-6. A token is *decided* where it stands off from every
other by ten times as much or more. Only answers of decided tokens can be compared, so :meth:`Reference.greedy` and
:meth:`Reference.sampled` refuse all others; :meth:`Reference.decided` and :meth:`Reference.decided_seed` find prompts
and seeds that have one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from services.worker.engine.cache_argument import given_cache
from services.worker.engine.uniform import uniform
from shared.model_context import first_of

LOGIT_MARGIN = 1e-3
"""Least distance between the two highest logits of a decided greedy token."""

DRAW_MARGIN = 3e-5
"""Least distance of a draw in [0, 1) from both ends of the interval of the token that it decides."""

_SEEDS_AT_ONCE = 8
_PROMPTS_MOST = 100
_SEEDS_MOST = 1024


class Reference:
    """Answers in float32, one prompt at a time, computed once each."""

    def __init__(self, model: Path | PreTrainedModel) -> None:
        if isinstance(model, Path):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model: PreTrainedModel = model
        self._greedy: dict[tuple[tuple[int, ...], int, bool], tuple[list[int], float]] = {}
        self._sampled: dict[tuple[tuple[int, ...], int, float], dict[int, list[int] | None]] = {}

    def greedy(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The answer's token ids; it ends after ``max_tokens``, or an end-of-sequence token that is not ignored.

        Raises AssertionError unless every token is decided.
        """
        tokens, margin = self._generate(prompt, max_tokens, ignore_eos)
        assert margin > self.margin, f"rounding decides a token of this answer ({margin:.1e}): take a decided prompt"
        return tokens

    def sampled(self, prompt: list[int], max_tokens: int, *, temperature: float, seed: int) -> list[int]:
        """The ``max_tokens`` tokens that are drawn with this seed, whatever they are.

        Raises AssertionError unless every token is decided.
        """
        tokens = self._draw(prompt, max_tokens, temperature, range(seed, seed + 1))[seed]
        assert tokens is not None, f"rounding decides a token of this answer with seed {seed}: take a decided seed"
        return tokens

    def decided(self, draw: Callable[[], list[int]], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The first prompt from ``draw`` whose greedy answer is decided."""
        for _ in range(_PROMPTS_MOST):
            prompt = draw()
            if self._generate(prompt, max_tokens, ignore_eos)[1] > self.margin:
                return prompt
        raise AssertionError(f"none of {_PROMPTS_MOST} prompts has a decided answer of {max_tokens} tokens")

    def decided_seed(self, prompt: list[int], max_tokens: int, *, temperature: float) -> int:
        """The smallest seed with which every token of the answer is decided."""
        for first in range(0, _SEEDS_MOST, _SEEDS_AT_ONCE):
            found = self._draw(prompt, max_tokens, temperature, range(first, first + _SEEDS_AT_ONCE))
            for seed in range(first, first + _SEEDS_AT_ONCE):
                if found[seed] is not None:
                    return seed
        raise AssertionError(f"none of {_SEEDS_MOST} seeds has a decided answer of {max_tokens} tokens")

    @property
    def margin(self) -> float:
        """Least distance between the two highest logits of a decided greedy token."""
        return LOGIT_MARGIN

    rounds = False
    """Whether K and V of an answer are kept otherwise than the model computes them."""

    def cache(self) -> DynamicCache:
        """Where the model keeps K and V of an answer."""
        return DynamicCache(config=self._model.config)

    def _generate(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> tuple[list[int], float]:
        """Tokens, and the least distance between the two highest logits of a step."""
        key = (tuple(prompt), max_tokens, ignore_eos)
        if key not in self._greedy:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                answer = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                    **(given_cache(self._model.forward, self.cache()) if self.rounds else {}),
                    **self._positions(len(prompt)),
                    **({"eos_token_id": -1, "pad_token_id": 0} if ignore_eos else {}),
                )
            highest = torch.stack([logits[0].topk(2).values for logits in answer.logits])
            margin = float((highest[:, 0] - highest[:, 1]).min())
            self._greedy[key] = answer.sequences[0, len(prompt) :].tolist(), margin
        return self._greedy[key]

    def _positions(self, tokens: int) -> dict[str, torch.Tensor]:
        """Where the model counts from elsewhere than 0, which ``generate`` does not do by itself."""
        first = first_of(self._model.config)
        return {"position_ids": torch.arange(first, first + tokens)[None]} if first else {}

    def _draw(
        self, prompt: list[int], max_tokens: int, temperature: float, seeds: range
    ) -> dict[int, list[int] | None]:
        """By seed the tokens of its answer, or None where one is not decided. All seeds go on beside one another."""
        known = self._sampled.setdefault((tuple(prompt), max_tokens, temperature), {})
        left = [seed for seed in seeds if seed not in known]
        if not left:
            return known
        known |= dict.fromkeys(left)
        cache = self.cache()
        answers = torch.empty(len(left), 0, dtype=torch.long)
        ids = torch.tensor([prompt] * len(left))
        with torch.inference_mode():
            for position in range(max_tokens):
                logits = self._model(ids, use_cache=True, **given_cache(self._model.forward, cache)).logits[:, -1]
                draws = torch.tensor([[uniform(seed, position)] for seed in left], dtype=torch.float64)
                tokens, margins = _drawn(logits, temperature, draws)
                stays = (margins > DRAW_MARGIN).nonzero()[:, 0]
                if not len(stays):
                    return known
                cache.batch_select_indices(stays)
                left = [left[row] for row in stays.tolist()]
                ids = tokens[stays, None]
                answers = torch.cat([answers[stays], ids], dim=1)
        known |= zip(left, answers.tolist(), strict=True)
        return known


def _drawn(logits: torch.Tensor, temperature: float, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R] that ``draws`` [R, 1] decide, and the distance of each draw from the ends of its interval."""
    weights = torch.softmax(logits.double() / temperature, dim=1)
    ends = weights.cumsum(dim=1)
    ends[:, -1] = 1.0
    tokens = torch.searchsorted(ends, draws, right=True)
    starts = torch.where(tokens > 0, ends.gather(1, (tokens - 1).clamp_min(0)), -1.0)
    upper = torch.where(tokens < ends.shape[1] - 1, ends.gather(1, tokens), 2.0)
    return tokens[:, 0], torch.minimum(draws - starts, upper - draws)[:, 0]
