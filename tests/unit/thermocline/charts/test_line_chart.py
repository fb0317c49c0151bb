"""Line charts: well-formed, in the right places, and readable on light and on dark pages."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from thermocline.charts.line_chart import line_chart

_SVG = "{http://www.w3.org/2000/svg}"


def drawn(lines: dict[str, dict[float, float]], **options: tuple[str, ...]) -> ET.Element:
    """The chart of some lines, parsed."""
    return ET.fromstring(line_chart("A <title>", "capacity", "hit ratio", lines, **options))


def points(chart: ET.Element) -> list[list[tuple[float, float]]]:
    """The corners of each line."""
    found = [line.get("points", "") for line in chart.iter(f"{_SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split())] for text in found]


def texts(chart: ET.Element) -> list[str]:
    """Every text of a chart."""
    return [text.text or "" for text in chart.iter(f"{_SVG}text")]


def test_positive_places_are_spread_by_their_ratios() -> None:
    """Each doubling goes as far to the right as the last; higher values lie higher up."""
    ((first, second, third),) = points(drawn({"lru": {100: 0.1, 200: 0.2, 400: 0.4}}))

    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.2)
    assert first[1] > second[1] > third[1]


def test_places_from_0_on_are_spread_evenly() -> None:
    """A logarithm has no 0."""
    ((first, second, third),) = points(drawn({"lru": {0: 0.1, 200: 0.2, 400: 0.4}}))

    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.2)


def test_lines_are_ranked_by_their_last_value_and_escaped() -> None:
    """The legend names each line with that value; text of any kind leaves the picture whole."""
    chart = drawn({"a & b": {1: 0.5, 2: 0.25}, "c": {1: 0.0, 2: 0.75}})
    legend = {text.text: float(text.get("y", "0")) for text in chart.iter(f"{_SVG}text") if text.text}

    assert legend["c 0.750"] < legend["a & b 0.250"]
    assert "A <title>" in texts(chart)


def test_nothing_but_zeros_is_drawn() -> None:
    """On the axis."""
    assert len(points(drawn({"lru": {1: 0.0, 2: 0.0}}))) == 1


def test_every_colour_of_a_light_page_has_one_on_a_dark_page() -> None:
    """Ground, text, grid and marks change with the page; lines keep theirs, which are readable on both."""
    text = line_chart("t", "x", "y", {"lru": {1: 0.1, 2: 0.2}, "optimum": {1: 0.3, 2: 0.4}}, dashed=("optimum",))
    classes = set(re.findall(r'class="([\w-]+)"', text))

    assert classes == {"chart", "chart-ground", "chart-grid", "chart-mark"}
    dark = text[text.index("prefers-color-scheme:dark") : text.index("</style>")]
    assert set(re.findall(r"\.([\w-]+)\{", dark)) == classes


def test_many_lines_and_long_names_fit() -> None:
    """The picture grows with its legend, and lines of one colour differ in their dashes."""
    names = [f"policy=thermocline, promotion=hotness, seed={seed}" for seed in range(40)]
    chart = drawn({name: {1: 0.1, 2: 0.1} for name in names})
    width, height = map(float, chart.get("viewBox", "").split()[2:])
    styles = {(line.get("stroke"), line.get("stroke-dasharray")) for line in chart.iter(f"{_SVG}polyline")}
    legend = [text for text in chart.iter(f"{_SVG}text") if (text.text or "").startswith("policy")]

    assert len(styles) == len(names)
    assert max(float(text.get("y", "0")) for text in legend) < height
    assert max(float(text.get("x", "")) + 6.5 * len(text.text or "") for text in legend) < width


def test_labels_of_near_places_do_not_overlap() -> None:
    """Of places that are close together only some are named."""
    chart = drawn({"lru": dict.fromkeys((100_000, 101_000, 102_000, 200_000), 0.5)})

    assert {"100,000", "200,000"} <= set(texts(chart))
    assert "101,000" not in texts(chart)


def test_notebooks_show_it_as_a_picture() -> None:
    """By the method that they look for."""
    chart = line_chart("t", "x", "y", {"lru": {1: 0.1, 2: 0.2}})

    assert chart._repr_svg_() == str(chart)
