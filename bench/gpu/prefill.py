"""Chunks of a prompt through the whole model, against what the tensor cores allow.

Random weights of Llama-3.1-8B in bfloat16. A chunk of as many tokens as a batch has by default (2,048), and a large one
(8,192), at the start of a prompt and behind a long context. Products are counted: two a weight and token, without the
embedding and with the head for one row, and those of attention over visible keys. ``of_ceiling`` is what they come to
beside a matrix product measured in the same run. A step cannot be faster than its products take at that speed.

``python -m bench.gpu.prefill [--quick | --cpu] [--rounds 9]``
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.gpu import reading, timing
from bench.gpu.decode import fill_pool
from bench.gpu.models import LLAMA_8B, SHALLOW_LAYERS, TINY, random_runner
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner

PAGE_SIZE = 16
POINTS = [(2048, 0), (2048, 16_384), (8192, 0), (512, 4096), (8192, 16_384)]
"""(rows, tokens of context before them), the most telling first."""

TINY_POINTS = [(24, 0), (8, 16)]


def flop(runner: ModelRunner, rows: int, context: int) -> float:
    """Of a chunk whose last row has its logits computed."""
    model, config = runner.model, runner.model.config
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    layers: int = sum(each.numel() for each in model.parameters() if id(each) not in outside)
    head = int(config.vocab_size * config.hidden_size)
    width = int(config.num_hidden_layers * config.num_attention_heads) * runner.geometry.head_dim
    visible = rows * (context + (rows + 1) / 2)
    return 2.0 * (layers * rows + head) + 4.0 * width * visible


def measure(runner: ModelRunner, rows: int, context: int, run: reading.Reading) -> float:
    """Seconds of a chunk, launching included."""
    pages = (context + rows) // PAGE_SIZE + 1
    table = np.random.default_rng(0).permutation(runner.pool.pages)[:pages].astype(np.int32)
    ids = torch.arange(rows) * 7919 % runner.vocab_size
    positions = torch.arange(context, context + rows)
    last = torch.tensor([rows - 1])

    def chunk() -> object:
        meta = ForwardMeta.build([Segment(rows, context, table)], PAGE_SIZE, runner.pool.device)
        # The next token is fetched, as the sampler does.
        return runner.forward(ids, positions, meta, last).argmax(dim=-1).tolist()

    return timing.wall_seconds(chunk, run.rounds, run.device)


def headline(points: list[dict[str, Any]]) -> reading.Headline:
    return [
        (f"{each['rows']} tokens behind {each['context']}", each["tokens_per_s"],
         f"tokens/s, {each['ms']:.3g} ms, {100 * each['of_ceiling']:.0f}% of a matrix product's speed")
        for each in points
    ]  # fmt: skip


def main() -> None:
    run = reading.begin("prefill", __doc__)
    points = run.choose(POINTS, POINTS[:2], TINY_POINTS)
    shape = run.choose(LLAMA_8B, LLAMA_8B | {"num_hidden_layers": SHALLOW_LAYERS}, TINY)
    longest = max(rows + context for rows, context in points) + PAGE_SIZE
    dtype = run.choose(torch.bfloat16, torch.bfloat16, torch.float32)
    runner = random_runner(
        shape, most_tokens=longest, pool_tokens=longest + PAGE_SIZE, page_size=PAGE_SIZE, device=run.device
    )  # fmt: skip
    try:
        fill_pool(runner)
        ceiling = timing.gemm_tflop_s(run.device, run.choose(8192, 8192, 64), dtype, run.rounds)
        found: list[dict[str, Any]] = []
        results: dict[str, Any] = {
            "layers": shape["num_hidden_layers"], "gemm_tflop_s": ceiling, "points": found,
        }  # fmt: skip
        for rows, context in run.each(points):
            seconds = measure(runner, rows, context, run)
            reached = flop(runner, rows, context) / seconds / 1e12
            found.append({
                "rows": rows, "context": context, "ms": seconds * 1e3, "tokens_per_s": rows / seconds,
                "tflop_s": reached, "of_ceiling": reached / ceiling,
            })  # fmt: skip
            run.keep(results)
        run.finish(results, headline(found))
    finally:
        runner.close()


if __name__ == "__main__":
    main()
