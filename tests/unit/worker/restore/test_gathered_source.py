"""Ranks of a group read disjoint shares and restore what one rank restores."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
from tests import run_name
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


Outcome = tuple[torch.Tensor | None, list[int], str]
"""What one rank restored, which tokens it read, and why it did not."""


def _rank(rank: int, folder: Path, model_dir: Path, shm_prefix: str) -> None:
    """One rank: restore the prefix that lies pickled in ``folder`` from each of its lists of pieces, and leave the
    outcomes there.
    """
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    timeout = datetime.timedelta(seconds=90)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=timeout)
    cases, table, length = pickle.loads((folder / "prefix").read_bytes())
    runner = _load(model_dir, shm_prefix)
    try:
        projection = KvProjection(runner)
        found = [_restore(runner, projection, pieces[rank], table, length) for pieces in cases]
        (folder / f"rank{rank}").write_bytes(pickle.dumps(found))
    finally:
        runner.close()
        dist.destroy_process_group()


def _load(model_dir: Path, shm_prefix: str) -> ModelRunner:
    return ModelRunner.load(
        model_dir, dtype="float32", device="cpu", page_size=16, device_kv_bytes=None, pages=64, threads=1,
        shm_prefix=shm_prefix,
    )  # fmt: skip


def _restore(
    runner: ModelRunner, projection: KvProjection, pieces: list[HiddenPiece], table: np.ndarray, length: int
) -> Outcome:
    layers = range(runner.geometry.layers)
    mine = _Noted(PieceSource(projection.shape, pieces, 0, length, layers))
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
    try:
        restoration.wait_all()
        return kv_of(runner, table, length).clone(), sorted(mine.read_tokens), ""
    except LoadRejected as error:
        return None, sorted(mine.read_tokens), str(error)
    finally:
        thread.join(60)  # The group may not go while it is being used.


@pytest.fixture(scope="module")
def ranks(
    restore_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Prefix, list[list[Outcome]]]:
    """A prefix, and by case what became of it on each rank: all pieces sound, then one altered on one rank.

    One group does both, because what takes time is starting its processes.
    """
    folder = tmp_path_factory.mktemp("ranks")
    runner = _load(restore_checkpoint("llama"), run_name.shm_prefix("one"))
    prefix = Prefix.computed(runner, 150, chunks=[100, 50])
    runner.close()
    altered = pickle.loads(pickle.dumps(prefix.pieces))
    altered[1].rows[1, 0, 0] ^= 1
    cases = [[prefix.pieces] * RANKS, [prefix.pieces, altered, prefix.pieces, prefix.pieces]]
    (folder / "prefix").write_bytes(pickle.dumps((cases, prefix.table, prefix.length)))
    # Ranks are forked from one fresh process that has imported PyTorch, which takes each of them seconds otherwise.
    multiprocessing.set_forkserver_preload(["services.worker.restore.restoration", "transformers.models.llama"])
    arguments = (folder, restore_checkpoint("llama"), run_name.shm_prefix("rank"))
    mp.start_processes(_rank, args=arguments, nprocs=RANKS, start_method="forkserver")
    found = [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(RANKS)]
    return prefix, [[of_rank[case] for of_rank in found] for case in range(len(cases))]


def test_four_ranks_equal_one(ranks: tuple[Prefix, list[list[Outcome]]]) -> None:
    """Every rank has the whole KV to the bit, every token was read by one rank alone, and shares differ by rounding
    up.
    """
    prefix, (results, _) = ranks

    assert [reason for _, _, reason in results] == [""] * RANKS
    assert all(torch.equal(kv, prefix.kv) for kv, _, _ in results)
    assert [token for _, tokens, _ in results for token in tokens] == list(range(150))
    assert [len(tokens) for _, tokens, _ in results] == [38, 38, 38, 36]


def test_all_ranks_refuse_together(ranks: tuple[Prefix, list[list[Outcome]]]) -> None:
    """What one rank finds altered, no rank uses; nobody waits for it in vain."""
    _, (_, results) = ranks

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
