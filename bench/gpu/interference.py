"""How much the I/O kernel slows what runs beside it, by how many programs it has (Strata figure 5).

Beside loads (and, at the end, backups) run the matrix products and attention of a few layers of Llama-3.1-8B:
``prefill`` for two requests of 4,096 tokens, ``decode`` for sixteen requests of 4,096 tokens. Copies are queued on a
stream of their own for longer than the computation lasts, and both are timed by events. A reading counts only if the
copies were still running when the computation ended.

``python -m bench.gpu.interference [--quick] [--rounds 9]``
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from bench.gpu import reading
from services.worker.kernels.page_gather import copy_pages
from services.worker.kv.measured_loads import LoadScene, load_scene
from services.worker.kv.page_memory import PageMemory

PROGRAMS = (2, 8, 32, 1, 4, 16)
"""The default first, then the spread: there may be no time for all."""

LAYERS = 4

_cuda: Any = torch.cuda  # Streams and events have no types.


@dataclass(frozen=True, slots=True)
class Width:
    """Of one layer."""

    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int


LLAMA_8B = Width(4096, 14_336, 32, 8, 128)
TINY = Width(64, 128, 4, 2, 16)


class Layers:
    """The products of ``LAYERS`` layers, and attention, for ``rows`` new tokens of each request."""

    def __init__(self, width: Width, requests: int, rows: int, context: int, device: torch.device) -> None:
        hidden, head_dim = width.hidden, width.head_dim

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02

        self.weights = [
            (make(hidden, hidden + 2 * width.kv_heads * head_dim), make(hidden, hidden),
             make(hidden, 2 * width.feed_forward), make(width.feed_forward, hidden))
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.x = make(requests * rows, hidden)
        self.query = make(requests, width.heads, rows, head_dim)
        self.keys = make(requests, width.heads, context, head_dim)
        self.is_prompt = rows == context
        self.feed_forward = width.feed_forward

    def run(self) -> None:
        for qkv, output, up, down in self.weights:
            torch.matmul(self.x, qkv)
            torch.nn.functional.scaled_dot_product_attention(self.query, self.keys, self.keys, is_causal=self.is_prompt)
            torch.matmul(self.x, output)
            hidden = torch.matmul(self.x, up)
            torch.matmul(hidden[:, : self.feed_forward].contiguous(), down)


def milliseconds(work: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Of ``work`` alone, the median."""
    return statistics.median(_timed(work, device) for _ in range(rounds + 1))


def beside(
    work: Callable[[], object], copy: Callable[[], object], copy_ms: float, rounds: int, device: torch.device
) -> dict[str, float]:
    """``work`` while ``copy`` repeats on another stream. A processor has no streams: there both run in turn."""
    alone = milliseconds(work, rounds, device)
    if device.type != "cuda":
        copy()
        after = milliseconds(work, rounds, device)
        return {"alone_ms": alone, "beside_ms": after, "slowdown": after / alone, "copy_ms": copy_ms}
    stream = _cuda.Stream()
    times: list[float] = []
    speeds: list[float] = []
    repeats = max(2, int(4 * alone / copy_ms) + 1)
    while len(times) < rounds:
        began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            began.record()
            for _ in range(repeats):
                copy()
            ended.record()
        spent = _timed(work, device)
        was_covered = not ended.query()
        ended.synchronize()
        if was_covered:
            times.append(spent)
            speeds.append(began.elapsed_time(ended) / repeats)
        elif repeats > 10_000:
            raise SystemExit("the copies always end before the computation does")
        else:
            repeats *= 2
    median = statistics.median(times)
    return {"alone_ms": alone, "beside_ms": median, "slowdown": median / alone, "copy_ms": statistics.median(speeds)}


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e3
    began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def copies(scene: LoadScene, programs: int, *, to_host: bool) -> Callable[[], object]:
    """One launch that moves all layers of all pages."""
    host, device = scene.host.memory(), scene.device.memory()
    assert host.array is not None
    flat, pool = torch.from_numpy(host.array), scene.device.tensor.view(torch.uint8).reshape(-1)
    pair = np.stack((scene.device_pages, scene.pages) if to_host else (scene.pages, scene.device_pages))
    numbers = torch.from_numpy(pair).to(scene.device.device)
    layers = range(scene.device.geometry.layers)
    begin: tuple[torch.Tensor, PageMemory] = (pool, device) if to_host else (flat, host)
    end: tuple[torch.Tensor, PageMemory] = (flat, host) if to_host else (pool, device)

    def launch() -> None:
        copy_pages(begin[0], begin[1].layout, end[0], end[1].layout, numbers, layers, programs=programs)

    return launch


def check(scene: LoadScene) -> None:
    """The kernel moves the right bytes, there and back; raises SystemExit if not."""
    before = scene.host.view.flat_pages().copy()
    copies(scene, 3, to_host=False)()
    _synchronize(scene)
    scene.host.view.flat_pages()[...] = 0
    copies(scene, 3, to_host=True)()
    _synchronize(scene)
    if not np.array_equal(scene.host.view.flat_pages(), before):
        raise SystemExit("the kernel does not bring back what it has taken")


def _synchronize(scene: LoadScene) -> None:
    if scene.device.device.type == "cuda":
        torch.cuda.synchronize()


def headline(results: dict[str, Any]) -> reading.Headline:
    """What the loads of few and many programs cost the computation beside them."""
    lines: list[tuple[str, float | None, str]] = []
    for name, found in results.items():
        for beside_it in ("prefill", "decode"):
            figures = found[beside_it]
            lines.append(
                (f"{name}: {beside_it} takes", figures["slowdown"], f"times as long, {figures['copy_gb_s']:.3g} GB/s")
            )
    return lines


def main() -> None:
    run = reading.begin("interference", __doc__)
    geometry = run.choose(reading.LLAMA_8B, reading.LLAMA_8B_SHALLOW, reading.TINY)
    tokens, prompt = run.choose((8192, 4096), (1024, 512), (64, 16))
    results: dict[str, Any] = {}
    found: dict[str, Any] = {"programs": results}
    geometry = msgspec.structs.replace(geometry, page_size=16)
    width = run.choose(LLAMA_8B, LLAMA_8B, TINY)
    with load_scene(geometry, tokens, device=run.device.type, shm_prefix=reading.PREFIX) as scene:
        found["bytes"] = scene.nbytes
        check(scene)
        loads = {
            "prefill": Layers(width, 2, prompt, prompt, run.device),
            "decode": Layers(width, 16, 1, prompt, run.device),
        }
        cases = [(False, programs) for programs in PROGRAMS] + [(True, programs) for programs in PROGRAMS[:2]]
        for to_host, programs in run.each(cases):
            copy = copies(scene, programs, to_host=to_host)
            copy_ms = milliseconds(copy, run.rounds, run.device)
            figures: dict[str, Any] = {"copy_alone_gb_s": scene.nbytes / copy_ms / 1e6}
            for name, layers in loads.items():
                timed = beside(layers.run, copy, copy_ms, run.rounds, run.device)
                figures[name] = {**timed, "copy_gb_s": scene.nbytes / timed["copy_ms"] / 1e6}
            results[f"{'backup' if to_host else 'load'}_{programs}"] = figures
            run.keep(found)
    run.finish(found, headline(results))


if __name__ == "__main__":
    main()
