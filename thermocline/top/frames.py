"""A snapshot as lines of a terminal of a given size. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.text import Text

from services.gateway.openai_schema.cache import CacheNode
from services.gateway.openai_schema.explanation import Explanation
from thermocline.cache.tables import shortened
from thermocline.top.overview import cached_share, overview_lines, ttft_quantile_ms, workers_lines
from thermocline.top.source import Link, Snapshot
from thermocline.top.styles import OTHER, PARTS, SOURCES, LogScale, bar, legend, milliseconds, percent, sum_of

VIEWS = ("overview", "tree", "requests", "workers")
HELP = "1-4 or Tab view   ↑↓ PgUp PgDn scroll   space hold   q quit"
_LINK_STYLES: dict[Link, str] = {"live": "green", "connecting": "yellow", "scheduler away": "bold yellow"}
_DEEPEST = 8


def frame(
    snapshot: Snapshot, view: str, *, width: int, height: int, first: int = 0, is_held: bool = False, address: str = ""
) -> list[Text]:
    """Return ``height`` lines of at most ``width`` columns; ``first`` is the first visible row of the view."""
    heads, rows = _VIEWS[view](snapshot, width)
    top = [_title(snapshot, view, address, is_held), *_told(snapshot), *heads]
    room = max(0, height - len(top) - 1)
    shown = rows[first : first + room]
    lines = [*top, *shown, *(Text() for _ in range(room - len(shown)))]
    more = len(rows) - first - len(shown)
    below = Text(HELP + (f"   {more:,} more below" if more > 0 else ""), style="dim")
    lines = [*lines[: height - 1], below]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def body_rows(snapshot: Snapshot, view: str, width: int) -> int:
    """Return the number of rows of a view that can be scrolled."""
    return len(_VIEWS[view](snapshot, width)[1])


def _title(snapshot: Snapshot, view: str, address: str, is_held: bool) -> Text:
    line = Text("Thermocline ", style="bold")
    for place, name in enumerate(VIEWS, 1):
        line.append(f" {place} {name} ", style="reverse bold" if name == view else "dim not bold")
    line.append("  ")
    line.append(f"● {snapshot.link}", style=_LINK_STYLES.get(snapshot.link, "bold red"))
    if is_held:
        line.append(" held", style="yellow")
    line.append(f"  {address}", style="dim not bold")
    return line


def _told(snapshot: Snapshot) -> list[Text]:
    if not snapshot.error:
        return []
    old = " (the data below are old)" if snapshot.cell else ""
    return [Text(shortened(snapshot.error, 300) + old, style="red")]


def _overview(snapshot: Snapshot, width: int) -> tuple[list[Text], list[Text]]:
    return [], overview_lines(snapshot, width)


def _workers(snapshot: Snapshot, width: int) -> tuple[list[Text], list[Text]]:
    return workers_lines(snapshot)


def _tree(snapshot: Snapshot, width: int) -> tuple[list[Text], list[Text]]:
    nodes = snapshot.nodes
    listed = {node.id for node in nodes}
    below: dict[int, list[CacheNode]] = {}
    tops: list[CacheNode] = []
    for node in nodes:
        # The parent may be on a page that was not asked for.
        if node.parent is not None and node.parent in listed:
            below.setdefault(node.parent, []).append(node)
        else:
            tops.append(node)
    hottest = max((node.hits for node in nodes), default=0)
    waiting = [(node, 0) for node in sorted(tops, key=lambda node: (node.namespace, node.id), reverse=True)]
    rows = []
    namespace = ""
    while waiting:  # By hand, since a conversation may be deeper than Python's stack.
        node, level = waiting.pop()
        if level == 0 and node.namespace != namespace:
            namespace = node.namespace
            rows.append(Text(f"namespace {namespace}", style="dim"))
        rows.append(_node_row(node, level, hottest, width))
        # The hottest child comes first.
        waiting += [(child, level + 1) for child in sorted(below.get(node.id, []), key=lambda child: child.hits)]
    more = "; only the oldest are shown" if snapshot.has_more_nodes else ""
    head = Text(f"{len(nodes):,} nodes{more}", style="dim")
    return [head, Text(f"{'node':<22}{'depth':>7}{'tokens':>7}{'hits':>6}  d h s  begins with", style="bold")], rows


def _node_row(node: CacheNode, level: int, hottest: int, width: int) -> Text:
    place = f"{'  ' * min(level, _DEEPEST)}{'' if level <= _DEEPEST else '…'}{node.id}"
    warmth = "red" if node.hits * 2 > hottest else "yellow" if node.hits else "blue"
    row = Text(f"{place:<22}{node.depth:>7}{node.tokens:>7}")
    row.append(f"{node.hits:>6}", style=warmth)
    row.append("  ")
    for pools, letter, style in ((node.device, "d", "device"), (node.host, "h", "host"), (node.disk, "s", "disk")):
        row.append(f"{letter} " if sum_of(pools) else "· ", style=SOURCES[style].colour if sum_of(pools) else "dim")
    pins = f"[pins: {', '.join(node.pins)}] " if node.pins else ""
    text = node.head_text if node.head_text is not None else " ".join(map(str, node.head))
    row.append(" " + shortened(pins + text, max(8, width - 50)))
    return row


def _requests(snapshot: Snapshot, width: int) -> tuple[list[Text], list[Text]]:
    requests = snapshot.requests
    scale = LogScale.of([request.ttft_ms or 0.0 for request in requests])
    room = max(10, width - 35)
    head = Text(
        f"{len(requests):,} requests: TTFT p50 {milliseconds(ttft_quantile_ms(requests, 0.5))}, "
        f"{percent(cached_share(requests))} cached; bars: TTFT, log scale, by part",
        style="dim",
    )
    names = {part.name for request in requests for part in request.parts if part.ms > 0}
    marks = legend({name: mark for name, mark in PARTS.items() if name in names}, width, "parts: ")
    columns = Text(f"{'came':<9}{'TTFT':>9}{'prompt':>8}{'cached':>7}  ", style="bold")
    if scale is not None:
        columns.append_text(scale.axis(room))
    return [head, *marks, columns], [_request_row(request, scale, room) for request in requests]


def _request_row(request: Explanation, scale: LogScale | None, room: int) -> Text:
    came = time.strftime("%H:%M:%S", time.localtime(request.created_ms / 1000))
    row = Text(f"{came:<9}{milliseconds(request.ttft_ms):>9}{request.prompt_tokens:>8,}")
    row.append(f"{percent(cached_share([request])):>7}  ")
    if request.state != "finished":
        row.append(f"{request.error_code or request.state} ", style="red" if request.state == "failed" else "dim")
    if request.parts and scale is not None:
        parts = [(part.ms, PARTS.get(part.name, OTHER)) for part in request.parts]
        length = max(1, round(room * scale.share(request.ttft_ms or 0.0)))
        row.append_text(bar(parts, sum(ms for ms, _ in parts), length))
    return row


_VIEWS: dict[str, Callable[[Snapshot, int], tuple[Sequence[Text], list[Text]]]] = {
    "overview": _overview,
    "tree": _tree,
    "requests": _requests,
    "workers": _workers,
}
