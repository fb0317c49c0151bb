"""Bar charts: lengths that mean something, intervals, and bars that begin where they should."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from tools.pages.bar_chart import Bar, bar_chart

_SVG = "{http://www.w3.org/2000/svg}"


def bars(svg: str) -> list[tuple[float, float]]:
    """(left, width) of each bar, from top to bottom."""
    found = [rect for rect in ET.fromstring(svg).iter(f"{_SVG}rect") if rect.get("class") is None]
    return [(float(rect.get("x", "")), float(rect.get("width", ""))) for rect in found]


def test_lengths_are_in_proportion_to_values() -> None:
    """On a linear axis a bar of twice the value is twice as long, and begins at the same place."""
    (short, long) = bars(bar_chart("t", "ms", {"": {"a": Bar(2, "2"), "b": Bar(4, "4")}}))

    assert long[0] == short[0]
    assert long[1] == pytest.approx(2 * short[1], abs=0.2)


def test_a_logarithmic_axis_turns_ratios_into_distances() -> None:
    """Ten times as much is as far again."""
    chart = bar_chart("t", "ms", {"": {"a": Bar(2, ""), "b": Bar(20, ""), "c": Bar(200, "")}}, is_log=True)
    ends = [left + width for left, width in bars(chart)]

    assert ends[1] - ends[0] == pytest.approx(ends[2] - ends[1], abs=0.2)


def test_bars_begin_at_a_mark() -> None:
    """What is below it goes to the left, what is above it to the right."""
    (below, above) = bars(bar_chart("t", "", {"": {"a": Bar(0.5, ""), "b": Bar(2, "")}}, is_log=True, mark=1))

    assert below[0] + below[1] == pytest.approx(above[0], abs=0.2)
    assert below[1] == pytest.approx(above[1], abs=0.2)


def test_bars_of_one_kind_have_one_colour_across_groups() -> None:
    """Whatever they are called."""
    groups = {
        "x": {"a, time": Bar(1, "", kind="time"), "a, rate": Bar(1, "", kind="rate")},
        "y": {"b, time": Bar(1, "", kind="time")},
    }
    drawn = ET.fromstring(bar_chart("t", "", groups)).iter(f"{_SVG}rect")
    colours = [rect.get("fill") for rect in drawn if rect.get("class") is None]

    assert colours[0] == colours[2] != colours[1]


def test_text_is_escaped_and_dark_pages_are_served() -> None:
    """Titles come from results; the ground follows the page's colours."""
    chart = bar_chart("<t>", "a & b", {"": {"n": Bar(1, "1 <ms>", 0.5, 2)}})

    assert "<t>" not in chart
    assert "1 &lt;ms&gt;" in chart
    assert "prefers-color-scheme:dark" in chart


@pytest.mark.parametrize("groups", [{}, {"": {}}, {"": {"a": Bar(0, "")}}])
def test_what_cannot_be_drawn_is_refused(groups: dict[str, dict[str, Bar]]) -> None:
    """There is no empty chart, and no bar of nothing."""
    with pytest.raises(ValueError, match="bars above 0"):
        bar_chart("t", "", groups)
