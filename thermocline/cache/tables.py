"""Text for a terminal of 100 columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 100


def shortened(text: str, width: int) -> str:
    """Return one line of at most ``width`` characters; … marks a cut, and control characters are escaped."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return plain if len(plain) <= width else plain[: max(0, width - 1)] + "…"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns as wide as their widest cell: the first aligned left, the others right."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (heads, *rows)
    ]
