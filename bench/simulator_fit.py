"""Fit the simulator's ``cpu-2core`` profile from measurements of the real worker's parts on this machine.

Steps of the model runner are timed over rows, contexts, requests and three models; each cost of the cost model is
then read off where it dominates, smallest first:

1. overheads: models too small to compute anything, of 2 and of 16 layers, with one request and with several;
2. reading weights: one row of the 88M-parameter model, less overheads;
3. the efficiency curve and attention: prefill chunks of the 88M model at two contexts;
4. reading KV: decode steps at two contexts;
5. loads: the worker's own load path, from a host pool, over two sizes.

Messages and gateway come from ``results/broker_share.json``, the scheduler's share from timing the core in a
simulation. Prints the profile's sections; nothing is chosen to match a whole run, which is what
``simulator_validation`` checks.

``python -m bench.simulator_fit [--repeats 5]``
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import results_file
from bench.make_model import save_llama
from services.scheduler import core
from services.scheduler.core import CancelTimer, CellState, Output, SetTimer, Stamped
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from shared.codec import decode_input, encode
from shared.ids import chain_page, chain_root, namespace_digest
from shared.memory import HostPoolView
from shared.messages.base import pack_int32
from shared.messages.worker_plans import PageLoad
from thermocline.simulate.__main__ import parser, prepare

PAGE_SIZE = 16
PEAK_TFLOPS = 0.25  # Two cores, 32 float32 FLOP a cycle each, at a boost of 3.9 GHz.
PREFIX = "simulator-fit"
CHUNKS = (16, 64, 256, 1024, 2048)


def small_model(out: Path, layers: int, seed: int) -> Path:
    """A Llama that computes next to nothing: what is left are overheads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    return out


def load(model_dir: Path, tokens: int, threads: int) -> ModelRunner:
    runner = ModelRunner.load(
        model_dir,
        dtype="float32",
        device="cpu",
        page_size=PAGE_SIZE,
        device_kv_bytes=None,
        pages=tokens // PAGE_SIZE,
        threads=threads,
        shm_prefix=PREFIX,
    )
    runner.warm_up()
    return runner


def timed(work: Callable[[], object], repeats: int) -> float:
    """The median of a few runs, after one that is not counted, seconds."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def step(runner: ModelRunner, pieces: list[tuple[int, int]], repeats: int) -> float:
    """Seconds of a step of (context, rows) pieces, each on pages of its own, sampling greedily."""
    segments, positions, last, page, rows_so_far = [], [], [], 0, 0
    for context, rows in pieces:
        pages = -(-(context + rows) // PAGE_SIZE)
        segments.append(Segment(rows, context, np.arange(page, page + pages, dtype=np.int32)))
        positions.append(torch.arange(context, context + rows))
        page, rows_so_far = page + pages, rows_so_far + rows
        last.append(rows_so_far - 1)
    ids = torch.ones(rows_so_far, dtype=torch.int64)

    def forward() -> object:
        meta = ForwardMeta.build(segments, PAGE_SIZE, torch.device("cpu"), None)
        return runner.forward(ids, torch.cat(positions), meta, torch.tensor(last)).argmax(dim=-1)

    return timed(forward, repeats)


def overheads(folder: Path, threads: int, repeats: int) -> dict[str, float]:
    """Microseconds of a step, a layer, a request, and a request in a layer."""
    found = {}
    for layers in (2, 16):
        runner = load(small_model(folder / f"small-{layers}", layers, seed=1), 4096, threads)
        try:
            found[layers] = [step(runner, [(32, 1)] * count, repeats * 4) * 1e6 for count in (1, 9)]
        finally:
            runner.close()
    (few_one, few_nine), (many_one, many_nine) = found[2], found[16]
    request_layer = max(0.0, ((many_nine - many_one) - (few_nine - few_one)) / 8 / 14)
    request = max(0.0, (few_nine - few_one) / 8 - 2 * request_layer)
    layer = max(0.0, (many_one - few_one) / 14 - request_layer)
    return {
        "overhead_us": max(0.0, few_one - 2 * (layer + request_layer) - request),
        "layer_overhead_us": layer,
        "request_overhead_us": request,
        "request_layer_overhead_us": request_layer,
    }


def arithmetic(runner: ModelRunner, fixed: dict[str, float], repeats: int) -> dict[str, Any]:
    """Weight and KV bandwidth (GB/s), the efficiency curve and attention's, from the 88M model."""
    layers, heads, head_dim, weights = 12, 12, 64, 88_099_584
    layer_flop = 2 * (weights - 16_384 * 768)
    token_bytes = runner.geometry.token_bytes
    per_request = (fixed["request_overhead_us"] + fixed["request_layer_overhead_us"] * layers) / 1e6
    base = (fixed["overhead_us"] + fixed["layer_overhead_us"] * layers) / 1e6

    one, far = (step(runner, [(context, 1)], repeats * 2) for context in (16, 4096))
    weights_s = one - base - per_request
    kv_rate = 4080 * token_bytes / max(1e-9, far - one)

    curve, attention = [], []
    for rows in CHUNKS:
        near = step(runner, [(0, rows)], repeats)
        behind = step(runner, [(4096, rows)], repeats)
        # The difference is attention to 4,096 tokens more, and nothing else.
        pairs = rows * 4096
        attention_rate = pairs * 4 * layers * heads * head_dim / max(1e-9, behind - near)
        attention.append(attention_rate / (PEAK_TFLOPS * 1e12))
        own = rows * (rows + 1) / 2 * 4 * layers * heads * head_dim / attention_rate
        linear_s = near - base - per_request - own
        flop = layer_flop * rows + 2 * 16_384 * 768
        curve.append([rows, round(min(1.0, flop / max(1e-9, linear_s) / (PEAK_TFLOPS * 1e12)), 3)])
    return {
        "weight_gb_s": weights * 4 / weights_s / 1e9,
        "kv_gb_s": kv_rate / 1e9,
        "efficiency": curve,
        "attention_efficiency": round(statistics.median(attention[1:]), 3),
        "decode_ms": {"context_16": one * 1e3, "context_4096": far * 1e3},
    }


def loading(runner: ModelRunner, repeats: int) -> dict[str, float]:
    """Bytes a second and latency of the worker's own load path: gather, verify and write, layer by layer."""
    geometry = runner.geometry
    few_pages, many_pages = 16, 256
    pool = HostPoolView.create(PREFIX, geometry, many_pages)
    clock = time.perf_counter_ns
    loads = Loads(geometry, runner.pool.pages, BatchedMover(runner.pool), timeout_s=60, clock_ns=clock)
    try:
        identities, identity = [], chain_root(namespace_digest("fit"))
        for page in range(many_pages):
            identity = chain_page(identity, pack_int32([page]))
            identities.append(identity)
            pool.seal_page(page, identity)
        loads.attach("storage", pool.handle)

        def run(pages: int) -> None:
            numbers = pack_int32(range(pages))
            order = PageLoad(
                request_id="r",
                attempt=1,
                storage_id="storage",
                host_pages=numbers,
                device_pages=numbers,
                identities=b"".join(identities[:pages]),
            )
            result = loads.start([order]).finish()
            if result.failures:
                raise SystemExit(f"a load failed: {result.failures[0].reason}")

        few = timed(lambda: run(few_pages), repeats)
        many = timed(lambda: run(many_pages), repeats)
    finally:
        loads.close()
        pool.close()
        pool.unlink()
    rate = (many_pages - few_pages) * geometry.page_bytes / (many - few)
    return {"gb_s": rate / 1e9, "latency_us": max(0.0, few - few_pages * geometry.page_bytes / rate) * 1e6}


def scheduler_us() -> float:
    """What one input takes the scheduler: decode it, step, encode what it says."""
    line = "--workload few-shot --profile a6000-pcie3/llama-2-7b --requests 1000 --device-tokens 20000"
    spent, inputs = 0.0, 0

    def timed_step(state: CellState, stamped: Stamped) -> list[Output]:
        nonlocal spent, inputs
        data = encode(stamped.input)
        started = time.perf_counter()
        outputs = core.step(state, Stamped(stamped.seq, stamped.time_ns, decode_input(data)))
        for output in outputs:
            if not isinstance(output, SetTimer | CancelTimer):
                encode(output)
        spent, inputs = spent + time.perf_counter() - started, inputs + 1
        return outputs

    with mock.patch("thermocline.simulate.cell.step", timed_step):
        prepare(parser().parse_args(line.split())).run()
    return spent / inputs * 1e6


def cell(scheduler: float) -> dict[str, float]:
    """Gateway and messages, from the committed reading of the broker's share (medians)."""
    parts = json.loads((results_file.RESULTS / "broker_share.json").read_text())["results"]["parts"]
    ms = {name: parts[f"{name}_ms"]["p50"] for name in ("accept", "admit", "first_token", "client_ttft")}
    return {
        # First token at the worker to first token at the client, and the client's share of sending.
        "gateway_us": (ms["client_ttft"] - ms["first_token"]) * 1e3,
        # From the gateway to the stream and from the scheduler to the worker: two messages and a step.
        "message_us": ((ms["accept"] + ms["admit"]) * 1e3 - scheduler) / 2,
        "scheduler_us": scheduler,
    }


def main() -> None:
    known = results_file.arguments(__doc__)
    known.add_argument("--repeats", type=int, default=5)
    known.add_argument("--threads", type=int, default=2)
    options = known.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fixed = overheads(Path(folder), options.threads, options.repeats)
        print("step", fixed, flush=True)
        runner = load(save_llama(Path(folder) / "llama-88m", seed=1), 8192, options.threads)
        try:
            computed = arithmetic(runner, fixed, options.repeats)
            print("compute and memory", computed, flush=True)
            loaded = loading(runner, options.repeats)
            print("link", loaded, flush=True)
        finally:
            runner.close()
    results = {
        "peak_tflops": PEAK_TFLOPS,
        "step": fixed,
        "compute": computed,
        "link": loaded,
        "cell": cell(scheduler_us()),
    }
    print("cell", results["cell"])
    print(results_file.write("simulator_fit", results, seed=1))


if __name__ == "__main__":
    main()
