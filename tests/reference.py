"""The truth that served answers are held against: Hugging Face ``generate`` on the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


class Reference:
    """Greedy answers of ``model.generate``, float32, one prompt at a time, computed once each."""

    def __init__(self, model_dir: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._model.eval()
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The answer's token ids; it ends after an end-of-sequence token or ``max_tokens``."""
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                answer = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
                )
            self._known[key] = answer[0, len(prompt) :].tolist()
        return self._known[key]
