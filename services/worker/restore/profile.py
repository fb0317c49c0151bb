"""Measures what each way back onto the device costs here: the figures that a restoration planner works with (HCache
section 4.1.2 finds them offline for each machine and model).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

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
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import HiddenStatesUnsupported
from shared.chunks import CHUNK_TOKENS
from shared.errors import ConfigError

PREFIX = "thermocline-restore"


def subject(
    runner: ModelRunner | GroupRunner, projection: KvProjection | None, *, threads: int = 0
) -> RestorationProfile:
    """Of what figures would be here, without any. ``threads`` is what the runner was loaded with; 0 is torch's
    default. Without ``projection`` nothing is restored from hidden states.
    """
    device = runner.pool.device.type
    model = runner.model
    weights = (getattr(module, "weight", None) for module in model.modules())
    return RestorationProfile(
        geometry=runner.geometry,
        hidden=0 if projection is None else projection.shape.hidden,
        device=device,
        figures=(),
        architecture=type(model).__name__,
        parameters=sum(weight.numel() for weight in weights if isinstance(weight, torch.Tensor)),
        threads=(threads or torch.get_num_threads()) if device == "cpu" else 0,
        ranks=runner.ranks if isinstance(runner, GroupRunner) else 1,
    )


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
    ``enough_s`` seconds are over. ``said`` is told of each. Raises ConfigError for a length that the pool or the model
    cannot hold.
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
    figures: list[RestorationFigure] = []
    began_s = last_s = clock_s()
    for tokens in sorted(set(lengths)):
        # Attention makes time grow with the square of the length at the most.
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
    """Measure at a worker's first start with a model: as many of ``LENGTHS`` as its pool holds and as take no
    longer than ``ENOUGH_S``. ``here`` describes the model. Raises ConfigError where the pool holds none.
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
        compute_hidden_s=spent.get("project", 0.0) / (tokens * geometry.layers),
        compute_token_s=spent["recompute"] / (tokens * geometry.layers),
    )


def _recompute(runner: ModelRunner, tokens: int) -> Callable[[], object]:
    """Return a computation of all layers of a prefix from its tokens."""
    ids = torch.arange(tokens) * 7919 % runner.vocab_size
    segment = _whole(runner, tokens)

    def recompute() -> None:
        compute_first_layers(runner, ids, segment, runner.geometry.layers)
        _wait(runner)

    return recompute


@contextmanager
def _hidden_works(
    runner: ModelRunner, projection: KvProjection, tokens: int
) -> Iterator[dict[str, Callable[[], object]]]:
    """Open the works of transmitting one layer of a prefix's hidden states, and of projecting all layers."""
    shape, device = projection.shape, runner.pool.device
    slots = KvSlots.of_segment(_whole(runner, tokens), runner.geometry.page_size, device)
    embeddings = projection.position_embeddings(torch.arange(tokens))
    hidden = torch.zeros(tokens, shape.hidden, dtype=shape.torch_dtype, device=device)
    host = np.zeros((pages_for(tokens, CHUNK_TOKENS), 1, CHUNK_TOKENS, shape.row_bytes), dtype=np.uint8)
    source = PieceSource(shape, _pieces(host), 0, tokens, [0])

    def transmit() -> None:
        source.read(0, 0, tokens, hidden)
        _wait(runner)

    def project() -> None:
        for layer in range(runner.geometry.layers):
            projection.restore(layer, hidden, embeddings, slots)
        _wait(runner)

    pins = cuda_pins(device)
    if pins is not None:
        pins.pin(host.reshape(-1))
    try:
        yield {"transmit": transmit, "project": project}
    finally:
        if pins is not None:
            pins.unpin(host.reshape(-1))


def _whole(runner: ModelRunner, tokens: int) -> Segment:
    """Return a prefix in the first pages of the pool."""
    return Segment(tokens, 0, np.arange(pages_for(tokens, runner.geometry.page_size), dtype=np.int32))


def _wait(runner: ModelRunner) -> None:
    if runner.pool.device.type == "cuda":
        torch.cuda.synchronize()


def _pieces(rows: np.ndarray) -> list[HiddenPiece]:
    """Pieces of one layer over ``rows``, uint8 [pieces, 1, 64, row_bytes]."""
    return [HiddenPiece.seal("measured", index * CHUNK_TOKENS, (0,), piece) for index, piece in enumerate(rows)]
