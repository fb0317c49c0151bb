"""Frames of the terminal: what they say, and that they fit."""

from __future__ import annotations

import io
import re
from typing import Literal

import msgspec
import pytest
from rich.console import Console

from services.gateway.openai_schema.cache import CacheNode
from services.gateway.openai_schema.cell import CellReport
from services.gateway.openai_schema.explanation import Explanation
from services.gateway.views.cache_view import HIT_TIERS
from tests.ui.stand_in import a_cell, a_tree, explanation, node
from thermocline.top.frames import VIEWS, body_rows, frame
from thermocline.top.overview import cached_share, ttft_quantile_ms
from thermocline.top.source import Snapshot
from thermocline.top.styles import PARTS, SOURCES, LogScale, Mark, bar, milliseconds


def a_snapshot(nodes: int = 60) -> Snapshot:
    """A busy cell."""
    return Snapshot(
        link="live",
        cell=msgspec.convert(a_cell(), CellReport),
        requests=msgspec.convert([explanation(n, ttft_ms=10.0 * (n + 1)) for n in range(9)], list[Explanation]),
        nodes=msgspec.convert(a_tree(nodes), list[CacheNode]),
    )


def text_of(snapshot: Snapshot, view: str, *, width: int = 80, height: int = 24, first: int = 0) -> str:
    """A frame without its colours."""
    return "\n".join(line.plain for line in frame(snapshot, view, width=width, height=height, first=first))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 4)])
def test_a_frame_fills_its_terminal_and_no_more(view: str, width: int, height: int) -> None:
    """Whatever the size, with everything known and with nothing known."""
    for snapshot in (a_snapshot(), Snapshot(), Snapshot(link="disconnected", error="no answer " * 40)):
        lines = frame(snapshot, view, width=width, height=height)

        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width


def test_the_overview_tells_pools_hits_and_times() -> None:
    """Cached and leased pages add up to what is used."""
    text = text_of(a_snapshot(), "overview")

    assert "running 5   waiting 2 of 1,000" in text
    assert "70 % of 682" in text
    assert "host 21,000" in text
    assert "p50 50.0 ms   p95 90.0 ms   cached 90 %" in text
    assert "log scale: ▁ up to 1.0 ms, █ 90.0 ms" in text


def test_every_letter_of_a_bar_is_explained_in_eighty_columns() -> None:
    """A legend takes as many lines as it needs: sources with their tokens, and the parts of a time."""
    cell = msgspec.convert(a_cell(counters={f"hit_tokens_{tier}": 10**9 for tier in HIT_TIERS}), CellReport)
    parts = [{"name": name, "start_ms": 0.0, "ms": 1.0} for name in PARTS]
    requests = msgspec.convert([explanation(1, parts=parts)], list[Explanation])

    overview = text_of(Snapshot(cell=cell), "overview", height=60)
    listed = text_of(Snapshot(requests=requests), "requests")

    assert [tier for tier in HIT_TIERS if f"{SOURCES[tier].letter} {tier} 1,000,000,000" not in overview] == []
    assert [name for name, mark in PARTS.items() if f"{mark.letter} {name}" not in listed] == []
    assert "by part" in listed.splitlines()[1]


def tenant(name: str, running: int, nbytes: int) -> dict[str, object]:
    """A row of a CellReport."""
    return {"tenant": name, "running": running, "waiting": 1, "device_bytes": nbytes, "host_bytes": 0, "disk_bytes": 0}


def test_tenants_are_told_where_there_are_several() -> None:
    """The busiest first, a few of many; without a file there is nobody to tell apart."""
    assert "tenant" not in text_of(a_snapshot(), "overview", height=60)
    rows = [tenant(f"t{number}", number, 2**20) for number in range(9)] + [tenant("other", 0, 2**30)]
    cell = msgspec.convert(a_cell(tenants=rows), CellReport)

    lines = text_of(Snapshot(cell=cell), "overview", height=60).splitlines()

    shown = [line.split() for line in lines[lines.index(next(row for row in lines if row.startswith("tenant "))) :]]
    assert shown[1] == ["t8", "8", "1", "1.0", "MiB", "0", "B", "0", "B"]
    assert [row[0] for row in shown[1:10]] == ["t8", "t7", "t6", "t5", "t4", "t3", "t2", "t1", "and"]


def test_the_tree_lists_children_below_their_parents_the_hottest_first() -> None:
    """With pins and tiers, and with the parent that is on no page left out."""
    nodes = [
        node(1, None, 0, 16, pins=["office"], host={"storage": 1}), node(2, 1, 16, 16, hits=1),
        node(3, 1, 16, 16, hits=5), node(4, 3, 32, 16), node(9, 8, 160, 16),
    ]  # fmt: skip
    rows = text_of(Snapshot(nodes=msgspec.convert(nodes, list[CacheNode])), "tree").splitlines()[3:]

    assert [row.split()[0] for row in rows[1:6]] == ["1", "3", "4", "2", "9"]
    assert "· h ·  [pins: office]" in rows[1]


def test_control_characters_of_a_prompt_never_reach_the_terminal() -> None:
    """They are spelt out."""
    nodes = [node(1, None, 0, 16, head_text="\x1b[2Jgone\r\n")]
    text = text_of(Snapshot(nodes=msgspec.convert(nodes, list[CacheNode])), "tree")

    assert "\x1b" not in text
    assert "\\x1b[2Jgone" in text


def test_a_deep_conversation_is_listed() -> None:
    """Deeper than Python's stack."""
    nodes = [node(n, n - 1 or None, 16 * (n - 1), 16) for n in range(1, 4097)]
    snapshot = Snapshot(nodes=msgspec.convert(nodes, list[CacheNode]))

    assert body_rows(snapshot, "tree", 80) == 4097
    assert "…4000" in text_of(snapshot, "tree", first=4000)


def test_what_is_old_is_said_to_be_old() -> None:
    """The last cell stays below the reason."""
    known = a_snapshot()
    text = text_of(Snapshot("scheduler away", "it is silent", known.cell, known.requests), "overview")

    assert "● scheduler away" in text
    assert "it is silent (the data below are old)" in text
    assert "running 5" in text


def test_requests_without_a_first_token_are_shown_by_their_state() -> None:
    """And count in no figure."""
    waiting = {**explanation(1), "state": "queued", "ttft_ms": None, "parts": [], "prompt": []}
    failed = {**waiting, "request_id": "request-2", "state": "failed", "error_code": "deadline_exceeded"}
    requests = msgspec.convert([waiting, failed], list[Explanation])
    text = text_of(Snapshot(requests=requests), "requests", width=100)

    assert "queued" in text
    assert "deadline_exceeded" in text
    assert cached_share(requests) is ttft_quantile_ms(requests, 0.5) is None


def test_parts_of_a_bar_add_up() -> None:
    """Rounding moves ends, never the sum; nothing of nothing is an empty bar."""
    mark = Mark("D", "red")

    assert bar([(1, mark)] * 3, 3, 10).plain == "D" * 10
    assert bar([(1, mark), (0.4, mark)], 2.8, 10).plain == "D" * 5 + "·" * 5
    assert bar([(1, mark)], 0, 4).plain == "····"


@pytest.mark.parametrize("marks", [SOURCES, PARTS])
def test_no_two_marks_have_one_letter(marks: dict[str, Mark]) -> None:
    """So a legend holds without colour."""
    letters = [mark.letter for mark in marks.values()]

    assert len(letters) == len(set(letters))


@pytest.mark.parametrize("view", ["overview", "requests"])
@pytest.mark.parametrize("colours", [None, "standard", "truecolor"])
def test_legends_hold_without_colour(view: str, colours: Literal["standard", "truecolor"] | None) -> None:
    """With NO_COLOR, 16 colours or all, each letter of a bar is in a legend with its name."""
    console = Console(
        file=io.StringIO(), color_system=colours, no_color=colours is None, force_terminal=True, width=100, _environ={}
    )
    with console.capture() as capture:
        console.print(*frame(a_snapshot(), view, width=100, height=40), sep="\n")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capture.get())

    marks = SOURCES if view == "overview" else PARTS
    drawn = {letter for run in re.findall(r"([A-Z])\1{3,}", plain) for letter in run}
    assert drawn
    for letter in drawn:
        name = next(name for name, mark in marks.items() if mark.letter == letter)
        assert re.search(rf"\b{letter} {name}\b", plain), (letter, name)


def test_times_are_drawn_on_a_log_scale() -> None:
    """Each decade has the same length, from the power of ten below the least; an axis says so."""
    scale = LogScale.of([2.0, 0.0, 150.0, 1000.0])

    assert scale == LogScale(1.0, 1000.0)
    assert [round(scale.share(value), 3) for value in (0.5, 1, 10, 100, 1000, 5000)] == [0, 0, 0.333, 0.667, 1, 1]
    assert scale.axis(36).plain.rstrip() == "|1.0 ms     |10.0 ms    |100 ms"
    assert LogScale.of([0.0]) is None
    assert LogScale.of([5.0]) == LogScale(1.0, 10.0)


def test_bars_of_requests_are_as_long_as_their_ttft_on_that_scale() -> None:
    """Ten times the TTFT is the same length more, whatever the parts."""
    requests = [explanation(n, ttft_ms=ms) for n, ms in enumerate((10.0, 100.0, 1000.0))]
    rows = text_of(Snapshot(requests=msgspec.convert(requests, list[Explanation])), "requests", width=95).splitlines()

    lengths = [len(row[35:].rstrip()) for row in rows[4:7]]
    assert lengths == [20, 40, 60]


@pytest.mark.parametrize(
    ("ms", "said"), [(None, "-"), (0.04, "0.0 ms"), (99.94, "99.9 ms"), (250, "250 ms"), (1234, "1.23 s")]
)
def test_milliseconds_have_three_digits_or_so(ms: float | None, said: str) -> None:
    """And seconds from one second on."""
    assert milliseconds(ms) == said
