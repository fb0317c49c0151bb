"""The engine against ``model.generate`` of Hugging Face, in one process and in alternation.

    python -m bench.engine_vs_hf [--model DIR] [--dtype float32] [--threads 2] [--rounds 5] [--save]

Without ``--model`` it makes a random Llama of about 100M parameters. Both sides use the same weights, threads and
prompts. Each round measures one and then the other, because on a shared machine only neighbouring measurements
compare; a ratio is the median of the rounds' ratios, above 1 where the engine is faster.
Prefill is the time to the first token; decode the median step of ``generate`` with its cache filled already.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria

from bench import results_file
from bench.make_model import save_llama
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner

PREFILL_TOKENS = (512, 2048)
DECODE_BATCHES = (1, 8)
DECODE_CONTEXTS = (512, 1024)
STEPS = 8
PAGE_SIZE = 16
SEED = 1
VOCABULARY = 8192


class StepClock(StoppingCriteria):
    """Notes the time at which ``generate`` ends each step; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Engine:
    """Requests of equal length decoded greedily by the engine; request r has its own page table."""

    def __init__(self, runner: ModelRunner, tables: list[np.ndarray]) -> None:
        self.runner, self.tables = runner, tables

    def step(self, ids: torch.Tensor, rows: int, context: int) -> torch.Tensor:
        """Compute ``rows`` tokens of each request, whose ids are [requests, rows]; the next token of each."""
        requests = len(ids)
        segments = [Segment(rows, context, table) for table in self.tables[:requests]]
        meta = ForwardMeta.build(segments, self.runner.geometry.page_size, "cpu")
        positions = torch.arange(context, context + rows).repeat(requests)
        last = torch.arange(1, requests + 1) * rows - 1
        return self.runner.forward(ids.reshape(-1), positions, meta, last).argmax(-1)


def page_tables(requests: int, tokens: int, *, shuffled: bool) -> list[np.ndarray]:
    count = -(-tokens // PAGE_SIZE)
    numbers = np.arange(requests * count, dtype=np.int32)
    if shuffled:
        numbers = np.random.default_rng(0).permutation(numbers)
    return list(numbers.reshape(requests, count))


@torch.inference_mode()
def bench_prefill(engine: Engine, model: Any, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds to the first token of one prompt."""
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(SEED))
    ours, theirs = [], []
    for number in range(rounds + 1):
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=1, do_sample=False)
        middle = time.perf_counter()
        engine.step(ids, tokens, 0)
        end = time.perf_counter()
        if number:  # The first round warms both up.
            theirs.append(middle - start)
            ours.append(end - middle)
    return summary(ours, theirs, tokens)


@torch.inference_mode()
def bench_decode(engine: Engine, model: Any, batch: int, context: int, rounds: int) -> dict[str, float]:
    """Seconds of one step for ``batch`` requests with ``context`` tokens each."""
    ids = torch.randint(3, model.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(SEED))
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    for row, table in enumerate(engine.tables[:batch]):
        Engine(engine.runner, [table]).step(ids[row : row + 1, :-1], context - 1, 0)
    ours, theirs = [], []
    for number in range(rounds + 1):
        clock = StepClock()
        if cache.get_seq_length() >= context:  # Drop what the round before added.
            cache.crop(context - 1 - cache.get_seq_length())
        answer = model.generate(
            ids, past_key_values=cache, max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1, do_sample=False,
            stopping_criteria=[clock],
        )  # fmt: skip
        token, tokens, times = ids[:, -1:], [], [0.0]
        for offset in range(STEPS + 1):
            token = engine.step(token, 1, context - 1 + offset)[:, None]
            tokens.append(token)
            times.append(time.perf_counter())
        if number:
            theirs.append(float(np.median(np.diff(clock.times))))
            ours.append(float(np.median(np.diff(times[1:]))))
    result = summary(ours, theirs, batch)
    result["equal_tokens"] = float((torch.cat(tokens, 1) == answer[:, context:]).float().mean())
    return result


def summary(ours: list[float], theirs: list[float], tokens: int) -> dict[str, float]:
    return {
        "engine_ms": round(statistics.median(ours) * 1e3, 2),
        "hf_ms": round(statistics.median(theirs) * 1e3, 2),
        "engine_tokens_per_s": round(tokens / statistics.median(ours), 1),
        "ratio": round(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)), 3),
    }


def run(model_dir: Path, dtype: str, threads: int, rounds: int) -> dict[str, Any]:
    longest = max(DECODE_CONTEXTS) + STEPS + 2
    pages = max(max(DECODE_BATCHES) * -(-longest // PAGE_SIZE), max(PREFILL_TOKENS) // PAGE_SIZE)
    runner = ModelRunner.load(
        model_dir, dtype=dtype, device="cpu", page_size=PAGE_SIZE, device_kv_bytes=None, pages=pages,
        threads=threads, shm_prefix="bench",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    model.generation_config.pad_token_id = 0
    results: dict[str, Any] = {}
    try:
        for tokens in PREFILL_TOKENS:
            engine = Engine(runner, page_tables(1, tokens, shuffled=False))
            results[f"prefill_{tokens}"] = bench_prefill(engine, model, tokens, rounds)
        for batch in DECODE_BATCHES:
            for context in DECODE_CONTEXTS:
                for shuffled in (False, True):
                    engine = Engine(runner, page_tables(batch, longest, shuffled=shuffled))
                    name = f"decode_batch{batch}_context{context}_{'shuffled' if shuffled else 'consecutive'}"
                    results[name] = bench_decode(engine, model, batch, context, rounds)
    finally:
        runner.close()
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": dtype,
        "threads": threads,
        "page_size": PAGE_SIZE,
        "rounds": rounds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "figures": results,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write bench/results/engine_vs_hf_DTYPE.json too")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = options.model or save_llama(Path(scratch), vocab_size=VOCABULARY, dtype=options.dtype)
        results = run(model_dir, options.dtype, options.threads, options.rounds)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if options.save:
        results_file.write(f"engine_vs_hf_{options.dtype}", results, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
