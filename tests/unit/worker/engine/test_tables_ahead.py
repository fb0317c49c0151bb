"""Tables that were made ahead are those that the step would have been given; what was not expected is made anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.tables_ahead import TablesAhead

PAGE_SIZE = 4
TABLES = [np.array([7, 2, 9], dtype=np.int32), np.array([4, 1], dtype=np.int32)]
STEP = [Segment(1, 6, TABLES[0]), Segment(1, 3, TABLES[1])]
NEXT = [Segment(1, 7, TABLES[0]), Segment(1, 4, TABLES[1])]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Segment, ...]]:
    """Steps whose tables were made."""
    made: list[tuple[Segment, ...]] = []
    build = ForwardMeta.build

    def noting(segments: list[Segment], *others: object) -> ForwardMeta:
        made.append(tuple(segments))
        return build(segments, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(ForwardMeta, "build", noting)
    return made


def told(segments: Sequence[Segment]) -> list[tuple[int, int, list[int]]]:
    """What tables are made of: segments with arrays cannot be compared themselves."""
    return [(each.rows, each.context, each.pages.tolist()) for each in segments]


def ahead() -> TablesAhead:
    # Numbers can be looked at on a CPU alone, and on one nothing is made ahead.
    return TablesAhead(PAGE_SIZE, torch.device("meta"))


def test_the_expected_step_finds_its_tables(built: list[tuple[Segment, ...]]) -> None:
    """One token more of each request: made once, while the step before ran."""
    tables = ahead()
    tables.of_step(STEP, None)
    tables.expect_after(STEP)
    assert len(built) == 2

    meta = tables.of_step(NEXT, None)

    assert len(built) == 2
    assert told(meta.segments) == told(NEXT)
    assert meta.gate is None
    assert meta.paged is not None
    assert meta.paged.max_length == 8


class Gate:
    def wait(self, layer: int) -> None:
        pass


@pytest.mark.parametrize(
    "other",
    [
        [NEXT[0]],
        [NEXT[1], NEXT[0]],
        [NEXT[0], Segment(1, 5, TABLES[1])],
        [NEXT[0], Segment(2, 4, TABLES[1])],
        [NEXT[0], Segment(1, 4, np.array([4, 8], dtype=np.int32))],
    ],
    ids=["one has ended", "another order", "another place", "a chunk", "other pages"],
)
def test_another_step_has_tables_of_its_own(other: list[Segment], built: list[tuple[Segment, ...]]) -> None:
    """And what was made for the expected one is dropped."""
    tables = ahead()
    tables.expect_after(STEP)

    assert told(tables.of_step(other, None).segments) == told(other)
    tables.of_step(NEXT, None)

    assert [told(each) for each in built] == [told(NEXT), told(other), told(NEXT)]


def test_a_step_behind_a_gate_has_its_gate(built: list[tuple[Segment, ...]]) -> None:
    """Nothing made ahead has one."""
    tables, gate = ahead(), Gate()
    tables.expect_after(STEP)

    assert tables.of_step(NEXT, gate).gate is gate


@pytest.mark.parametrize(
    ("step", "device"),
    [
        ([Segment(2, 3, TABLES[1])], "meta"),
        ([STEP[0], Segment(1, 7, TABLES[1])], "meta"),
        (STEP, "cpu"),
    ],
    ids=["a chunk", "pages are full", "on a CPU"],
)
def test_nothing_is_made_where_nothing_is_known(
    step: list[Segment], device: str, built: list[tuple[Segment, ...]]
) -> None:
    """After a chunk comes what the scheduler says; a request whose pages are full is given others, or waits."""
    TablesAhead(PAGE_SIZE, torch.device(device)).expect_after(step)

    assert built == []
