"""Drive a ModelRunner as a worker would: requests with page tables, steps that mix chunks and decode tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.parallel.group_runner import GroupRunner


@dataclass
class Request:
    """``computed`` tokens have KV. ``tokens`` is the prompt and then what was sampled; ``slot`` is for a state within a
    page.
    """

    tokens: list[int]
    pages: np.ndarray
    computed: int = 0
    slot: int = -1
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]


def run_step(
    runner: ModelRunner | GroupRunner, work: list[tuple[Request, int]], *, gate: LayerGate | None = None
) -> torch.Tensor:
    """Compute the next ``rows`` tokens of each request; the logits of each one's last row, [len(work), vocab]."""
    segments = [Segment(rows, request.computed, request.pages, request.slot) for request, rows in work]
    meta = ForwardMeta.build(segments, runner.geometry.page_size, runner.pool.device, gate)
    ids = [token for request, rows in work for token in request.tokens[request.computed : request.computed + rows]]
    positions = [place for request, rows in work for place in range(request.computed, request.computed + rows)]
    last = np.cumsum([rows for _, rows in work]) - 1
    logits = runner.forward(torch.tensor(ids), torch.tensor(positions), meta, torch.from_numpy(last))
    for request, rows in work:
        request.computed += rows
    return logits


def decode_greedily(
    runner: ModelRunner | GroupRunner, requests: list[Request], chunks: list[int], new_tokens: int
) -> None:
    """Prefill request r in chunks of ``chunks[r]`` rows and append ``new_tokens`` greedy tokens to each.

    Request r starts at step r, so steps mix chunks of some with decode tokens of others.
    """
    step = 0
    while any(len(request.output) < new_tokens for request in requests):
        started = list(zip(requests, chunks, strict=True))[: step + 1]
        work = [
            (request, min(chunk, len(request.tokens) - request.computed))
            for request, chunk in started
            if len(request.output) < new_tokens
        ]
        if work:
            for (request, _), token in zip(work, run_step(runner, work).argmax(-1).tolist(), strict=True):
                if request.computed == len(request.tokens):
                    request.tokens.append(token)
        step += 1


def page_tables(runner: ModelRunner | GroupRunner, lengths: list[int], *, seed: int | None) -> list[np.ndarray]:
    """Disjoint page tables for requests of these many tokens; shuffled by ``seed``, or consecutive if None."""
    page_size = runner.geometry.page_size
    counts = [-(-length // page_size) for length in lengths]
    assert sum(counts) <= runner.pool.pages
    numbers = np.arange(runner.pool.pages, dtype=np.int32)
    if seed is not None:
        numbers = np.random.default_rng(seed).permutation(numbers)
    return np.split(numbers[: sum(counts)], np.cumsum(counts)[:-1])


def random_prompt(length: int, seed: int) -> list[int]:
    """Ordinary tokens of :mod:`tests.checkpoints`."""
    tokens: list[int] = np.random.default_rng(seed).integers(6, 300, length).tolist()
    return tokens
