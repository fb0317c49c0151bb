"""The views of the whole cell and of its workers, as lines, and figures of its requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from services.gateway.openai_schema.cell import CellReport, CellTenant
from services.gateway.openai_schema.explanation import Explanation
from services.gateway.views.cache_view import HIT_TIERS
from shared.sizes import size
from thermocline.cache.tables import shortened
from thermocline.client.figures import quantile
from thermocline.top.source import Snapshot
from thermocline.top.styles import OTHER, SOURCES, LogScale, bar, legend, milliseconds, percent

_SPARKS = "▁▂▃▄▅▆▇█"
_TENANTS = 8
_TIER_ORDER = {"device": 0, "host": 1, "hidden": 2}


def overview_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """Return the overview: figures, pools, hits by tier, tenants and the latest TTFTs."""
    cell = snapshot.cell
    if cell is None:
        return [Text("there is no data from the cell yet", style="dim")]
    requests = snapshot.requests
    return [
        Text(),
        _facts(running=cell.running, waiting=f"{cell.queued:,} of {cell.max_queued:,}", deferred=cell.deferred,
               workers=len(cell.workers)),
        _facts(nodes=f"{cell.nodes:,}", chunks=f"{cell.chunks:,}", pins=cell.pins, fetches=cell.fetches,
               saves=cell.saves),
        Text(),
        Text("memory, in pages: D device  H host  I hidden, cached  ▒ in use  · free", style="bold"),
        *_pools(cell, width),
        Text(),
        *_hits(cell, width),
        *_tenants(cell),
        Text(),
        Text("TTFT of the latest requests", style="bold"),
        _facts(p50=milliseconds(ttft_quantile_ms(requests, 0.5)), p95=milliseconds(ttft_quantile_ms(requests, 0.95)),
               cached=percent(cached_share(requests))),
        *_sparkline(requests, width),
        Text(),
        Text(f"scheduler {cell.scheduler_id}, epoch {cell.epoch}, input {cell.seq:,}", style="dim"),
    ]  # fmt: skip


def workers_lines(snapshot: Snapshot) -> tuple[list[Text], list[Text]]:
    """Return a heading, and a line for each worker."""
    cell = snapshot.cell
    if cell is None:
        return [], [Text("there is no data from the cell yet", style="dim")]
    if not cell.workers:
        return [], [Text("no worker has joined: nothing can be computed", style="red")]
    rows = []
    for worker in sorted(cell.workers, key=lambda worker: worker.worker_id):
        pool = next((pool for pool in cell.pools if pool.owner == worker.worker_id and pool.tier == "device"), None)
        used = percent((pool.total - pool.free) / pool.total) if pool is not None and pool.total else "-"
        row = Text(f"{shortened(worker.worker_id, 28):<30}{worker.running:>9}{worker.waiting:>9}{used:>9}  ")
        row.append("leaving" if worker.draining else "serving", style="yellow" if worker.draining else "green")
        rows.append(row)
    return [Text(f"{'worker':<30}{'running':>9}{'waiting':>9}{'memory':>9}  state", style="bold")], rows


def _facts(**facts: object) -> Text:
    line = Text()
    for name, value in facts.items():
        line.append(f"{name} ", style="dim").append(f"{value}   ", style="bold")
    return line


def _pools(cell: CellReport, width: int) -> list[Text]:
    lines = []
    for pool in sorted(cell.pools, key=lambda pool: (_TIER_ORDER.get(pool.tier, 9), pool.owner)):
        room = max(10, width - 50)
        line = Text(f"{shortened(pool.owner, 18):<19}{pool.tier:<7}")
        mark = SOURCES.get(pool.tier, OTHER)
        cached = bar([(pool.cached, mark)], pool.total, room)
        leased = round(room * (pool.cached + pool.leased) / pool.total) if pool.total else 0
        drawn = cached.plain.count(mark.letter)
        line.append_text(cached[:drawn]).append("▒" * (leased - drawn)).append("·" * (room - leased), "bright_black")
        used = percent((pool.total - pool.free) / pool.total if pool.total else None)
        line.append(f"{used:>6} of {pool.total:,}")
        lines.append(line)
    return lines or [Text("no pool: no worker and no storage has joined", style="dim")]


def _hits(cell: CellReport, width: int) -> list[Text]:
    found = {tier: cell.counters.get(f"hit_tokens_{tier}", 0) for tier in HIT_TIERS}
    heading = Text("hit tokens by tier, since the cell began", style="bold")
    if not any(found.values()):
        return [heading, Text("none yet", style="dim")]
    words = legend({f"{tier} {tokens:,}": SOURCES[tier] for tier, tokens in found.items() if tokens}, width)
    parts = [(float(tokens), SOURCES[tier]) for tier, tokens in found.items()]
    return [heading, bar(parts, sum(found.values()), max(10, width - 2)), *words]


def _tenants(cell: CellReport) -> list[Text]:
    """Return the file's tenants and all other callers, the busiest first; nothing without tenants."""
    if len(cell.tenants) < 2:
        return []

    def order(one: CellTenant) -> tuple[int, int, str]:
        return -one.running - one.waiting, -one.device_bytes - one.host_bytes - one.disk_bytes, one.tenant

    busiest = sorted(cell.tenants, key=order)
    heading = f"{'tenant':<24}{'running':>9}{'waiting':>9}{'device':>11}{'host':>11}{'disk':>11}"
    lines = [Text(), Text(heading, style="bold")]
    for one in busiest[:_TENANTS]:
        held = "".join(f"{size(nbytes):>11}" for nbytes in (one.device_bytes, one.host_bytes, one.disk_bytes))
        lines.append(Text(f"{shortened(one.tenant, 22):<24}{one.running:>9,}{one.waiting:>9,}{held}"))
    if len(busiest) > _TENANTS:
        lines.append(Text(f"and {len(busiest) - _TENANTS:,} more", style="dim"))
    return lines


def _sparkline(requests: list[Explanation], width: int) -> list[Text]:
    """Return TTFT on a log scale, the oldest request on the left, and the values of the lowest and highest block."""
    latest = [request.ttft_ms for request in requests if request.ttft_ms is not None][: width - 2]
    scale = LogScale.of(latest)
    if scale is None:
        return [Text("no recent request", style="dim")]
    top = len(_SPARKS) - 1
    marks = "".join(_SPARKS[round(top * scale.share(ms))] for ms in reversed(latest))
    ends = f"log scale: {_SPARKS[0]} up to {milliseconds(scale.low)}, {_SPARKS[top]} {milliseconds(scale.high)}"
    return [Text(marks, style="cyan"), Text(ends, style="dim")]


def cached_share(requests: Sequence[Explanation]) -> float | None:
    """Return the share of prompt tokens that were not computed, 0 to 1; None without reported tokens."""
    spans = [span for request in requests for span in request.prompt]
    told = sum(span.end - span.start for span in spans)
    cached = sum(span.end - span.start for span in spans if span.source != "computed")
    return cached / told if told else None


def ttft_quantile_ms(requests: Sequence[Explanation], fraction: float) -> float | None:
    """Return a nearest-rank quantile of TTFT in ms; None without any."""
    times = [request.ttft_ms for request in requests if request.ttft_ms is not None]
    return quantile(times, fraction) if times else None
