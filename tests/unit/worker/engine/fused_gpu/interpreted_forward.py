"""A whole step by the kernels themselves and by Hugging Face's model; called in the interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from tests.engine_driver import page_tables, random_prompt
from tests.unit.worker.engine.fused_gpu.made import PAGE_SIZE, KernelAttention, runner_of


@torch.inference_mode()
def logits(directory: Path, dtype: str, tokens: int, chunks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of every row of a prompt, computed in ``chunks`` by the kernels, and at once by the library with eager attention.
    A second prompt decodes beside every chunk.
    """
    from services.worker import kernels

    prompt, other = random_prompt(tokens, seed=2), random_prompt(5, seed=3)
    with runner_of(directory, kernels, dtype) as runner:
        table, beside = page_tables(runner, [tokens, len(other) + len(chunks)], seed=1)
        attention, found, start = KernelAttention(runner.pool), [], 0
        assert runner._fused is not None
        for number, chunk in enumerate(chunks):
            segments = [Segment(1, number, beside), Segment(chunk, start, table)]
            meta = ForwardMeta.build(segments, PAGE_SIZE, "cpu")
            ids = torch.tensor([other[number % len(other)], *prompt[start : start + chunk]])
            positions = torch.tensor([number, *range(start, start + chunk)])
            found.append(runner._fused.paged(ids, positions, meta, attention, torch.arange(1, chunk + 1)))
            start += chunk
    with runner_of(directory, None, dtype) as portable:
        portable.model.set_attn_implementation("eager")
        expected = portable.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    return torch.cat(found).numpy(), expected.numpy()
