"""The first way that passes serves; what failed before it is told (services/worker/proving/choosing)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from services.worker.proving.choosing import ALL_SECONDS, WAY_SECONDS, choose_ways, require_all
from services.worker.proving.part import Part, Way
from services.worker.proving.table import Attempt, ProofTable, ServedShape, joined
from shared.errors import DeviceUnproven


def _proves(shape: ServedShape) -> None:
    raise AssertionError("a way is tried by the trier alone")


class PlayedTrier:
    """Faults by (part, way); others pass. Every attempt takes ``seconds`` of its own clock."""

    def __init__(self, faults: Mapping[tuple[str, str], str], seconds: float = 1.0) -> None:
        self.faults, self.seconds = faults, seconds
        self.tried: list[tuple[str, str]] = []
        self.now_s = 0.0

    def attempt(self, part: Part, way: Way, limit_s: float) -> Attempt:
        assert limit_s == WAY_SECONDS
        self.tried.append((part.name, way.name))
        self.now_s += self.seconds
        return Attempt(way=way.name, fault=self.faults.get((part.name, way.name), ""), seconds=self.seconds)

    def clock_s(self) -> float:
        return self.now_s


def part(name: str, *ways: str, **settings: bool) -> Part:
    return Part(name, tuple(Way(way, _proves) for way in ways), **settings)


MOVER = part("mover", "gpu_assisted", "batched", "per_page", proves_all=True)
ATTENTION = part("attention", "flashinfer", "triton", "torch")
GRAPHS = Part("graphs", (Way("graphs", _proves, (("attention", "triton"),)), Way("eager")))


def chosen(trier: PlayedTrier, *parts: Part, proves_all: bool = False) -> ProofTable:
    return ProofTable(device="card", proofs=choose_ways(parts, trier, trier.clock_s, proves_all=proves_all))


def test_the_best_way_that_passes_serves_and_none_behind_it_is_tried() -> None:
    """Without faults one attempt is enough for each part."""
    trier = PlayedTrier({})

    table = chosen(trier, ATTENTION, part("triton", "compiled", "none"))

    assert (table.way("attention"), table.way("triton")) == ("flashinfer", "compiled")
    assert trier.tried == [("attention", "flashinfer"), ("triton", "compiled")]
    assert list(table.lost()) == []


@pytest.mark.parametrize(
    ("faulty", "serves"), [(["flashinfer"], "triton"), (["flashinfer", "triton"], "torch"), ([], "flashinfer")]
)
def test_each_way_that_fails_is_replaced_by_the_next(faulty: list[str], serves: str) -> None:
    """And told with its fault and what serves in its place."""
    trier = PlayedTrier({("attention", way): f"{way} is wrong" for way in faulty})

    table = chosen(trier, ATTENTION)

    assert table.way("attention") == serves
    assert [(each.way, each.instead, each.fault) for each in table.lost()] == [
        (way, serves, f"{way} is wrong") for way in faulty
    ]


def test_a_way_is_not_tried_without_what_it_needs() -> None:
    """Graphs repeat the attention of the kernels: with another one steps are eager."""
    trier = PlayedTrier({("attention", "flashinfer"): "no", ("attention", "triton"): "wrong"})

    table = chosen(trier, ATTENTION, GRAPHS)

    assert table.way("graphs") == "eager"
    assert ("graphs", "graphs") not in trier.tried
    assert [each.fault for each in table.lost() if each.part == "graphs"] == [
        "it needs attention by triton, which did not pass"
    ]


def test_all_ways_are_tried_where_settings_choose_among_them_or_somebody_asks() -> None:
    """A mover that the operator names must have passed, though a better one has; doctor wants every speed."""
    trier, everything = PlayedTrier({("mover", "batched"): "no"}), PlayedTrier({})

    table = chosen(trier, MOVER)
    chosen(everything, ATTENTION, proves_all=True)

    assert (table.way("mover"), table.passed("mover")) == ("gpu_assisted", ("gpu_assisted", "per_page"))
    assert [way for _, way in everything.tried] == ["flashinfer", "triton", "torch"]


def test_when_time_is_over_only_the_last_ways_are_tried() -> None:
    """The whole is bounded: by its limit, and one last way of each part."""
    trier = PlayedTrier({("attention", "flashinfer"): "slow"}, seconds=ALL_SECONDS)

    table = chosen(trier, ATTENTION, MOVER)

    assert trier.tried == [("attention", "flashinfer"), ("attention", "torch"), ("mover", "per_page")]
    assert (table.way("attention"), table.way("mover")) == ("torch", "per_page")
    assert [each.fault for each in table.lost()][1] == f"not tried: proofs had taken {ALL_SECONDS:.0f} s"


def test_where_no_way_passes_nothing_serves() -> None:
    """The error names the card, the part and every reason, and says what can be done."""
    table = chosen(
        PlayedTrier({("attention", way): f"{way} is wrong" for way in ("flashinfer", "triton", "torch")}), ATTENTION
    )

    assert table.way("attention", "none at all") == ""
    with pytest.raises(
        DeviceUnproven, match=r"card does not compute.*attention: flashinfer.*torch is wrong.*doctor --gpu"
    ):
        require_all(table)
    require_all(chosen(PlayedTrier({}), ATTENTION))


@pytest.fixture
def tables() -> list[ProofTable]:
    """Of two ranks, the second with faults."""
    good = chosen(PlayedTrier({}), ATTENTION, MOVER)
    bad = chosen(PlayedTrier({("attention", "flashinfer"): "no", ("mover", "gpu_assisted"): "slow"}), ATTENTION, MOVER)
    return [good, bad]


def test_a_way_serves_a_group_where_it_passed_in_all_ranks(tables: list[ProofTable]) -> None:
    """Faults name the rank that found them."""
    table = joined(tables)

    assert (table.way("attention"), table.way("mover")) == ("triton", "batched")
    assert [each.fault for each in table.lost()] == ["rank 1: no", "rank 1: slow"]
    assert joined([ProofTable(), ProofTable()]) == ProofTable()
