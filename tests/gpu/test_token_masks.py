"""Masks of grammars on logits that are on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.engine.sample_row import SampleRow
from services.worker.engine.sampler import sample
from shared.messages.requests import SamplingParams

VOCAB_SIZE = 131_072


def test_a_gpu_chooses_under_masks_what_a_cpu_chooses() -> None:
    """Greedy rows with masks get the same tokens on both."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, VOCAB_SIZE, generator=generator)
    masks = np.random.default_rng(3).integers(-(2**31), 2**31, (8, VOCAB_SIZE // 32), dtype=np.int32)
    rows = [SampleRow(SamplingParams(max_tokens=4, temperature=0), 0, allowed=mask) for mask in masks]
    there = sample(logits.cuda(), rows)

    assert [each.token for each in there] == [each.token for each in sample(logits, rows)]
