"""How much the I/O kernel slows what runs beside it, by how many programs it has (Strata figure 5).

Beside loads (and, at the end, backups) run the matrix products and attention of a few layers of Llama-3.1-8B:
``prefill`` for two requests of 4,096 tokens, ``decode`` for sixteen requests of 4,096 tokens. Copies are queued on a
stream of their own for longer than the computation lasts, and both are timed by events. A reading counts only if the
copies were still running when the computation ended.

``python -m bench.gpu.interference [--quick] [--rounds 9]``
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from bench.gpu import reading
from services.worker.kernels.page_gather import copy_pages
from services.worker.kv.measured_loads import LoadScene, load_scene
from services.worker.kv.page_memory import PageMemory

PROGRAMS = (1, 2, 4, 8, 16, 32)
HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 4096, 14_336, 32, 8, 128
LAYERS = 4


class Layers:
    """The products of ``LAYERS`` layers, and attention, for ``rows`` new tokens of each request."""

    def __init__(self, requests: int, rows: int, context: int) -> None:
        make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02  # noqa: E731
        self.weights = [
            (make(HIDDEN, HIDDEN + 2 * KV_HEADS * HEAD_DIM), make(HIDDEN, HIDDEN), make(HIDDEN, 2 * FEED_FORWARD),
             make(FEED_FORWARD, HIDDEN))
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.x = make(requests * rows, HIDDEN)
        self.query = make(requests, HEADS, rows, HEAD_DIM)
        self.keys = make(requests, HEADS, context, HEAD_DIM)
        self.is_prompt = rows == context

    def run(self) -> None:
        for qkv, output, up, down in self.weights:
            torch.matmul(self.x, qkv)
            torch.nn.functional.scaled_dot_product_attention(self.query, self.keys, self.keys, is_causal=self.is_prompt)
            torch.matmul(self.x, output)
            hidden = torch.matmul(self.x, up)
            torch.matmul(hidden[:, :FEED_FORWARD].contiguous(), down)


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Of ``work`` alone, the median."""
    return statistics.median(_timed(work) for _ in range(rounds + 1))


def beside(work: Callable[[], object], copy: Callable[[], object], copy_ms: float, rounds: int) -> dict[str, float]:
    """``work`` while ``copy`` repeats on another stream."""
    alone = milliseconds(work, rounds)
    stream = torch.cuda.Stream()
    times, speeds = [], []
    repeats = max(2, int(4 * alone / copy_ms) + 1)
    while len(times) < rounds:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            began.record()
            for _ in range(repeats):
                copy()
            ended.record()
        spent = _timed(work)
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


def _timed(work: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


def copies(scene: LoadScene, programs: int, *, to_host: bool) -> Callable[[], object]:
    """One launch that moves all layers of all pages."""
    host, device = scene.host.memory(), scene.device.memory()
    assert host.array is not None
    assert device.tensor is not None
    flat = torch.from_numpy(host.array)
    pair = np.stack((scene.device_pages, scene.pages) if to_host else (scene.pages, scene.device_pages))
    numbers = torch.from_numpy(pair).cuda()
    layers = range(scene.device.geometry.layers)
    begin: tuple[torch.Tensor, PageMemory] = (device.tensor, device) if to_host else (flat, host)
    end: tuple[torch.Tensor, PageMemory] = (flat, host) if to_host else (device.tensor, device)

    def launch() -> None:
        copy_pages(begin[0], begin[1].layout, end[0], end[1].layout, numbers, layers, programs=programs)

    return launch


def check(scene: LoadScene) -> None:
    """The kernel moves the right bytes, there and back; raises SystemExit if not."""
    before = scene.host.view.flat_pages().copy()
    copies(scene, 3, to_host=False)()
    torch.cuda.synchronize()
    scene.host.view.flat_pages()[...] = 0
    copies(scene, 3, to_host=True)()
    torch.cuda.synchronize()
    if not np.array_equal(scene.host.view.flat_pages(), before):
        raise SystemExit("the kernel does not bring back what it has taken")


def main() -> None:
    options = reading.begin(__doc__)
    geometry, tokens = (reading.LLAMA_8B_SHALLOW, 1024) if options.quick else (reading.LLAMA_8B, 8192)
    prompt = 512 if options.quick else 4096
    results: dict[str, Any] = {}
    geometry = msgspec.structs.replace(geometry, page_size=16)
    with load_scene(geometry, tokens, device="cuda", shm_prefix=reading.PREFIX) as scene:
        check(scene)
        loads = {"prefill": Layers(2, prompt, prompt), "decode": Layers(16, 1, prompt)}
        for to_host in (False, True):
            for programs in PROGRAMS if not to_host else PROGRAMS[:2]:
                copy = copies(scene, programs, to_host=to_host)
                copy_ms = milliseconds(copy, options.rounds)
                found: dict[str, Any] = {"copy_alone_gb_s": scene.nbytes / copy_ms / 1e6}
                for name, layers in loads.items():
                    figures = beside(layers.run, copy, copy_ms, options.rounds)
                    found[name] = {**figures, "copy_gb_s": scene.nbytes / figures["copy_ms"] / 1e6}
                results[f"{'backup' if to_host else 'load'}_{programs}"] = found
    reading.finish("interference", options, {"bytes": scene.nbytes, "programs": results})


if __name__ == "__main__":
    main()
