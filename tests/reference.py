"""The truth that served answers are held against: Hugging Face ``generate`` on the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

CLEAR = 1e-3
"""Logits further apart than this are in the same order however they are rounded: models here err by about 1e-5."""


class Reference:
    """Greedy answers of ``model.generate``, float32, one prompt at a time, computed once each."""

    def __init__(self, model_dir: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._model.eval()
        self._known: dict[tuple[tuple[int, ...], int], tuple[list[int], float]] = {}

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The answer's token ids; it ends after an end-of-sequence token or ``max_tokens``."""
        return self._answer(prompt, max_tokens)[0]

    def is_clear(self, prompt: list[int], max_tokens: int) -> bool:
        """Whether no token of the greedy answer was nearly another, which rounding decides."""
        return self._answer(prompt, max_tokens)[1] > CLEAR

    def _answer(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Tokens, and the least distance between the two highest logits of a step."""
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                answer = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            highest = torch.stack([logits[0].topk(2).values for logits in answer.logits])
            margin = float((highest[:, 0] - highest[:, 1]).min())
            self._known[key] = answer.sequences[0, len(prompt) :].tolist(), margin
        return self._known[key]
