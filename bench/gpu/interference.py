"""How much the I/O kernel slows what runs beside it, by how many programs it has (Strata figure 5).

Beside loads, each layer checked behind its copy, and at the end beside backups, run the matrix products and attention
of a few layers of Llama-3.1-8B: ``prefill`` for two requests of 4,096 tokens, ``decode`` for sixteen requests of 4,096
tokens. Copies are queued on a stream of their own for longer than the computation lasts, and both are timed by events.
A reading counts only if the copies were still running when the computation ended. The target is 5% at the default of
two programs.

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
from services.worker.kernels.row_checksums import check_rows, constants_on, sums_for
from services.worker.kv.measured_loads import LoadScene, load_scene
from services.worker.kv.movers.side_stream import side_stream
from services.worker.kv.page_memory import PageMemory

PROGRAMS = (2, 8, 32, 1, 4, 16)
"""The default first, then the spread: there may be no time for all."""

BACKUP_PROGRAMS = (1, 4)
"""The default first."""

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


class Copies:
    """One launch of the kernel that moves ``layers`` of all pages, to the host or from it."""

    def __init__(self, scene: LoadScene, programs: int, *, to_host: bool) -> None:
        host, device = scene.host.memory(), scene.device.memory()
        assert host.array is not None
        flat, pool = torch.from_numpy(host.array), scene.device.tensor.view(torch.uint8).reshape(-1)
        pair = np.stack((scene.device_pages, scene.pages) if to_host else (scene.pages, scene.device_pages))
        self.numbers = torch.from_numpy(pair).to(scene.device.device)
        self.layers = range(scene.device.geometry.layers)
        self._programs = programs
        self._begin: tuple[torch.Tensor, PageMemory] = (pool, device) if to_host else (flat, host)
        self._end: tuple[torch.Tensor, PageMemory] = (flat, host) if to_host else (pool, device)

    def launch(self, layers: range) -> None:
        begin, end = self._begin, self._end
        copy_pages(begin[0], begin[1].layout, end[0], end[1].layout, self.numbers, layers, programs=self._programs)

    def __call__(self) -> None:
        self.launch(self.layers)


class CheckedLoads:
    """Layer after layer to the device, each checked there behind its copy and beside the next one, as the mover does.

    What is launched behind a call on the current stream is behind all checks. ``wrong`` uint8 [layers, pages].
    """

    def __init__(self, scene: LoadScene, programs: int) -> None:
        self._copies = Copies(scene, programs, to_host=False)
        on, layout = scene.device.device, scene.device.memory().layout
        self._on, self._layout = on, layout
        self._pool = scene.device.tensor.view(torch.uint8).reshape(-1)
        self._seeds = torch.from_numpy(scene.host.view.identities[scene.pages, :8].copy().view(np.int64)[:, 0]).to(on)
        expected = np.ascontiguousarray(scene.host.view.checksums[scene.pages].T).view(np.int64)
        self._expected = torch.from_numpy(expected).to(on)
        self.wrong = torch.zeros(expected.shape, dtype=torch.uint8, device=on)
        self._constants, self._sums = constants_on(on), sums_for(layout.half_bytes, len(scene.pages), on)
        self._checks = side_stream(on)

    def __call__(self) -> None:
        for layer in self._copies.layers:
            self._copies.launch(range(layer, layer + 1))
            if self._on.type == "cuda":
                self._checks.wait(_cuda.current_stream().record_event())
            with self._checks:
                check_rows(
                    self._pool, self._layout, layer, self._copies.numbers[1], self._seeds, self._expected[layer],
                    self.wrong[layer], constants=self._constants, sums=self._sums,
                )  # fmt: skip
        if self._on.type == "cuda":
            _cuda.current_stream().wait_event(self._checks.fence())


def check(scene: LoadScene) -> None:
    """The kernel moves the right bytes, there and back, and the check passes them; raises SystemExit if not."""
    before = scene.host.view.flat_pages().copy()
    loads = CheckedLoads(scene, 3)
    loads()
    _synchronize(scene)
    if loads.wrong.any():
        raise SystemExit("the check refuses rows that are right")
    scene.host.view.flat_pages()[...] = 0
    Copies(scene, 3, to_host=True)()
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
        cases = [(False, programs) for programs in PROGRAMS] + [(True, programs) for programs in BACKUP_PROGRAMS]
        for to_host, programs in run.each(cases):
            copy = Copies(scene, programs, to_host=True) if to_host else CheckedLoads(scene, programs)
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
