"""A chart of horizontal bars as SVG text: groups of named bars, intervals, and colours that follow a dark page.

The axis is logarithmic on request; then a bar's length says nothing, and only its end does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thermocline.charts.drawing import COLOURS, Svg, nice_top, opening, text

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 210, 110, 44, 46
_BAR, _BETWEEN, _GROUP = 18, 4, 14
_LETTER = 6.6


@dataclass(frozen=True, slots=True)
class Bar:
    """A value above 0, its interval where there is one, and what is written behind it.

    Bars of one ``kind`` have one colour; "" takes the bar's name.
    """

    value: float
    label: str
    low: float | None = None
    high: float | None = None
    kind: str = ""


def bar_chart(
    title: str,
    axis: str,
    groups: Mapping[str, Mapping[str, Bar]],
    *,
    is_log: bool = False,
    mark: float | None = None,
    emphasised: Sequence[str] = (),
) -> Svg:
    """Draw groups of bars from top to bottom, which begin at ``mark``, a line across all, where there is one.

    A group with the title "" has none. Raises ValueError without a bar, and for values that are not above 0.
    """
    bars = [bar for group in groups.values() for bar in group.values()]
    if not bars or min(bar.value for bar in bars) <= 0:
        raise ValueError("a bar chart needs bars above 0")
    names = [name for group in groups.values() for name in group]
    kinds = list(dict.fromkeys(bar.kind or name for group in groups.values() for name, bar in group.items()))
    left = max(_LEFT, 24 + _LETTER * max(map(len, [*names, *groups])))
    low, high = _bounds(bars, mark, is_log=is_log)
    edge = left + _WIDTH - _LEFT - _RIGHT

    def place(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if is_log else value / high
        return left + min(1.0, max(0.0, share)) * (edge - left)

    parts, y = [], float(_TOP)
    for heading, group in groups.items():
        if heading:
            parts.append(text(12, y + 13, heading, size=13))
            y += _BAR + _BETWEEN
        for name, bar in group.items():
            colour = COLOURS[kinds.index(bar.kind or name) % len(COLOURS)]
            ends = sorted((left if mark is None else place(mark), place(bar.value)))
            parts.append(text(left - 8, y + 13, name, anchor="end"))
            parts.append(_bar(bar, colour, y, ends, is_strong=not emphasised or name in emphasised))
            if bar.low is not None and bar.high is not None:
                middle = y + _BAR / 2
                parts.append(
                    f'<path class="chart-mark" d="M{place(bar.low):.1f} {middle}H{place(bar.high):.1f}" stroke="#000"/>'
                )
            furthest = place(max(bar.value, bar.high or 0, mark or 0))
            parts.append(text(furthest + 6, y + 13, bar.label))
            y += _BAR + _BETWEEN
        y += _GROUP
    height = y + _BOTTOM - _GROUP
    ground = y - _GROUP
    grid = []
    for value in _ticks(low, high, is_log=is_log):
        x = place(value)
        grid.append(f'<path class="chart-grid" d="M{x:.1f} {_TOP - 6}V{ground:.1f}" stroke="#ddd"/>')
        grid.append(text(x, ground + 16, f"{value:,g}", anchor="middle"))
    if mark is not None:
        x = place(mark)
        grid.append(
            f'<path class="chart-mark" d="M{x:.1f} {_TOP - 6}V{ground:.1f}" stroke="#000" stroke-dasharray="4 3"/>'
        )
    caption = text((left + edge) / 2, height - 10, axis, anchor="middle")
    head = opening(math.ceil(edge + _RIGHT), math.ceil(height), title)
    return Svg("\n".join([*head, *grid, *parts, caption, "</svg>"]) + "\n")


def _bar(bar: Bar, colour: str, y: float, ends: Sequence[float], *, is_strong: bool) -> str:
    opacity = "" if is_strong else ' opacity="0.45"'
    return (
        f'<rect x="{ends[0]:.1f}" y="{y}" width="{max(1.0, ends[1] - ends[0]):.1f}" height="{_BAR}" fill="{colour}"'
        f"{opacity}><title>{bar.value:g}</title></rect>"
    )


def _bounds(bars: Sequence[Bar], mark: float | None, *, is_log: bool) -> tuple[float, float]:
    """Return both ends of the axis: steps of a logarithmic scale around all values, else 0 and a round number."""
    values = [value for bar in bars for value in (bar.value, bar.low, bar.high) if value] + ([mark] if mark else [])
    if not is_log:
        return 0.0, nice_top(max(values))
    steps = _steps(min(values) / 10, max(values) * 10)
    low = max(step for step in steps if step < min(values))
    return low, min(step for step in steps if step >= max(values))


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    if not is_log:
        return [high * tick / 5 for tick in range(6)]
    return [step for step in _steps(low, high) if low <= step <= high]


def _steps(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten from below ``low`` to above ``high``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
