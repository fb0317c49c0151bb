"""Views of the bytes of a page's part, in the part and in whole pages (``shared.messages.pools.PartSpan``).

Planes of pages are ``[..., planes, half_bytes]``, uint8, of numpy or of torch; results are views of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shared.messages.pools import PartSpan


def whole_bytes(planes: Any, span: PartSpan) -> Any:
    """Return the bytes that ``span`` names in ``planes`` of whole pages: ``[..., span.planes, rows, nbytes]``."""
    return _bytes(planes, span, span.first, span.offset)


def part_bytes(planes: Any, span: PartSpan) -> Any:
    """Return the bytes that ``span`` names in ``planes`` of the part: ``[..., span.planes, rows, nbytes]``."""
    return _bytes(planes, span, span.own_first, span.own_offset)


def of_plane(spans: Iterable[PartSpan], plane: int, at: int) -> list[PartSpan]:
    """Return the spans of one plane of whole pages, as spans of pages in which it is plane ``at``."""
    return [
        PartSpan(
            first=at,
            own_first=span.own_first + plane - span.first,
            planes=1,
            offset=span.offset,
            own_offset=span.own_offset,
            nbytes=span.nbytes,
            rows=span.rows,
        )
        for span in spans
        if span.first <= plane < span.first + span.planes
    ]


def _bytes(planes: Any, span: PartSpan, first: int, offset: int) -> Any:
    some = planes[..., first : first + span.planes, :]
    rows = some.reshape(*some.shape[:-1], span.rows, some.shape[-1] // span.rows)
    return rows[..., offset : offset + span.nbytes]
