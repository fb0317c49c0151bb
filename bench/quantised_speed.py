"""Models of codes on a CPU beside the same model in bfloat16, and beside llama.cpp's quantised files of it.

    python -m bench.quantised_speed [--model 428m] [--threads 2] [--rounds 5] [--llama-bench PROGRAM] [--folder DIR]
        [--save]

A Llama of 428M parameters with random weights (or of 1.1B, whose results go to a file of their own) is quantised by
rounding to nearest: to int8 with a scale for each output and for each 32 inputs, and to int4 for each 128 and 32. All
are loaded in one process. A round measures each once, in an order that turns from round to round; figures are medians
over rounds, ratios medians of the rounds' ratios, above 1 where a model is faster than bfloat16. Decode is the median
step behind 512 tokens, prefill the time to the first token of 512. The embedding, which is the head too, stays
bfloat16.

With ``--llama-bench`` that program of llama.cpp measures the same weights in BF16, Q8_0 and Q4_0 (32 inputs a scale),
one process a figure and round, between ours. Its embedding is Q8_0 in both. Needs the package gguf.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import results_file
from bench.engine_speed import Engine, Measure, decode_seconds, in_turns, seconds_of, tables_of
from bench.make_model import make_model
from bench.quantised_models import quantise
from services.worker.engine.fused.choice import fuse
from services.worker.engine.model_loading import expected_windows, load_config, load_model, max_context_tokens
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.probe import find_planes
from services.worker.kv.device_pool import DevicePool

SHAPES = {
    "428m": {"heads": 24, "kv_heads": 8, "layers": 16},
    "1.1b": {"heads": 36, "kv_heads": 12, "layers": 18},
}
KINDS: dict[str, tuple[int, int | None]] = {
    "int8": (8, None),
    "int8_group32": (8, 32),
    "int4_group128": (4, 128),
    "int4_group32": (4, 32),
}
LLAMA_KINDS = ("BF16", "Q8_0", "Q4_0")
CONTEXT, PROMPT, STEPS = 512, 512, 16
BATCHES = (1, 8)
SEED = 1

TARGETS = {
    "decode_step_of_bfloat16_over_int8": ("bfloat16", "int8", 1.7),
    "decode_step_of_bfloat16_over_int4": ("bfloat16", "int4_group128", 2.5),
    "decode_step_of_llama.cpp_Q8_0_over_int8_in_groups_of_32": ("Q8_0", "int8_group32", 1.0),
    "decode_step_of_llama.cpp_Q4_0_over_int4_in_groups_of_32": ("Q4_0", "int4_group32", 1.0),
}
"""Ratios of steps of one request: which to which, and how large they are to be. What stands beside llama.cpp's has as
many bits a weight.
"""


def models(folder: Path, shape: dict[str, int], kinds: Sequence[str]) -> dict[str, Path]:
    """The checkpoints by kind, bfloat16 first; those that ``folder`` has are not made again."""
    plain = folder / "bfloat16"
    if not plain.exists():
        make_model(plain, seed=SEED, **shape)
    for name in kinds:
        if not (folder / name).exists():
            bits, group = KINDS[name]
            quantise(plain, folder / name, bits=bits, group=group)
    return {name: folder / name for name in ("bfloat16", *kinds)}


class Ours:
    """The runners, one for each kind, over one shape."""

    def __init__(self, folder: Path, shape: dict[str, int], threads: int, kinds: Sequence[str]) -> None:
        paths = models(folder, shape, kinds)
        pages = max(BATCHES) * -(-(CONTEXT + STEPS + 2) // 16)
        self.plain = paths["bfloat16"]
        torch.set_num_threads(threads)
        self.runners = {name: _runner(path, pages) for name, path in paths.items()}

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()

    def decode(self, batch: int) -> dict[str, Measure]:
        """Median seconds of a step of ``batch`` requests behind CONTEXT tokens."""
        return {name: self._decode(runner, batch) for name, runner in self.runners.items()}

    def prefill(self) -> dict[str, Measure]:
        """Seconds to the first token of PROMPT."""
        return {name: self._prefill(runner) for name, runner in self.runners.items()}

    def _decode(self, runner: ModelRunner, batch: int) -> Measure:
        tables = tables_of(batch, CONTEXT + STEPS + 1)
        ids = self._ids(runner, batch, CONTEXT)
        for row, table in enumerate(tables):
            Engine(runner, [table]).step(ids[row : row + 1, :-1], CONTEXT - 1, 0)
        engine = Engine(runner, tables)
        return lambda: decode_seconds(engine, ids[:, -1:], CONTEXT, STEPS)

    def _prefill(self, runner: ModelRunner) -> Measure:
        engine, ids = Engine(runner, tables_of(1, PROMPT)), self._ids(runner, 1, PROMPT)
        return lambda: seconds_of(lambda: engine.step(ids, PROMPT, 0))

    def _ids(self, runner: ModelRunner, requests: int, tokens: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(SEED)
        return torch.randint(3, runner.vocab_size, (requests, tokens), generator=draw)


def _runner(path: Path, pages: int) -> ModelRunner:
    """By the fused forward, and without the verification of a worker's start, which takes longer than measuring."""
    config = load_config(path)
    windows = expected_windows(config)
    model = load_model(path, config, dtype="bfloat16", device="cpu", keeps_codes=True)
    geometry = find_planes(model, windows, 16, max_context_tokens(config)).geometry
    pool = DevicePool.create(geometry, pages, device="cpu", shm_prefix="bench")
    fused = fuse(model, windows, pool, "fused")
    return ModelRunner(model, pool, vocab_size=int(config.vocab_size), fused=fused)


def llama_measures(program: Path, plain: Path, folder: Path, threads: int) -> dict[str, dict[str, Measure]]:
    """By figure and kind: one process of llama-bench each time it is called."""
    # Imported here because it needs gguf, which is no dependency.
    from bench.peers.gguf_weights import write_gguf

    files = {kind: folder / f"{kind}.gguf" for kind in LLAMA_KINDS}
    for kind, path in files.items():
        if not path.exists():
            write_gguf(plain, path, kind)

    def measured(path: Path, figure: list[str], tokens: int) -> Measure:
        command = [str(program), "-m", str(path), "-t", str(threads), "-r", "1", "-o", "json", *figure]

        def measure() -> float:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            return tokens / float(json.loads(done.stdout)[0]["avg_ts"])

        return measure

    figures = {
        "decode_batch1": (["-p", "0", "-n", str(STEPS), "-d", str(CONTEXT)], 1),
        "prefill": (["-p", str(PROMPT), "-n", "0"], PROMPT),
    }
    return {
        name: {kind: measured(path, figure, tokens) for kind, path in files.items()}
        for name, (figure, tokens) in figures.items()
    }


def alternate(measures: dict[str, Measure], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each, and how much faster than bfloat16 it is."""
    seconds = in_turns(measures, rounds)
    return {
        name: {
            "ms": round(statistics.median(each) * 1e3, 2),
            "faster_than_bfloat16": round(
                statistics.median(plain / own for plain, own in zip(seconds["bfloat16"], each, strict=True)), 3
            ),
        }
        for name, each in seconds.items()
    }


def reached(decode: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What of TARGETS was measured in ``decode``, steps of one request."""
    return {
        name: {"ratio": round(decode[slow]["ms"] / decode[fast]["ms"], 3), "target": target}
        for name, (slow, fast, target) in TARGETS.items()
        if slow in decode and fast in decode
    }


def run(
    folder: Path, shape: dict[str, int], threads: int, rounds: int, kinds: Sequence[str], llama_bench: Path | None
) -> dict[str, Any]:
    ours = Ours(folder, shape, threads, kinds)
    peers: dict[str, dict[str, Measure]] = {}
    if llama_bench is not None:
        peers = llama_measures(llama_bench, ours.plain, folder, threads)
    try:
        figures = {
            f"decode_batch{batch}": alternate(ours.decode(batch) | peers.get(f"decode_batch{batch}", {}), rounds)
            for batch in BATCHES
        }
        figures["prefill"] = alternate(ours.prefill() | peers.get("prefill", {}), rounds)
    finally:
        ours.close()
    return {
        "shape": shape,
        "dtype": "bfloat16",
        "threads": threads,
        "rounds": rounds,
        "context": CONTEXT,
        "prompt": PROMPT,
        "torch": torch.__version__,
        "figures": figures,
        "reached": reached(figures["decode_batch1"]),
    }


def main(argv: list[str] | None = None) -> int:
    parser = results_file.arguments(__doc__, "--save")
    parser.add_argument("--model", choices=list(SHAPES), default="428m", help="the size of the model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--llama-bench", type=Path, help="the program llama-bench of llama.cpp")
    parser.add_argument("--folder", type=Path, help="keep the models there, and use those that are there")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)) / options.model
        folder.mkdir(parents=True, exist_ok=True)
        shape = SHAPES[options.model]
        results = run(folder, shape, options.threads, options.rounds, options.kinds, options.llama_bench)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if options.save:
        name = "quantised_speed" if options.model == "428m" else f"quantised_speed_{options.model}"
        results_file.write(name, results, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
