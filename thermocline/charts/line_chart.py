"""A line chart as SVG text: a ranked legend, a vertical axis from 0, and colours that follow a dark page.

The horizontal axis is logarithmic where all places are positive, else linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from thermocline.charts.drawing import COLOURS, Svg, nice_top, opening, text

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 44, 52
_DASHES = ("", "6 4", "2 3", "9 3 2 3")
_LEGEND_STEP, _LEGEND_TEXT, _LETTER = 17, 46, 7
_TICK_ROOM = 44  # Least distance between the middles of two labels of the horizontal axis.


def line_chart(
    title: str,
    x_title: str,
    y_title: str,
    lines: Mapping[str, Mapping[float, float]],
    *,
    emphasised: Sequence[str] = (),
    dashed: Sequence[str] = (),
) -> Svg:
    """Draw lines in their order. Each maps x to y >= 0; all have the same x, ascending, at least two."""
    xs = list(next(iter(lines.values())))
    top = nice_top(max(max(values.values()) for values in lines.values()))
    labels = {name: f"{name} {_value(values[xs[-1]])}" for name, values in lines.items()}
    right = max(_RIGHT, _LEGEND_TEXT + _LETTER * max(map(len, labels.values())))
    edge, width = _WIDTH - _RIGHT, _WIDTH - _RIGHT + right
    height = max(_HEIGHT, _TOP + _BOTTOM + _LEGEND_STEP * len(lines))
    scale = _scale(xs)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + scale(x) * (edge - _LEFT), height - _BOTTOM - y / top * (height - _TOP - _BOTTOM)

    parts = [
        *opening(width, height, title),
        text((_LEFT + edge) / 2, height - 12, x_title, anchor="middle"),
        f'<text transform="translate(16 {height / 2}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>',
    ]
    for tick in range(6):
        value = top * tick / 5
        _, y = place(xs[0], value)
        parts.append(f'<path class="chart-grid" d="M{_LEFT} {y:.1f}H{edge}" stroke="#ddd"/>')
        parts.append(text(_LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    parts += _places(xs, place)
    ranked = sorted(lines, key=lambda name: -lines[name][xs[-1]])
    for number, (name, values) in enumerate(lines.items()):
        style = _style(number, is_mark=name in dashed, is_emphasised=name in emphasised)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in values.items()))
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        y = _TOP + 10 + ranked.index(name) * _LEGEND_STEP
        parts.append(f'<path d="M{edge + 14} {y}h26" {style}/>')
        parts.append(text(edge + _LEGEND_TEXT, y + 4, labels[name]))
    return Svg("\n".join([*parts, "</svg>"]) + "\n")


def _scale(xs: Sequence[float]) -> Callable[[float], float]:
    """Return a function from x to its relative position, 0 to 1."""
    if xs[0] <= 0:
        return lambda x: (x - xs[0]) / (xs[-1] - xs[0])
    low, high = math.log(xs[0]), math.log(xs[-1])
    return lambda x: (math.log(x) - low) / (high - low)


def _places(xs: Sequence[float], place: Callable[[float, float], tuple[float, float]]) -> list[str]:
    """Return labels for the horizontal axis, without those that would overlap."""
    parts: list[str] = []
    latest = -math.inf
    for x in xs:
        across, y = place(x, 0)
        if across - latest >= _TICK_ROOM:
            latest = across
            parts.append(text(across, y + 18, f"{x:,.0f}" if float(x).is_integer() else f"{x:g}", anchor="middle"))
    return parts


def _style(number: int, *, is_mark: bool, is_emphasised: bool) -> str:
    """Return the attributes of a line: colours in turn, then the same ones with other dashes."""
    dash = _DASHES[1] if is_mark else _DASHES[number // len(COLOURS) % len(_DASHES)]
    kind = 'class="chart-mark" stroke="#000"' if is_mark else f'stroke="{COLOURS[number % len(COLOURS)]}"'
    return f'{kind} stroke-width="{3.5 if is_emphasised else 1.6}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _value(value: float) -> str:
    return f"{value:.3f}" if value < 1000 else f"{value:,.0f}"
