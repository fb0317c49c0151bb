"""The cell's status as operators read it. Pure."""

from __future__ import annotations

import msgspec

from services.gateway.openai_schema.cell import CellReport
from shared.messages.status import CellStatus


def cell_view(status: CellStatus, age_s: float = 0.0) -> CellReport:
    """``status``, which this gateway heard ``age_s`` ago."""
    report = msgspec.convert(status, CellReport, from_attributes=True)
    return msgspec.structs.replace(report, age_ms=round(max(0.0, age_s) * 1000, 1))
