"""What saving hidden states costs the time between tokens: not saved, saved in two stages, saved directly.

    python -m bench.hidden_saving [--batches 1,4,8,16,32] [--history 512] [--steps 16] [--rounds 3] [--save]

After HCache's figure 14: every sequence of a decode batch has a history of about 512 tokens and is saved. ``two_stage``
copies each layer's rows to the ring within the step and assembles pieces beside it; ``direct`` writes every row of
every layer to its file at once, ``direct_io`` does so past the page cache. Ways take turns within a round, because on
a shared machine only neighbouring measurements compare. ``stopped`` counts sequences whose saving stopped for lack of
room.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench import results_file
from bench.direct_saving import DirectSaver
from bench.hidden_pieces import HiddenPieces
from bench.make_model import save_llama
from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.projection import KvProjection
from services.worker.restore.saving_step import SavedRows
from services.worker.restore.snapshot_ring import SnapshotRing
from services.worker.restore.two_stage import TwoStageSaver
from shared.chunks import CHUNK_TOKENS
from shared.errors import ConfigError

PAGE_SIZE = 16
KV_HEADS = {"mha": 12, "gqa": 4}
RING_BYTES = 64 * 2**20
SEED = 1
VOCABULARY = 16_384
PREFIX = "bench-saving"


class Way(Protocol):
    """One way to save, over the steps of one round."""

    stopped: int

    def step(self, rows: list[SavedRows]) -> AbstractContextManager[None]:
        """Around one forward pass."""

    def close(self) -> None: ...


class Off:
    stopped = 0

    def step(self, rows: list[SavedRows]) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...


class Appended:
    """Appends pieces to one file, as storage would."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def take(self, piece: HiddenPiece) -> bool:
        self._file.write(piece.rows.data)
        return True

    def close(self) -> None:
        self._file.close()


class TwoStage:
    def __init__(self, projection: KvProjection, folder: Path, batch: int, history: int) -> None:
        shape = projection.shape
        layers = range(shape.layers)
        self._inputs = projection.inputs
        self._ring = SnapshotRing(shape, RING_BYTES, device=torch.device("cpu"), shm_prefix=PREFIX, layers=layers)
        self._taker = Appended(folder / "pieces")
        self._saver = TwoStageSaver(self._ring, HiddenPieces(self._taker, layers), max_sequences=batch)
        self.stopped = 0
        for number in range(batch):
            self._saver.begin(str(number), begun(history, number))

    @contextmanager
    def step(self, rows: list[SavedRows]) -> Iterator[None]:
        with self._saver.step() as step, step.around(rows, self._inputs):
            yield

    def close(self) -> None:
        self._saver.close()
        counts = self._saver.counts
        self.stopped = counts.stopped_no_room + counts.stopped_gap + counts.stopped_not_taken
        self._ring.close()
        self._taker.close()


class Direct:
    stopped = 0

    def __init__(self, projection: KvProjection, folder: Path, max_tokens: int, *, past_page_cache: bool) -> None:
        self._inputs = projection.inputs
        self._saver = DirectSaver(projection.shape, folder, max_tokens=max_tokens, past_page_cache=past_page_cache)

    @contextmanager
    def step(self, rows: list[SavedRows]) -> Iterator[None]:
        self._saver.set_rows(rows)
        with self._inputs.given_to(self._saver):
            yield

    def close(self) -> None:
        self._saver.close()


def begun(history: int, number: int) -> int:
    """Tokens that the sequence of this number has: not all alike, so that pieces fill up in different steps."""
    return history - 5 * number % CHUNK_TOKENS


class Batch:
    """Sequences that decode together."""

    def __init__(self, runner: ModelRunner, batch: int, history: int, steps: int) -> None:
        self._runner, self._history = runner, history
        per = pages_for(history + steps, PAGE_SIZE)
        numbers = np.random.default_rng(SEED).permutation(runner.pool.pages)[: batch * per].astype(np.int32)
        self._tables = list(numbers.reshape(batch, per))
        ids = torch.randint(3, VOCABULARY, (batch, history), generator=torch.Generator().manual_seed(SEED))
        for number, table in enumerate(self._tables):
            length = begun(history, number)
            self._forward(ids[number, :length], [Segment(length, 0, table)], torch.arange(length))

    def decode(self, way: Way, steps: int) -> list[float]:
        """Seconds of each step but the first, whose lazy set-up is not what is measured."""
        token, times = torch.zeros(len(self._tables), dtype=torch.int64), []
        for step in range(steps + 1):
            positions = [begun(self._history, number) + step for number in range(len(self._tables))]
            began = time.perf_counter()
            segments = [Segment(1, place, table) for place, table in zip(positions, self._tables, strict=True)]
            rows = [SavedRows(str(number), number, 1, place) for number, place in enumerate(positions)]
            with way.step(rows):
                token = self._forward(token, segments, torch.tensor(positions))
            times.append(time.perf_counter() - began)
        return times[1:]

    def _forward(self, ids: torch.Tensor, segments: list[Segment], positions: torch.Tensor) -> torch.Tensor:
        meta = ForwardMeta.build(segments, PAGE_SIZE, "cpu")
        last = torch.tensor([segment.rows for segment in segments]).cumsum(0) - 1
        return self._runner.forward(ids, positions, meta, last).argmax(-1)


def bench(runner: ModelRunner, batches: list[int], history: int, steps: int, rounds: int, folder: Path) -> Any:
    projection, figures = KvProjection(runner), []
    for size in batches:
        batch = Batch(runner, size, history, steps + 1)
        times: dict[str, list[float]] = {}
        ratios: dict[str, list[float]] = {}
        stopped: dict[str, int] = {}
        for _ in range(rounds):
            medians: dict[str, float] = {}
            for name in ("off", "two_stage", "direct", "direct_io"):
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    try:
                        way = _way(name, projection, Path(scratch), size, history, steps)
                        spent = batch.decode(way, steps)
                    except ConfigError:  # This file system knows no O_DIRECT.
                        continue
                    way.close()
                times.setdefault(name, []).extend(spent)
                stopped[name] = stopped.get(name, 0) + way.stopped
                medians[name] = statistics.median(spent)
            for name, median in medians.items():
                ratios.setdefault(name, []).append(median / medians["off"])
        for name, each in times.items():
            figures.append({
                "batch": size,
                "way": name,
                "tbt_ms": round(statistics.median(each) * 1e3, 3),
                "against_off": round(statistics.median(ratios[name]), 4),
                "stopped": stopped[name],
            })  # fmt: skip
    return figures


def _way(name: str, projection: KvProjection, folder: Path, batch: int, history: int, steps: int) -> Way:
    if name == "off":
        return Off()
    if name == "two_stage":
        return TwoStage(projection, folder, batch, history)
    return Direct(projection, folder, history + steps + 1, past_page_cache=name == "direct_io")


def main(argv: list[str] | None = None) -> int:
    parser = results_file.arguments(__doc__, "--save")
    parser.add_argument("--model", choices=tuple(KV_HEADS), default="mha")
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--history", type=int, default=512)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1, help="that compute; one more assembles")
    parser.add_argument("--dir", type=Path, help="where files are written; by default where temporary files are")
    options = parser.parse_args(argv)
    batches = [int(batch) for batch in options.batches.split(",")]
    pages = max(batches) * pages_for(options.history + options.steps + 1, PAGE_SIZE)
    with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
        folder = Path(scratch)
        model_dir = save_llama(
            folder / "model", vocab_size=VOCABULARY, dtype=options.dtype, kv_heads=KV_HEADS[options.model]
        )
        runner = ModelRunner.load(
            model_dir, dtype=options.dtype, device="cpu", page_size=PAGE_SIZE, device_kv_bytes=None, pages=pages,
            threads=options.threads, shm_prefix=PREFIX,
        )  # fmt: skip
        try:
            figures = bench(runner, batches, options.history, options.steps, options.rounds, folder)
        finally:
            runner.close()
    results = {
        "model": options.model, "dtype": options.dtype, "threads": options.threads, "history": options.history,
        "steps": options.steps, "rounds": options.rounds, "figures": figures,
    }  # fmt: skip
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if options.save:
        results_file.write("hidden_saving", results, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
