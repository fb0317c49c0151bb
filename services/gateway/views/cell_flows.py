"""Flows of tokens between tiers, and the cache's savings, from the scheduler's counters. Pure."""

from __future__ import annotations

from services.gateway.openai_schema.cell import CellFlow, CellSavings
from services.gateway.views.cache_view import HIT_TIERS
from shared.chunks import chunk_tokens
from shared.messages.status import CellStatus


def flows_view(status: CellStatus) -> list[CellFlow]:
    """Return the tokens of KV moved between each pair of places since the cell started; 0 where none has moved."""
    page, chunk = status.page_size, chunk_tokens(status.page_size)

    def counted(*names: str) -> int:
        return sum(status.counters.get(name, 0) for name in names)

    elsewhere = counted("fetched_tokens_remote", "fetched_tokens_lent")
    tokens = {
        ("computed", "device"): counted("prefill_tokens_planned"),
        ("device", "host"): page * counted("backed_up_pages"),
        ("host", "device"): counted("loaded_tokens") + page * counted("promoted_pages"),
        ("host", "disk"): chunk * counted("saved_chunks", "saved_hidden_chunks"),
        ("disk", "host"): counted("fetched_tokens", "hidden_fetched_tokens") - elsewhere,
        ("remote", "host"): counted("fetched_tokens_remote"),
        ("lent", "host"): counted("fetched_tokens_lent"),
    }
    return [CellFlow(source=source, target=target, tokens=moved) for (source, target), moved in tokens.items()]


def savings_view(status: CellStatus) -> CellSavings:
    """Return the tokens reused since the cell started, and the time that this saved."""
    counters = status.counters
    return CellSavings(
        tokens=sum(counters.get(f"hit_tokens_{tier}", 0) for tier in HIT_TIERS),
        computed_tokens=counters.get("prefill_tokens_planned", 0),
        prefill_seconds=counters.get("prefill_saved_us", 0) / 1e6,
        load_seconds=counters.get("load_us", 0) / 1e6,
    )
