"""Ranks of a group read disjoint shares and restore what one rank restores."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from services.worker.engine.forward_meta import Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.layer_gate import LoadRejected
from services.worker.restore.gathered_source import GatheredSource
from services.worker.restore.hidden_source import PieceSource
from services.worker.restore.layer_mix import LayerMix
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import PiecesRefused
from services.worker.restore.restoration import Restoration, Sources
from services.worker.restore.staging import StagingMemory
from tests.unit.worker.restore.restoring import Prefix, beside
from tests.unit.worker.restore.saved import CPU, kv_of

RANKS = 4


class _Noted:
    """Notes which tokens were read."""

    def __init__(self, plain: PieceSource) -> None:
        self.plain, self.tokens, self.read_tokens = plain, plain.tokens, set()

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        self.read_tokens.update(range(start, end))
        self.plain.read(layer, start, end, into)


def _rank(rank: int, folder: Path, model_dir: Path) -> None:
    """One rank: restore the prefix that lies pickled in ``folder`` and leave there what it read and restored."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    timeout = datetime.timedelta(seconds=90)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=timeout)
    pieces, table, length = pickle.loads((folder / "prefix").read_bytes())
    runner = ModelRunner.load(
        model_dir, dtype="float32", device="cpu", page_size=16, device_kv_bytes=None, pages=64, threads=1,
        shm_prefix=f"restorerank{rank}",
    )  # fmt: skip
    try:
        projection = KvProjection(runner)
        layers = range(runner.geometry.layers)
        mine = _Noted(PieceSource(projection.shape, pieces[rank], 0, length, layers))
        restoration = Restoration(
            runner,
            projection,
            Segment(length, 0, table),
            LayerMix(0, len(layers), 0),
            Sources(hidden=GatheredSource(mine, dist.group.WORLD)),
            staging=StagingMemory(2 * length * projection.shape.row_bytes, CPU),
            timeout_s=60.0,
        )
        thread = beside(restoration.run)
        kv, reason = None, ""
        try:
            restoration.wait_all()
            kv = kv_of(runner, table, length)
        except LoadRejected as error:
            reason = str(error)
        finally:
            thread.join(60)  # The group may not go while it is being used.
        (folder / f"rank{rank}").write_bytes(pickle.dumps((kv, sorted(mine.read_tokens), reason)))
    finally:
        runner.close()
        dist.destroy_process_group()


def _on_every_rank(prefix: Prefix, pieces: list[list[HiddenPiece]], folder: Path, model_dir: Path) -> list[tuple]:
    (folder / "prefix").write_bytes(pickle.dumps((pieces, prefix.table, prefix.length)))
    mp.spawn(_rank, args=(folder, model_dir), nprocs=RANKS, join=True)
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(RANKS)]


def test_four_ranks_equal_one(
    load_runner: Callable[..., ModelRunner], restore_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every rank has the whole KV to the bit, every token was read by one rank alone, and shares differ by rounding
    up.
    """
    prefix = Prefix.computed(load_runner("llama"), 150, chunks=[100, 50])

    results = _on_every_rank(prefix, [prefix.pieces] * RANKS, tmp_path, restore_checkpoint("llama"))

    assert [reason for _, _, reason in results] == [""] * RANKS
    assert all(torch.equal(kv, prefix.kv) for kv, _, _ in results)
    assert [token for _, tokens, _ in results for token in tokens] == list(range(150))
    assert [len(tokens) for _, tokens, _ in results] == [38, 38, 38, 36]


def test_all_ranks_refuse_together(
    load_runner: Callable[..., ModelRunner], restore_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """What one rank finds altered, no rank uses; nobody waits for it in vain."""
    prefix = Prefix.computed(load_runner("llama"), 150, chunks=[150])
    altered = pickle.loads(pickle.dumps(prefix.pieces))
    altered[1].rows[1, 0, 0] ^= 1

    results = _on_every_rank(
        prefix, [prefix.pieces, altered, prefix.pieces, prefix.pieces], tmp_path, restore_checkpoint("llama")
    )

    assert all(kv is None and "ranks [1]" in reason and "layer 1" in reason for kv, _, reason in results)


def test_fewer_tokens_than_ranks(tmp_path: Path, load_runner: Callable[..., ModelRunner]) -> None:
    """In a group of one the gathered source is the plain one, down to a single token and to its refusals."""
    prefix = Prefix.computed(load_runner("llama"), 70, chunks=[70])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'one'}", rank=0, world_size=1)
    try:
        plain, into = prefix.source(69), torch.empty(1, 64)
        gathered = GatheredSource(plain, dist.group.WORLD)
        gathered.read(2, 0, 1, into)
        expected = torch.empty(1, 64)
        plain.read(2, 0, 1, expected)
        assert torch.equal(into, expected)
        prefix.pieces[1].rows[2] ^= 1
        with pytest.raises(PiecesRefused, match="layer 2"):
            gathered.read(2, 0, 1, into)
    finally:
        dist.destroy_process_group()
