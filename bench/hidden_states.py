"""How fast a prefix comes back onto the device: recomputed, loaded as KV, restored from hidden states, or by a mix.

    python -m bench.hidden_states [--lengths 1024,2048,4096,8192] [--bandwidths 0.1,0.25,0.5,1,2,5,0] [--rounds 3]
    [--save]

After HCache's sections 6.2 and 6.3.1: two Llamas of 12 layers, one with a K and a V for every head (MHA, 97M
parameters) and one with a third of them (GQA, 88M), over links of several bandwidths in GB/s. A link is a token bucket
without burst around real copies, verified as in service; bandwidth 0 is no throttle. ``half`` recomputes the first half
of the layers and loads the rest as KV; ``best`` is the mix that the measured profile predicts to be fastest, of all
mixes. Every restored prefix is compared with the one that was computed before it counts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench import results_file
from bench.hidden_pieces import HiddenPieces
from bench.host_pages import HostPages
from bench.layer_mixes import every_mix
from bench.make_model import save_llama
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.movers import DEFAULT_MOVER, make_mover
from services.worker.kv.movers.choice import DEFAULT_PROGRAMS
from services.worker.kv.movers.protocol import Fence
from services.worker.kv.pinning import cuda_pins
from services.worker.restore.figures import RestorationFigure, RestorationProfile
from services.worker.restore.hidden_source import HiddenSource, PieceSource
from services.worker.restore.kv_source import KvSource
from services.worker.restore.layer_mix import LayerMix
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.profile import measure_restoration
from services.worker.restore.projection import KvProjection
from services.worker.restore.restoration import Restoration, Sources
from services.worker.restore.saving_step import SavedRows
from services.worker.restore.snapshot_ring import SnapshotRing
from services.worker.restore.staging import StagingMemory
from services.worker.restore.two_stage import TwoStageSaver
from shared.memory import HostPoolView

KV_HEADS = {"mha": 12, "gqa": 4}
PAGE_SIZE = 16
CHUNK = 1024
SEED = 1
VOCABULARY = 16_384
PREFIX = "bench-hidden"


class Link:
    """A token bucket without burst: copies of n bytes take n / bandwidth at least. 0 bytes a second is no limit."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bytes_per_s, self._clock, self._free_at = bytes_per_s, clock, 0.0

    def carry(self, nbytes: int, copy: Callable[[], None]) -> None:
        began = max(self._clock(), self._free_at)
        copy()
        if self._bytes_per_s:
            self._free_at = began + nbytes / self._bytes_per_s
            time.sleep(max(0.0, self._free_at - self._clock()))


class LinkedHidden:
    """A HiddenSource behind a link."""

    def __init__(self, plain: HiddenSource, link: Link, row_bytes: int) -> None:
        self.tokens, self._plain, self._link, self._row_bytes = plain.tokens, plain, link, row_bytes

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        self._link.carry((end - start) * self._row_bytes, lambda: self._plain.read(layer, start, end, into))


class LinkedKv:
    """A KvSource behind a link."""

    def __init__(self, plain: KvSource, link: Link, layer_bytes: int) -> None:
        self._plain, self._link, self._layer_bytes = plain, link, layer_bytes

    def load(self, layer: int) -> None:
        self._link.carry(self._layer_bytes, lambda: self._plain.load(layer))

    def fence(self) -> Fence | None:
        return self._plain.fence()

    def drain(self) -> None:
        self._plain.drain()


class Shelf:
    """Keeps every piece."""

    def __init__(self) -> None:
        self.pieces: list[HiddenPiece] = []

    def take(self, piece: HiddenPiece) -> bool:
        self.pieces.append(piece)
        return True


class History:
    """The longest prefix, computed once, with its hidden states and a host copy of its pages."""

    def __init__(self, runner: ModelRunner, tokens: int) -> None:
        self.runner, self.projection = runner, KvProjection(runner)
        self.ids = torch.randint(3, runner.vocab_size, (tokens,), generator=torch.Generator().manual_seed(SEED))
        pages = tokens // PAGE_SIZE
        self.table = np.random.default_rng(SEED).permutation(runner.pool.pages)[:pages].astype(np.int32)
        shape, shelf = self.projection.shape, Shelf()
        layers = range(shape.layers)
        ring_bytes = 2 * CHUNK * shape.layers * shape.row_bytes
        ring = SnapshotRing(shape, ring_bytes, device=runner.pool.device, shm_prefix=PREFIX, layers=layers)
        saver = TwoStageSaver(ring, HiddenPieces(shelf, layers), max_sequences=1, submit=lambda work: work())
        saver.begin("history", 0)
        for start in range(0, tokens, CHUNK):
            rows = min(CHUNK, tokens - start)
            with saver.step() as step, step.around([SavedRows("history", 0, rows, start)], self.projection.inputs):
                self.compute(start, rows)
        saver.close()
        ring.close()
        self.pieces = shelf.pieces
        # Kept on the host: on a GPU a second copy of so much KV might not fit.
        self.expected = runner.pool.tensor[:, :, self._pages(tokens)].cpu()
        self.host = HostPoolView.create(PREFIX, runner.geometry, pages)
        for page in range(pages):
            kv = self.expected[:, :, page].contiguous().view(torch.uint8).numpy()
            self.host.pages[page] = kv.reshape(self.host.pages[page].shape)
            self.host.seal_page(page, np.random.default_rng(page).bytes(16))
        self._pins = cuda_pins(runner.pool.device)
        self._pinned = [self.host.flat_pages(), *(piece.rows.reshape(-1) for piece in self.pieces)]
        if self._pins is not None:
            for array in self._pinned:
                self._pins.pin(array)
        self.mover = make_mover(runner.pool, DEFAULT_MOVER[runner.pool.device.type], programs=DEFAULT_PROGRAMS)
        self.staging = StagingMemory(tokens * shape.row_bytes * shape.layers, runner.pool.device)
        self._transfer = ThreadPoolExecutor(max_workers=1)

    def compute(self, start: int, rows: int) -> None:
        meta = ForwardMeta.build([Segment(rows, start, self.table)], PAGE_SIZE, self.runner.pool.device)
        positions = torch.arange(start, start + rows)
        self.runner.forward(self.ids[start : start + rows], positions, meta, torch.empty(0, dtype=torch.int64))

    def restore(self, tokens: int, mix: LayerMix, bytes_per_s: float) -> float:
        """Seconds to restore the first ``tokens`` tokens."""
        shape, geometry = self.projection.shape, self.runner.geometry
        link, pages = Link(bytes_per_s), np.arange(tokens // PAGE_SIZE, dtype=np.int32)
        self.runner.pool.tensor[:, :, self._pages(tokens)] = 0
        self._synchronize()
        began = time.perf_counter()
        hidden = PieceSource(shape, self.pieces, 0, tokens, mix.hidden_layers) if mix.from_hidden else None
        kv = HostPages(
            self.mover, self._host_memory(), pages, self.table[pages], self.host.checksums[pages],
            self.host.identities[pages],
        )  # fmt: skip
        sources = Sources(
            hidden=None if hidden is None else LinkedHidden(hidden, link, shape.row_bytes),
            kv=LinkedKv(kv, link, tokens * geometry.token_bytes // geometry.layers),
            ids=self.ids[:tokens],
        )
        restoration = Restoration(
            self.runner, self.projection, Segment(tokens, 0, self.table), mix, sources, staging=self.staging,
            timeout_s=600.0,
        )  # fmt: skip
        self._transfer.submit(restoration.run)
        restoration.begin()
        restoration.wait_all()
        restoration.finish()
        self._synchronize()
        spent = time.perf_counter() - began
        self._compare(tokens)
        return spent

    def close(self) -> None:
        self._transfer.shutdown()
        if self._pins is not None:
            for array in self._pinned:
                self._pins.unpin(array)
        self._pinned = []
        self.host.unlink()
        self.host.close()

    def _host_memory(self) -> Any:
        from services.worker.kv.host_pools import AttachedPool

        return AttachedPool(self.host, is_pinned=self._pins is not None).memory()

    def _pages(self, tokens: int) -> torch.Tensor:
        return torch.from_numpy(self.table[: tokens // PAGE_SIZE]).long().to(self.runner.pool.device)

    def _synchronize(self) -> None:
        if self.runner.pool.device.type == "cuda":
            torch.cuda.synchronize()

    def _compare(self, tokens: int) -> None:
        """What was recomputed in other chunks may round otherwise; what is wrong is far away."""
        scale = 1e-3 if self.expected.dtype == torch.float32 else 0.1
        for page, at in enumerate(self.table[: tokens // PAGE_SIZE].tolist()):
            found, expected = self.runner.pool.tensor[:, :, at].cpu(), self.expected[:, :, page]
            if not bool(((found - expected).abs() <= scale * (1 + expected.abs())).all()):
                raise AssertionError("the restored prefix is not the one that was computed")


def times_of(
    figure: RestorationFigure, profile: RestorationProfile, mix: LayerMix, bytes_per_s: float
) -> tuple[float, float]:
    """Seconds of the link and of the processor."""
    io_hidden_s, io_kv_s = figure.io_hidden_s, figure.io_kv_s
    if bytes_per_s:
        io_hidden_s = max(io_hidden_s, profile.hidden_bytes / bytes_per_s)
        io_kv_s = max(io_kv_s, profile.kv_bytes / bytes_per_s)
    transmission = mix.from_hidden * io_hidden_s + mix.loaded * io_kv_s
    computation = mix.recomputed * figure.compute_token_s + mix.from_hidden * figure.compute_hidden_s
    return figure.tokens * transmission, figure.tokens * computation


def predict(figure: RestorationFigure, profile: RestorationProfile, mix: LayerMix, bytes_per_s: float) -> float:
    """Seconds, as HCache's section 4.1.2 has it: whichever of link and processor takes longer."""
    return max(times_of(figure, profile, mix, bytes_per_s))


def best_mix(figure: RestorationFigure, profile: RestorationProfile, bytes_per_s: float) -> LayerMix:
    return min(
        every_mix(profile.geometry.layers), key=lambda mix: predict(figure, profile, mix, bytes_per_s)
    )  # fmt: skip


def bench(
    kind: str, lengths: list[int], bandwidths: list[float], rounds: int, dtype: str, threads: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = save_llama(Path(scratch), vocab_size=VOCABULARY, dtype=dtype, kv_heads=KV_HEADS[kind])
        runner = ModelRunner.load(
            model_dir, dtype=dtype, device="cpu", page_size=PAGE_SIZE, device_kv_bytes=None,
            pages=max(lengths) // PAGE_SIZE, threads=threads, shm_prefix=PREFIX,
        )  # fmt: skip
    return bench_runner(runner, lengths, bandwidths, rounds)


def bench_runner(runner: ModelRunner, lengths: list[int], bandwidths: list[float], rounds: int) -> dict[str, Any]:
    """Of a model that is loaded, with room for the longest prefix; closes it."""
    try:
        profile = measure_restoration(runner, lengths, rounds=rounds)
        history = History(runner, max(lengths))
        try:
            figures = [
                figure for length in lengths for figure in _bench_length(history, profile, length, bandwidths, rounds)
            ]
        finally:
            history.close()
    finally:
        runner.close()
    return {"profile": msgspec.to_builtins(profile), "figures": figures}


def _bench_length(
    history: History, profile: RestorationProfile, tokens: int, bandwidths: list[float], rounds: int
) -> list[dict[str, Any]]:
    layers = profile.geometry.layers
    measured = next(figure for figure in profile.figures if figure.tokens == tokens)
    fixed = {
        "recompute": LayerMix(layers, 0, 0),
        "kv": LayerMix(0, 0, layers),
        "hidden": LayerMix(0, layers, 0),
        "half": LayerMix(layers // 2, 0, layers - layers // 2),
    }
    known: dict[tuple[LayerMix, float], float] = {}
    figures = []
    for bandwidth in bandwidths:
        bytes_per_s = bandwidth * 1e9
        mixes = {**fixed, "best": best_mix(measured, profile, bytes_per_s)}
        # Where computation takes far longer than the link, the link does not matter: one measurement stands for all.
        keys = {mix: (mix, bytes_per_s if _needs_link(measured, profile, mix, bytes_per_s) else 0.0)
                for mix in mixes.values()}  # fmt: skip
        wanted = [mix for mix in dict.fromkeys(mixes.values()) if keys[mix] not in known]
        times: dict[LayerMix, list[float]] = {mix: [] for mix in wanted}
        for _ in range(rounds):
            for mix in wanted:
                times[mix].append(history.restore(tokens, mix, bytes_per_s))
        known.update({keys[mix]: statistics.median(each) for mix, each in times.items()})
        for name, mix in mixes.items():
            spent = known[keys[mix]]
            figures.append({
                "tokens": tokens,
                "gb_per_s": bandwidth,
                "method": name,
                "mix": [mix.recomputed, mix.from_hidden, mix.loaded],
                "ms": round(spent * 1e3, 2),
                "tokens_per_s": round(tokens / spent, 1),
                "predicted_ms": round(predict(measured, profile, mix, bytes_per_s) * 1e3, 2),
            })  # fmt: skip
    return figures


def _needs_link(figure: RestorationFigure, profile: RestorationProfile, mix: LayerMix, bytes_per_s: float) -> bool:
    transmission, computation = times_of(figure, profile, mix, bytes_per_s)
    return transmission > computation / 4


def main(argv: list[str] | None = None) -> int:
    parser = results_file.arguments(__doc__, "--save")
    parser.add_argument("--models", default="mha,gqa")
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--bandwidths", default="0.1,0.25,0.5,1,2,5,0", help="GB/s; 0 is no throttle")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1, help="that compute; one more transmits")
    options = parser.parse_args(argv)
    lengths = [int(length) for length in options.lengths.split(",")]
    bandwidths = [float(bandwidth) for bandwidth in options.bandwidths.split(",")]
    results: dict[str, Any] = {"dtype": options.dtype, "threads": options.threads, "rounds": options.rounds}
    for kind in options.models.split(","):
        results[kind] = bench(kind, lengths, bandwidths, options.rounds, options.dtype, options.threads)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if options.save:
        results_file.write("hidden_states", results, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
