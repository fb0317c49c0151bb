"""The engine alone, without a server: the fused forward, the portable path and Hugging Face's ``generate``.

    python -m bench.engine_speed [--model DIR] [--dtype bfloat16] [--threads 2] [--rounds 5] [--save]

Without ``--model`` it makes the random 88M-parameter Llama of :mod:`bench.make_model`. All three have the same weights,
threads and prompts, in one process. A round measures each once, in an order that turns from round to round; figures are
medians over rounds, ratios medians of the rounds' ratios, above 1 where the fused forward is faster. Prefill is the
time to the first token, decode the median step with the context there already.

``limits`` says what cannot be beaten: how fast this machine reads memory, how long reading the weights takes then, and
what the linear layers of a prefill of 512 tokens reach, by oneDNN and by the fused kernels. They are measured before
and after everything else, because shared cores are slower for minutes at a time, and the better figure counts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria

from bench import results_file
from bench.make_model import save_llama
from services.worker.engine.cache_argument import given_cache
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.fused.strips import StripLinear, StripMemory
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.packed_linear import PackedLinear, packed_dtypes
from services.worker.native.fused import FusedKernels

PREFILL_TOKENS = (512, 2048)
DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXTS = (512, 2048)
STEPS = 8
PAGE_SIZE = 16
SEED = 1
LINEAR_ROWS = 512
BANDWIDTH_BYTES = 512 * 2**20

Measure = Callable[[], float]


class StepClock(StoppingCriteria):  # type: ignore[misc]  # Transformers has no types.
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


class Systems:
    """The three, over one checkpoint."""

    def __init__(self, model_dir: Path, dtype: str, threads: int) -> None:
        pages = max(DECODE_BATCHES) * _pages(max(DECODE_CONTEXTS) + STEPS + 2)
        self.runners = {
            path: ModelRunner.load(
                model_dir, dtype=dtype, device="cpu", page_size=PAGE_SIZE, device_kv_bytes=None, pages=pages,
                threads=threads, shm_prefix="bench", forward=path,
            )
            for path in ("fused", "portable")
        }  # fmt: skip
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.pad_token_id = 0

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()

    def prefill(self, tokens: int) -> dict[str, Measure]:
        """Seconds to the first token of one prompt."""
        ids = _ids(self.model, 1, tokens)

        def ours(runner: ModelRunner) -> Measure:
            engine = Engine(runner, tables_of(1, tokens))
            return lambda: seconds_of(lambda: engine.step(ids, tokens, 0))

        measures = {name: ours(runner) for name, runner in self.runners.items()}
        return {
            **measures,
            "hf": lambda: seconds_of(lambda: self.model.generate(ids, max_new_tokens=1, do_sample=False)),
        }

    def decode(self, batch: int, context: int) -> dict[str, Measure]:
        """Median seconds of a step of ``batch`` requests with ``context`` tokens each."""
        ids = _ids(self.model, batch, context)
        measures: dict[str, Measure] = {}
        for name, runner in self.runners.items():
            tables = tables_of(batch, context + STEPS + 1)
            for row, table in enumerate(tables):
                Engine(runner, [table]).step(ids[row : row + 1, :-1], context - 1, 0)
            measures[name] = partial(decode_seconds, Engine(runner, tables), ids[:, -1:], context, STEPS)
        cache = DynamicCache(config=self.model.config)
        given = given_cache(self.model.forward, cache)
        for start in range(0, context - 1, 512):
            self.model(ids[:, start : min(start + 512, context - 1)], logits_to_keep=1, **given)

        def hugging_face() -> float:
            clock = StepClock()
            if cache.get_seq_length() >= context:  # Drop what the round before added.
                cache.crop(context - 1 - cache.get_seq_length())
            self.model.generate(
                ids, max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1, do_sample=False, stopping_criteria=[clock],
                **given,
            )  # fmt: skip
            return float(np.median(np.diff(clock.times)))

        return {**measures, "hf": hugging_face}


def decode_seconds(engine: Engine, last: torch.Tensor, context: int, steps: int) -> float:
    """Median seconds of ``steps`` steps, one after another, behind ``context`` tokens of which ``last`` [requests, 1]
    are the last.
    """
    token, times = last, []
    for offset in range(steps + 1):
        token = engine.step(token, 1, context - 1 + offset)[:, None]
        times.append(time.perf_counter())
    return float(np.median(np.diff(times)))


@torch.inference_mode()
def in_turns(measures: dict[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of ``measures`` in every round, after one that warms up; each round begins with another."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        order = list(measures)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            measured = measures[name]()
            if number:
                seconds[name].append(measured)
    return seconds


def alternate(measures: dict[str, Measure], rounds: int, tokens: int) -> dict[str, Any]:
    """Figures of ``measures``, each for ``tokens`` tokens."""
    seconds = in_turns(measures, rounds)
    result: dict[str, Any] = {
        name: {
            "ms": round(statistics.median(each) * 1e3, 2),
            "tokens_per_s": round(tokens / statistics.median(each), 1),
        }
        for name, each in seconds.items()
    }
    for name, each in seconds.items():
        if name != "fused":
            ratios = [theirs / ours for ours, theirs in zip(seconds["fused"], each, strict=True)]
            result[name]["fused_is_faster"] = round(statistics.median(ratios), 3)
    return result


@torch.inference_mode()
def limits(model: Any, weight_bytes: int, rounds: int) -> dict[str, Any]:
    """What the machine gives: best of ``rounds``, because everything that disturbs makes it less."""
    memory = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64)
    bandwidth = BANDWIDTH_BYTES / min(seconds_of(memory.sum) for _ in range(rounds + 1))
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    merged = {
        "qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
        "out": [attention.o_proj],
        "gate_up": [mlp.gate_proj, mlp.up_proj],
        "down": [mlp.down_proj],
    }
    return {
        "read_gb_per_s": round(bandwidth / 1e9, 1),
        "weight_bytes_of_a_step": weight_bytes,
        "reading_weights_ms": round(weight_bytes / bandwidth * 1e3, 2),
        "gflop_per_s": {name: _gflops([each.weight for each in layers], rounds) for name, layers in merged.items()},
    }


def better(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Of two readings of ``limits``."""
    products = {}
    for name, first in before["gflop_per_s"].items():
        second = after["gflop_per_s"][name]
        products[name] = first | {path: max(first[path], second[path]) for path in ("onednn", "fused")}
    faster = max(before, after, key=lambda reading: reading["read_gb_per_s"])
    return {**faster, "gflop_per_s": products}


def _gflops(weights: list[torch.Tensor], rounds: int) -> dict[str, Any]:
    merged = torch.cat(weights)
    outputs, inputs = merged.shape
    plain = torch.nn.Linear(inputs, outputs, bias=False, dtype=merged.dtype)
    plain.weight = torch.nn.Parameter(merged, requires_grad=False)
    memory = StripMemory([(outputs, inputs)], merged.dtype)
    kernels = FusedKernels(merged.dtype)
    # Older processors have no packed products of this type; then it is what torch computes.
    packed = PackedLinear(plain) if merged.dtype in packed_dtypes() else plain
    layers = {"onednn": packed, "fused": StripLinear(kernels, memory.pack([merged]))}
    x = torch.randn(LINEAR_ROWS, inputs).to(merged.dtype)
    best = {name: float("inf") for name in layers}
    for _ in range(4 * rounds):
        for name, layer in layers.items():
            best[name] = min(best[name], seconds_of(lambda layer=layer: layer(x)))  # type: ignore[misc]
    work = 2 * LINEAR_ROWS * inputs * outputs
    return {"shape": [LINEAR_ROWS, inputs, outputs], **{name: round(work / s / 1e9, 1) for name, s in best.items()}}


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def tables_of(requests: int, tokens: int) -> list[np.ndarray]:
    """A page table of its own for each request of so many tokens."""
    count = _pages(tokens)
    return list(np.arange(requests * count, dtype=np.int32).reshape(requests, count))


def _ids(model: Any, requests: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(3, model.config.vocab_size, (requests, tokens), generator=generator)


def seconds_of(action: Callable[[], object]) -> float:
    """How long ``action`` took."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def run(model_dir: Path, dtype: str, threads: int, rounds: int) -> dict[str, Any]:
    systems = Systems(model_dir, dtype, threads)
    model = systems.model
    figures: dict[str, Any] = {}
    try:
        parameters = sum(weight.numel() for weight in model.parameters())
        linear = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
        read = sum(weight.numel() for weight in model.model.layers.parameters()) + model.lm_head.weight.numel()
        weight_bytes = read * getattr(torch, dtype).itemsize
        bounds = limits(model, weight_bytes, rounds)
        for tokens in PREFILL_TOKENS:
            figures[f"prefill_{tokens}"] = alternate(systems.prefill(tokens), rounds, tokens)
        for context in DECODE_CONTEXTS:
            for batch in DECODE_BATCHES:
                name = f"decode_batch{batch}_context{context}"
                with torch.inference_mode():
                    measures = systems.decode(batch, context)
                figures[name] = alternate(measures, rounds, batch)
        bounds = better(bounds, limits(model, weight_bytes, rounds))
    finally:
        systems.close()
    return {
        "parameters": parameters,
        "linear_flops_per_token": 2 * linear,
        "dtype": dtype,
        "threads": threads,
        "page_size": PAGE_SIZE,
        "rounds": rounds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "limits": bounds,
        "figures": figures,
    }


def main(argv: list[str] | None = None) -> int:
    parser = results_file.arguments(__doc__, "--save")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = options.model or save_llama(Path(scratch), dtype=options.dtype)
        results = run(model_dir, options.dtype, options.threads, options.rounds)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if options.save:
        results_file.write(f"engine_speed_{options.dtype}", results, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
