"""The pool of a group on GPUs: every rank measures its own, in one step, and the least counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.worker.engine.gpu_room import RoomWish
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.planes import HeadsKept, LatentsKept
from services.worker.parallel.collectives import make_store
from services.worker.parallel.group_runner import _pages
from services.worker.parallel.orders import MeasureRoom, RankMeasured
from services.worker.parallel.rank_model import RankModel
from services.worker.proving.table import ProofTable
from tests.checkpoints import make_checkpoint
from tests.unit.worker.engine.test_gpu_room import StandIn
from tests.unit.worker.parallel.groups import start_order
from tests.unit.worker.parallel.layouts import layout_of

WISH = RoomWish(fraction=0.5, tokens=100, rows=9, reserve_bytes=7)


class Ranks:
    """Two other ranks, with room for 30 and 20 pages."""

    def __init__(self, happened: list[object]) -> None:
        self.happened = happened

    def tell(self, order: object) -> None:
        self.happened.append(order)

    def collect(self, kind: type[RankMeasured]) -> list[RankMeasured]:
        self.happened.append("collect")
        return [kind(pages=30), kind(pages=20)]


class Model:
    """Rank 0's share, with room for 25 pages."""

    def __init__(self, happened: list[object]) -> None:
        self.happened, self.longest = happened, 64

    def measure_room(self, wish: RoomWish) -> int:
        self.happened.append(wish)
        return 25


def test_the_least_room_counts() -> None:
    """The others are told first, for the prefill is computed by all together."""
    happened: list[Any] = []

    pages = _pages(Model(happened), Ranks(happened), device_kv_bytes=None, pages=None, sizer=None, room=WISH)  # type: ignore[arg-type]

    assert pages == 20
    assert happened == [MeasureRoom(fraction=0.5, tokens=100, rows=9, reserve_bytes=7), WISH, "collect"]


def test_a_number_of_pages_is_taken_without_a_measurement() -> None:
    """What the operator said wins."""
    happened: list[Any] = []
    model = Model(happened)
    model.model = None  # type: ignore[attr-defined]
    model.layout = layout_of([HeadsKept(2, 1, 1)], 2, 1)  # type: ignore[attr-defined]

    def pages(**settings: int | None) -> int:
        nothing: dict[str, int | None] = {"device_kv_bytes": None, "pages": None}
        settings = nothing | settings
        return _pages(model, Ranks(happened), sizer=None, room=WISH, **settings)  # type: ignore[arg-type]

    assert pages(pages=5) == 5
    assert pages(device_kv_bytes=160) == 10
    assert happened == []
    model.layout = layout_of([LatentsKept(3, 1)], 2, 1)  # type: ignore[attr-defined]
    assert pages(pages=5) == 5
    assert pages(device_kv_bytes=320) == 5  # Every rank keeps all latents, and half of a page holds nothing.


def test_room_is_measured_in_the_proven_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another may need what this machine lacks."""
    rank = RankModel(start_order(make_checkpoint("llama", tmp_path / "model"), 1))
    rank.proofs = ProofTable(device="proven")
    used: list[ProofTable] = []
    forward = ModelRunner.forward

    def spy(self: ModelRunner, *given: Any) -> Any:
        used.append(self.proofs)
        return forward(self, *given)

    monkeypatch.setattr(ModelRunner, "forward", spy)
    rank.join(make_store(60.0))
    try:
        rank.measure_room(RoomWish(0.5, 40, 7, 0), StandIn())
    finally:
        rank.close()

    assert used == [rank.proofs]


@pytest.mark.parametrize("family", ["llama", "mla", "gemma4_padded", "indexed"])
def test_room_is_measured_with_pages_of_what_the_model_keeps(family: str, tmp_path: Path) -> None:
    """A prefill over a pool of K and V would fail where pages hold latents, or other heads from layer to layer."""
    rank = RankModel(start_order(make_checkpoint(family, tmp_path / "model"), 1))
    rank.join(make_store(60.0))
    try:
        assert rank.measure_room(RoomWish(0.5, 100, 7, 0), StandIn()) > 1000
    finally:
        rank.close()


def test_a_rank_measures_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are counted by the bytes that they take in this rank."""
    asked: list[Any] = []

    class Found:
        def pages(self, page_bytes: int) -> int:
            asked.append(page_bytes)
            return 3

    def measured(*arguments: object) -> Found:
        asked.extend(arguments)
        return Found()

    monkeypatch.setattr("services.worker.parallel.rank_model.measure_room", measured)
    rank: Any = object.__new__(RankModel)
    rank.model, rank.context, rank.device = object(), 64, "device"
    rank._layout = layout_of([HeadsKept(2, 8, 8)] * 2, 2, 16)

    assert rank.measure_room(WISH, "memory") == 3
    assert asked[1:] == [rank.layout.part, 64, "device", WISH, "memory", 2 * 2 * 16 * 8 * 4]
