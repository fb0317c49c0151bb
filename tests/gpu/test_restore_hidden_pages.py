"""Hidden pages on a GPU: verified in pinned memory on their way to the device, restored equal within rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.detokenizer import Vocabulary
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.device_pool import DevicePool
from services.worker.restore.hidden_page_source import HiddenOfPages, HiddenPages, KvOfPages
from services.worker.restore.pinned_turns import PinnedTurns
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import PiecesRefused
from shared.hidden_forms import hidden_geometries
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.engine_driver import page_tables, random_prompt
from tests.run_name import shm_prefix
from tests.unit.worker.driven_executor import Driven, admit, batch
from tests.unit.worker.restore.hidden_pages import Computed
from tests.unit.worker.restore.saved import kv_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOKENS, PAGES = 256, 16
MIXED = KvGeometry(
    layers=3, kv_heads=4, head_dim=32, page_size=16, dtype="bfloat16", hidden=128, absent=1, from_hidden=1
)

"""Layer 1 is hidden states (unit 0), layer 2 is K and V (units 1 and 2)."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative to the largest value: cuBLAS takes other kernels for other numbers of rows, and they round otherwise."""


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Every dtype."""
    return str(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_comes_back_by_every_form(family: str, dtype: str, tmp_path: Path) -> None:
    """Through the executor, in two batches, with staging for less than half of it, on shuffled pages."""
    checkpoint = make_checkpoint(family, tmp_path)
    runner = ModelRunner.load(
        checkpoint, dtype=dtype, device="cuda", page_size=16, device_kv_bytes=None, pages=64, threads=0,
        shm_prefix=shm_prefix("restore"),
    )  # fmt: skip
    projection = KvProjection(runner)
    staging = 2 * 96 * projection.shape.row_bytes
    driven = Driven(runner, Vocabulary.from_directory(checkpoint), projection=projection, restore_staging_bytes=staging)
    first, table = page_tables(runner, [TOKENS + 16, TOKENS + 16], seed=1)
    computed = Computed.of(runner, random_prompt(TOKENS + 8, seed=2), first, [128, 128])
    scale = computed.kv.float().abs().amax() * TOLERANCE[dtype]
    for number, form in enumerate(hidden_geometries(runner.geometry, projection.shape.hidden)):
        name = f"s{number}"
        computed.write(driven.host_pool(PAGES, storage_id=name, geometry=form), range(PAGES))
        runner.pool.tensor[:, :, torch.from_numpy(table).long().cuda()] = float("nan")

        driven.give(admit(computed.tokens, table.tolist(), request_id=name))
        for start, end in ((0, 128), (128, 256)):
            pages = range(start // 16, end // 16)
            restore = computed.restore_chunk(start, end, pages, request_id=name, storage_id=name)
            driven.give(batch(restores=[restore]))
        driven.run()

        assert [done.failed for done in driven.done()[-2:]] == [(), ()]
        assert (kv_of(runner, table, TOKENS).float() - computed.kv.float()).abs().max() <= scale
    driven.close()


@pytest.fixture
def pool() -> Iterator[HostPoolView]:
    """Sixteen hidden pages of random bytes, sealed."""
    made = HostPoolView.create(shm_prefix("restore"), MIXED, PAGES)
    random = np.random.default_rng(1)
    made.pages[:] = random.integers(0, 256, made.pages.shape, dtype=np.uint8)
    for page in range(PAGES):
        made.seal_page(page, bytes([page + 1]) * 16)
    yield made
    made.unlink()
    made.close()


def pages_of(pool: HostPoolView) -> HiddenPages:
    numbers = np.arange(PAGES, dtype=np.int32)[::-1].copy()
    return HiddenPages(pool, numbers, pool.identities[numbers].copy())


@pytest.mark.parametrize("pages_at_once", [1, 3, 16])
def test_units_arrive_unchanged(pages_at_once: int, pool: HostPoolView) -> None:
    """However few pages a turn has: every byte of hidden states, K and V is where it belongs."""
    device = torch.device("cuda")
    turns = PinnedTurns(device, pages_at_once * MIXED.unit_bytes)
    kv_pool = DevicePool.create(MIXED.as_kv, 20, device="cuda", shm_prefix=shm_prefix("restore"))
    table = np.random.default_rng(2).permutation(20)[:PAGES].astype(np.int32)
    into = torch.zeros(TOKENS, MIXED.hidden, dtype=torch.bfloat16, device=device)
    source = KvOfPages(pages_of(pool), kv_pool, table, turns)

    HiddenOfPages(pages_of(pool), turns).read(1, 0, TOKENS, into)
    source.load(2)
    source.drain()
    torch.cuda.synchronize()

    held = pool.pages[::-1]
    assert (into.view(torch.uint8).cpu().numpy().reshape(PAGES, -1) == held[:, 0]).all()
    for half, found in enumerate((kv_pool.k(2), kv_pool.v(2))):
        rows = found[torch.from_numpy(table).long().cuda()].view(PAGES, -1).view(torch.uint8).cpu().numpy()
        assert (rows == held[:, 1 + half]).all()
    kv_pool.close()


def test_an_altered_unit_is_refused(pool: HostPoolView) -> None:
    """One flipped bit."""
    turns = PinnedTurns(torch.device("cuda"), 4 * MIXED.unit_bytes)
    pool.pages[7, 0, 100] ^= 1
    into = torch.zeros(TOKENS, MIXED.hidden, dtype=torch.bfloat16, device="cuda")

    with pytest.raises(PiecesRefused, match="unit 0 of hidden page 7"):
        HiddenOfPages(pages_of(pool), turns).read(1, 0, TOKENS, into)
