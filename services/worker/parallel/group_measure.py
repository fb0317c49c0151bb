"""The cost of restoring in a group, measured by its rank 0 at the first start with a model.

All ranks take part in every timed run, with their shards and their all-gathers. See ``restore.first_measure``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.kv.device_pool import TORCH_DTYPES
from services.worker.kv.host_pools import AttachedPool
from services.worker.kv.measured_loads import LoadScene, medians
from services.worker.kv.movers import make_mover
from services.worker.parallel.division import Share
from services.worker.parallel.group_runner import GroupRunner
from services.worker.parallel.parts_mover import PartsMover
from services.worker.parallel.shards import shard_of
from services.worker.restore.figures import RestorationFigure, RestorationProfile
from services.worker.restore.hidden_page_source import HiddenOfPages, HiddenPages
from services.worker.restore.pinned_turns import pinned_turns
from shared.errors import ConfigError
from shared.hidden_forms import hidden_geometry
from shared.ids import DIGEST_BYTES
from shared.memory import HostPoolView, reap
from shared.messages.pools import KvGeometry

PREFIX = "thermocline-restore"


def measure_group(
    group: GroupRunner,
    here: RestorationProfile,
    lengths: Sequence[int],
    *,
    rounds: int,
    enough_s: float,
    said: Callable[[str], None],
) -> RestorationProfile:
    """Return ``here`` with figures for prefixes of these lengths, in tokens, whole pages.

    No further one is begun after ``enough_s`` seconds. Overwrites the pool. Raises ConfigError where hidden states
    cannot be pages of their own.
    """
    reap(PREFIX)  # Left by measurements that were killed.
    figures: list[RestorationFigure] = []
    began_s = time.monotonic()
    for tokens in lengths:
        if figures and time.monotonic() - began_s > enough_s / 2:
            break
        said(f"a prefix of {tokens} tokens")
        figures.append(_measure(group, here, tokens, rounds))
    return msgspec.structs.replace(here, figures=tuple(figures))


def _measure(group: GroupRunner, here: RestorationProfile, tokens: int, rounds: int) -> RestorationFigure:
    layers = group.geometry.layers
    geometry = hidden_geometry(group.geometry, 0, layers, here.hidden)
    if geometry is None:
        raise ConfigError(f"hidden states of {here.hidden} values make no pages beside {group.geometry}")
    with _sealed(geometry, tokens) as hidden, _sealed(group.geometry, tokens) as kv:
        pages = _pages(hidden)
        spent = medians(
            {
                "recompute": _recompute(group, tokens),
                "restore": _restore(group, pages, tokens),
                "transmit": _transmit(group, pages, here.ranks),
                "load": _load(group, kv),
            },
            rounds,
        )
    return RestorationFigure(
        tokens=tokens,
        io_hidden_s=spent["transmit"] / tokens,
        io_kv_s=spent["load"] / (tokens * layers),
        # Includes the part of reading and joining that projecting does not hide.
        compute_hidden_s=spent["restore"] / (tokens * layers),
        compute_token_s=spent["recompute"] / (tokens * layers),
    )


@contextmanager
def _sealed(geometry: KvGeometry, tokens: int) -> Iterator[HostPoolView]:
    """Yield a host pool of just ``tokens`` tokens, zeros, sealed under identities of their own."""
    view = HostPoolView.create(PREFIX, geometry, tokens // geometry.page_size)
    try:
        for page in range(view.handle.pages):
            view.pages[page] = 0
            view.seal_page(page, secrets.token_bytes(DIGEST_BYTES))
        yield view
    finally:
        view.unlink()
        view.close()


def _pages(view: HostPoolView) -> HiddenPages:
    numbers = np.arange(view.handle.pages, dtype=np.int32)
    return HiddenPages(view, numbers, view.identities[numbers].copy())


def _segment(group: GroupRunner, tokens: int) -> Segment:
    """Return a prefix in the first pages of the pool."""
    return Segment(tokens, 0, np.arange(pages_for(tokens, group.geometry.page_size), dtype=np.int32))


def _recompute(group: GroupRunner, tokens: int) -> Callable[[], object]:
    ids = torch.arange(tokens) * 7919 % group.vocab_size
    meta = ForwardMeta.build([_segment(group, tokens)], group.geometry.page_size, group.pool.device, None)

    def recompute() -> None:
        group.forward(ids, torch.arange(tokens), meta, torch.tensor([tokens - 1]))
        group.settle()

    return recompute


def _restore(group: GroupRunner, pages: HiddenPages, tokens: int) -> Callable[[], object]:
    size = group.geometry.page_size
    step = group.rows_at_once(size)
    if not step:
        raise ConfigError("the staging memory holds no page of hidden states")

    def restore() -> None:
        for start in range(0, tokens, step):
            end = min(tokens, start + step)
            segment = Segment(end - start, start, np.arange(pages_for(end, size), dtype=np.int32))
            group.restore(pages.part(start // size, end // size), segment, 0, [0] * (end - start), None)

    return restore


def _transmit(group: GroupRunner, pages: HiddenPages, ranks: int) -> Callable[[], object]:
    """Return a function that reads one layer of rank 0's shard; the other ranks read theirs at the same time."""
    _, mine = shard_of(Share(0, ranks), len(pages))
    shard = pages.part(mine.start, mine.stop)
    source = HiddenOfPages(shard, pinned_turns(group.pool.device, pages.geometry.unit_bytes))
    dtype = TORCH_DTYPES[pages.geometry.dtype]
    into = torch.empty((source.tokens, pages.geometry.hidden), dtype=dtype, device=group.pool.device)

    def transmit() -> None:
        source.read(0, 0, source.tokens, into)
        group.settle()

    return transmit


def _load(group: GroupRunner, view: HostPoolView) -> Callable[[], object]:
    mover = PartsMover(group.geometry, group.parts.parts, lambda pool: make_mover(pool, "batched", programs=1))
    numbers = np.arange(view.handle.pages, dtype=np.int32)
    scene = LoadScene(AttachedPool(view, is_pinned=False), group.pool, numbers, numbers)
    return lambda: scene.load(mover, verified=True)
