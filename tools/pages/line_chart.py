"""A line chart as SVG text: a logarithmic horizontal axis, a vertical one from 0, a ranked legend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 44, 52
_COLOURS = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#9498a0",
)
_LEGEND_STEP = 17


def line_chart(
    title: str,
    x_title: str,
    y_title: str,
    lines: Mapping[str, Mapping[float, float]],
    *,
    emphasised: Sequence[str] = (),
    dashed: Sequence[str] = (),
) -> str:
    """Draw lines in their order: values by places that are positive, rising, the same for all, and two at least."""
    xs = list(next(iter(lines.values())))
    top = _nice_top(max(max(values.values()) for values in lines.values()))
    low, high = math.log(xs[0]), math.log(xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)
        return _LEFT + across, _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 24, title, size=15),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_title, anchor="middle"),
        f'<text transform="translate(16 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>',
    ]
    for tick in range(6):
        value = top * tick / 5
        _, y = place(xs[0], value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    for x in xs:
        across, y = place(x, 0)
        parts.append(_text(across, y + 18, f"{x:,.0f}", anchor="middle"))
    ranked = sorted(lines, key=lambda name: -lines[name][xs[-1]])
    for number, (name, values) in enumerate(lines.items()):
        colour = "#000" if name in dashed else _COLOURS[number % len(_COLOURS)]
        width = 3.5 if name in emphasised else 1.6
        dash = ' stroke-dasharray="6 4"' if name in dashed or number >= len(_COLOURS) else ""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in values.items()))
        style = f'stroke="{colour}" stroke-width="{width}"{dash}'
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        y = _TOP + 10 + ranked.index(name) * _LEGEND_STEP
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 14} {y}h26" {style}/>')
        parts.append(_text(_WIDTH - _RIGHT + 46, y + 4, f"{name} {values[xs[-1]]:.3f}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _nice_top(most: float) -> float:
    """The least of 1, 2, 2.5 and 5 times a power of ten that is not below ``most``."""
    scale = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    return next(scale * factor for factor in (1, 2, 2.5, 4, 5, 10) if scale * factor >= most)
