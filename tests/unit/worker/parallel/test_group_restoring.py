"""A group restores KV from hidden pages: disjoint shards, an all-gather, in every rank its own heads (HCache 5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from services.worker.engine.forward_meta import Segment
from services.worker.parallel.division import Share
from services.worker.parallel.group_measure import measure_group
from services.worker.parallel.group_runner import GroupRunner
from services.worker.parallel.shards import shard_of
from services.worker.restore.attention_inputs import AttentionInputs
from services.worker.restore.costs import costs_of
from services.worker.restore.hidden_page_source import HiddenPages
from services.worker.restore.profile import subject
from services.worker.restore.refusals import HiddenStatesUnsupported, PiecesRefused
from shared.hidden_forms import hidden_geometries
from shared.ids import DIGEST_BYTES, chain_pages, chain_root, namespace_digest, split_digests
from shared.memory import HostPoolView, unlink_all
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from tests.checkpoints import make_checkpoint
from tests.engine_driver import Request, random_prompt, run_step
from tests.unit.worker.parallel.groups import PAGE_SIZE, SHM_PREFIX, group_of
from tests.unit.worker.restore.hidden_pages import write_pages

PAGES = 5
"""Of the prompt that is restored: two shards are not alike."""
TOKENS = PAGES * PAGE_SIZE
FIRST, AGAIN = np.arange(8, dtype=np.int32), np.array([20, 9, 31, 12, 17, 25, 28, 10], dtype=np.int32)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Whatever a test ends with, its segments do not stay."""
    yield
    unlink_all(SHM_PREFIX)


class Captured:
    """A prompt that a group computed: what went into attention, and its KV."""

    def __init__(self, group: GroupRunner) -> None:
        self.group = group
        self.tokens = random_prompt(TOKENS + 9, seed=4)
        self.rows: dict[int, torch.Tensor] = {}
        self.request = Request(list(self.tokens), FIRST)
        with AttentionInputs(group.model, group.geometry.layers).given_to(self):
            run_step(group, [(self.request, TOKENS)])
        self.logits = run_step(group, [(self.request, 9)])
        self.kv = self.kv_at(FIRST)
        packed = pack_int32(self.tokens[:TOKENS])
        self.identities = chain_pages(chain_root(namespace_digest("model")), packed, 4 * PAGE_SIZE)

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        self.rows[layer] = hidden.clone()

    def kv_at(self, table: np.ndarray) -> torch.Tensor:
        """[layers, 2, TOKENS, width]."""
        slots = torch.from_numpy(
            np.concatenate([np.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in table[:PAGES]])
        )
        pool = self.group.pool
        layers = range(self.group.geometry.layers)
        return torch.stack([torch.stack([pool.rows(layer, half, slots) for half in (0, 1)]) for layer in layers])

    def pool(self, geometry: KvGeometry) -> HostPoolView:
        """A hidden pool that holds the prompt's pages, in reverse."""
        view = HostPoolView.create(SHM_PREFIX, geometry, PAGES)
        write_pages(view, range(PAGES)[::-1], split_digests(self.identities), self.rows, self.kv)
        return view

    def restore(self, view: HostPoolView, recomputed: int = 0, begin: int = 0) -> None:
        """Restore the prompt's pages from ``begin`` on to other pages of the group's pool."""
        numbers = np.arange(PAGES, dtype=np.int32)[::-1].copy()[begin:]
        identities = np.frombuffer(self.identities, dtype=np.uint8).reshape(-1, DIGEST_BYTES)[begin:]
        pages = HiddenPages(view, numbers, identities)
        start = begin * PAGE_SIZE
        segment = Segment(TOKENS - start, start, AGAIN)
        self.group.restore(pages, segment, max(recomputed, view.geometry.absent), self.tokens[start:TOKENS], None)

    def wipe(self) -> None:
        for part in (each.pool for each in self.group.parts.parts):
            part.tensor[:, :, torch.from_numpy(AGAIN).long()] = float("nan")

    def goes_on(self) -> torch.Tensor:
        """Logits behind what was restored."""
        again = Request(list(self.tokens), AGAIN, computed=TOKENS)
        return run_step(self.group, [(again, 9)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_group_restores_every_form_as_it_was_computed(ranks: int, tmp_path: Path) -> None:
    """All forms that the model's hidden pages can have, whole and in two parts; logits behind it are those of the
    prompt that was computed. A unit that is not what was saved is refused by all ranks, whoever has read it, and the
    group goes on.
    """
    model = make_checkpoint("llama_mha", tmp_path / "model")
    with group_of(model, ranks, pages=40) as group:
        with pytest.raises(HiddenStatesUnsupported, match="cannot restore"):
            Captured(group).restore(Captured(group).pool(next(hidden_geometries(group.geometry, 64))))
        projection = group.prove_projection(2**20)
        assert (projection.shape.hidden, projection.shape.layers) == (64, 3)
        captured = Captured(group)
        for geometry in list(hidden_geometries(group.geometry, 64))[:: 1 if ranks == 2 else 4]:
            view = captured.pool(geometry)
            captured.wipe()
            captured.restore(view)
            torch.testing.assert_close(captured.kv_at(AGAIN), captured.kv, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(captured.goes_on(), captured.logits, atol=1e-4, rtol=1e-4)
            if geometry.from_hidden > 1:
                captured.restore(view, recomputed=geometry.absent + 1)
            captured.restore(view, begin=2)
            torch.testing.assert_close(captured.kv_at(AGAIN), captured.kv, atol=1e-5, rtol=1e-5)
            for page in (0, PAGES - 1):
                view.pages[page, geometry.units - 1, 5] ^= 4
                with pytest.raises(PiecesRefused):
                    captured.restore(view)
                view.pages[page, geometry.units - 1, 5] ^= 4
            captured.restore(view)
            group.let_go_of_hidden()
            view.unlink()
        torch.testing.assert_close(captured.goes_on(), captured.logits, atol=1e-4, rtol=1e-4)
        if ranks == 2:
            here = subject(group, projection, threads=1)
            measured = measure_group(group, here, [64, 128], rounds=1, enough_s=60.0, said=lambda line: None)
            assert [each.tokens for each in measured.figures] == [64, 128]
            assert min(costs_of(measured).hidden_us, costs_of(measured).link_bytes_per_us) > 0
            assert (here.ranks, here.hidden, here.geometry) == (2, 64, group.geometry)
            assert here.differences(structs.replace(here, ranks=1)) != ()


@pytest.mark.parametrize(("pages", "expected"), [(5, [3, 2]), (1, [1, 0]), (4, [2, 2])])
def test_shards_are_disjoint_and_cover_all_pages(pages: int, expected: list[int]) -> None:
    """No page is read twice, and the last rank may have nothing."""
    found = [shard_of(Share(rank, 2), pages) for rank in range(2)]

    assert [len(mine) for _, mine in found] == expected
    assert [page for _, mine in found for page in mine] == list(range(pages))
    assert {each for each, _ in found} == {max(expected)}
