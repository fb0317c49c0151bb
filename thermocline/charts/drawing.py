"""Parts of all charts: background, colours on light and dark pages, and text."""

from __future__ import annotations

import math
from html import escape

COLOURS = (
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
"""Colours of lines and bars, in turn; all are readable on white and on black."""

# Attributes hold the colours of a light page, for viewers without style sheets.
_DARK = (
    "<style>@media (prefers-color-scheme:dark){.chart{fill:#ddd}.chart-ground{fill:#16181d}"
    ".chart-grid{stroke:#3a3f47}.chart-mark{stroke:#fff}}</style>"
)


class Svg(str):
    """SVG text, which notebooks show as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def opening(width: float, height: float, title: str) -> list[str]:
    """Return the first elements of a picture of this size in pixels: its background and title."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {height:g}" '
        'font-family="sans-serif" font-size="12" fill="#222" role="img">',
        f"<title>{escape(title)}</title>",
        _DARK,
        f'<rect class="chart-ground" width="{width:g}" height="{height:g}" fill="#fff"/>',
        text(16, 24, title, size=15),
    ]


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    """Return a text element; ``anchor`` is the part of the text at ``x``: start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def nice_top(most: float) -> float:
    """Return the least of 1, 2, 2.5, 4 and 5 times a power of ten that is not below ``most``."""
    scale = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    return next(scale * factor for factor in (1, 2, 2.5, 4, 5, 10) if scale * factor >= most)
