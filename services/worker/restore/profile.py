"""Measurement of the cost of each means of restoring here: the figures of a restoration planner.

HCache section 4.1.2 finds them offline for each machine and model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from services.worker.engine.forward_meta import Segment, pages_for
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.measured_loads import load_scene, medians
from services.worker.kv.movers import DEFAULT_MOVER, make_mover
from services.worker.kv.movers.choice import DEFAULT_PROGRAMS
from services.worker.kv.pinning import cuda_pins
from services.worker.parallel.group_measure import measure_group
from services.worker.parallel.group_runner import GroupRunner
from services.worker.restore.figures import RestorationFigure, RestorationProfile
from services.worker.restore.first_layers import compute_first_layers
from services.worker.restore.first_measure import ENOUGH_S, LENGTHS, ROUNDS
from services.worker.restore.hidden_source import PieceSource
from services.worker.restore.kv_slots import KvSlots
from services.worker.restore.layer_mix import LayerMix
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import HiddenStatesUnsupported
from services.worker.restore.restoration import Restoration, Sources
from services.worker.restore.staging import StagingMemory
from shared.chunks import CHUNK_TOKENS, chunk_tokens, chunks_of_part
from shared.errors import ConfigError

PREFIX = "thermocline-restore"
TIMEOUT_S = 60.0  # Of a layer; far longer than any takes.

_OF_THE_FILE = ("_name_or_path", "transformers_version")
"""Entries of a configuration that say where and by what it was written."""


def subject(
    runner: ModelRunner | GroupRunner, projection: KvProjection | None, *, threads: int = 0
) -> RestorationProfile:
    """Return a profile that describes this machine and model, without figures.

    ``threads`` is the setting with which the runner was loaded; 0 is torch's default. Without ``projection`` nothing is
    restored from hidden states.
    """
    device = runner.pool.device.type
    model = runner.model
    return RestorationProfile(
        geometry=runner.geometry,
        hidden=0 if projection is None else projection.shape.hidden,
        device=device,
        figures=(),
        architecture=type(model).__name__,
        configuration=_digest(model.config),
        model_bytes=runner.model_bytes,
        forward=_forward_of(runner),
        threads=(threads or torch.get_num_threads()) if device == "cpu" else 0,
        ranks=runner.ranks if isinstance(runner, GroupRunner) else 1,
    )


def _digest(config: Any) -> str:
    """Return a digest of a model's configuration, the same wherever the model's folder is."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _OF_THE_FILE}
    text = json.dumps(fields, sort_keys=True, default=lambda value: type(value).__name__)
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def _forward_of(runner: ModelRunner | GroupRunner) -> str:
    """Return the name of the code that computes steps: one model can be several times as fast in one as in another."""
    if isinstance(runner, GroupRunner):
        return "modules"
    # The runner shows its forward to no one else, and what is measured here depends on it.
    fused = runner._fused
    name = "modules" if fused is None else type(fused).__name__
    return f"exact {name}" if runner.is_exact else name


def measure_restoration(
    runner: ModelRunner,
    lengths: Sequence[int],
    *,
    rounds: int = 5,
    threads: int = 0,
    enough_s: float = float("inf"),
    said: Callable[[str], None] = lambda line: None,
    clock_s: Callable[[], float] = time.perf_counter,
) -> RestorationProfile:
    """Measure prefixes of these lengths, in tokens. Overwrites the pool: call it before any request is admitted.

    The shortest is always measured; a longer one is not begun where it would presumably last until more than
    ``enough_s`` seconds are over. ``said`` is called with a line before each. Raises ConfigError for a length that the
    pool or the model cannot hold.
    """
    longest = min(runner.pool.pages * runner.geometry.page_size, runner.max_context)
    wrong = [length for length in lengths if not runner.geometry.page_size <= length <= longest]
    if wrong or not lengths or rounds < 1:
        raise ConfigError(f"prefixes of {wrong or 'no'} tokens cannot be measured; the longest here has {longest}")
    try:
        projection = KvProjection(runner)
    except HiddenStatesUnsupported as error:
        said(f"no hidden states: {error.message}")
        projection = None
    ordered = sorted(set(lengths))
    if len(ordered) > 1:
        # The first runs in a process touch memory and choose kernels, and say nothing of how long others take.
        _measure(runner, projection, ordered[0], 1)
    figures: list[RestorationFigure] = []
    began_s = last_s = clock_s()
    for tokens in ordered:
        # With attention the time grows at most with the square of the length.
        growth = (tokens / figures[-1].tokens) ** 2 if figures else 0.0
        if figures and clock_s() - began_s + (clock_s() - last_s) * growth > enough_s:
            said(f"{tokens} tokens are left out, they would take too long")
            break
        said(f"a prefix of {tokens} tokens")
        last_s = clock_s()
        figures.append(_measure(runner, projection, tokens, rounds))
    return msgspec.structs.replace(subject(runner, projection, threads=threads), figures=tuple(figures))


def measure_first(
    runner: ModelRunner | GroupRunner, here: RestorationProfile, *, said: Callable[[str], None]
) -> RestorationProfile:
    """Measure at a worker's first start with a model that ``here`` describes.

    Takes as many of ``LENGTHS`` as the pool holds and as take no longer than ``ENOUGH_S``. Raises ConfigError where the
    pool holds none.
    """
    longest = min(runner.pool.pages * runner.geometry.page_size, runner.max_context)
    fitting = [length for length in LENGTHS if runner.geometry.page_size <= length <= longest]
    limits: dict[str, Any] = {"rounds": ROUNDS, "enough_s": ENOUGH_S, "said": said}
    if isinstance(runner, GroupRunner):
        size = runner.geometry.page_size
        return measure_group(runner, here, sorted({max(1, each // size) * size for each in fitting}), **limits)
    return measure_restoration(runner, fitting or [longest], threads=here.threads, **limits)


def _measure(runner: ModelRunner, projection: KvProjection | None, tokens: int, rounds: int) -> RestorationFigure:
    geometry = runner.geometry
    works = {"recompute": _recompute(runner, tokens)}
    with ExitStack() as stack:
        scene = stack.enter_context(load_scene(geometry, tokens, device=str(runner.pool.device), shm_prefix=PREFIX))
        mover = make_mover(scene.device, DEFAULT_MOVER[scene.device.device.type], programs=DEFAULT_PROGRAMS)
        works["load"] = lambda: scene.load(mover, verified=True)
        if projection is not None:
            works |= stack.enter_context(_hidden_works(runner, projection, tokens))
        spent = medians(works, rounds)
        loaded = len(scene.pages) * geometry.page_size
    return RestorationFigure(
        tokens=tokens,
        io_hidden_s=spent.get("transmit", 0.0) / tokens,
        io_kv_s=spent["load"] / (loaded * geometry.layers),
        compute_hidden_s=_projecting_s(spent, geometry.layers) / (tokens * geometry.layers),
        compute_token_s=spent["recompute"] / (tokens * geometry.layers),
    )


def _projecting_s(spent: dict[str, float], layers: int) -> float:
    """Return the seconds of projecting all layers beside their transmission.

    A restoration takes as long as the longer of the two where they do not disturb each other. What it takes more
    belongs to projecting: on a CPU both need the cores and the memory, and each part costs what begins and ends it.
    """
    if "project" not in spent:
        return 0.0
    apart_s = max(spent["project"], spent["transmit"] * layers)
    return spent["project"] + max(0.0, spent["restore"] - apart_s)


def _recompute(runner: ModelRunner, tokens: int) -> Callable[[], object]:
    """Return a computation of all layers of a prefix from its tokens."""
    ids = torch.arange(tokens) * 7919 % runner.vocab_size
    segment = _segment(runner, 0, tokens)

    def recompute() -> None:
        compute_first_layers(runner, ids, segment, runner.geometry.layers)
        _wait(runner)

    return recompute


@contextmanager
def _hidden_works(
    runner: ModelRunner, projection: KvProjection, tokens: int
) -> Iterator[dict[str, Callable[[], object]]]:
    """Open the functions to time, with a prefix's hidden states.

    They transmit one layer, project all layers, and restore all layers with both, in the parts in which a fetch tells
    of what has arrived.
    """
    shape, device, layers = projection.shape, runner.pool.device, runner.geometry.layers
    slots = KvSlots.of_segment(_segment(runner, 0, tokens), runner.geometry.page_size, device)
    embeddings = projection.position_embeddings(torch.arange(tokens))
    hidden = torch.zeros(tokens, shape.hidden, dtype=shape.torch_dtype, device=device)
    host = np.zeros((pages_for(tokens, CHUNK_TOKENS), 1, CHUNK_TOKENS, shape.row_bytes), dtype=np.uint8)
    pieces = _pieces(host)
    whole = PieceSource(shape, pieces, 0, tokens, [0])
    chunk = chunk_tokens(runner.geometry.page_size)
    step = chunk * chunks_of_part(-(-tokens // chunk))
    segments = [_segment(runner, start, min(start + step, tokens)) for start in range(0, tokens, step)]
    sources = [_OneLayer(PieceSource(shape, pieces, each.context, each.length, [0])) for each in segments]
    staging = StagingMemory(min(2, layers) * min(step, tokens) * shape.row_bytes, device)

    def transmit() -> None:
        whole.read(0, 0, tokens, hidden)
        _wait(runner)

    def project() -> None:
        for layer in range(layers):
            projection.restore(layer, hidden, embeddings, slots)
        _wait(runner)

    def restore() -> None:
        for segment, source in zip(segments, sources, strict=True):
            mix, given = LayerMix(0, layers, 0), Sources(hidden=source)
            part = Restoration(runner, projection, segment, mix, given, staging=staging, timeout_s=TIMEOUT_S)
            transfer.submit(part.run)
            try:
                part.begin()
                part.wait_all()
                _wait(runner)
            finally:
                part.finish()

    pins = cuda_pins(device)
    if pins is not None:
        pins.pin(host.reshape(-1))
    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="restoring") as transfer:
            yield {"transmit": transmit, "project": project, "restore": restore}
    finally:
        if pins is not None:
            pins.unpin(host.reshape(-1))


class _OneLayer:
    """A source that holds one layer and gives it for every layer, so that a long prefix fits the memory."""

    def __init__(self, source: PieceSource) -> None:
        self._source, self.tokens = source, source.tokens

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        self._source.read(0, start, end, into)


def _segment(runner: ModelRunner, start: int, end: int) -> Segment:
    """Return tokens ``[start, end)`` of a prefix in the first pages of the pool."""
    return Segment(end - start, start, np.arange(pages_for(end, runner.geometry.page_size), dtype=np.int32))


def _wait(runner: ModelRunner) -> None:
    if runner.pool.device.type == "cuda":
        torch.cuda.synchronize()


def _pieces(rows: np.ndarray) -> list[HiddenPiece]:
    """Return pieces of one layer over ``rows``, uint8 [pieces, 1, 64, row_bytes]."""
    return [HiddenPiece.seal("measured", index * CHUNK_TOKENS, (0,), piece) for index, piece in enumerate(rows)]
