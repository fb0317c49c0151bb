"""The radix tree as an indented listing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.gateway.openai_schema.cache import CacheNode
from thermocline.cache.tables import WIDTH, shortened

DEEPEST = 10
"""Levels that are indented; deeper nodes are indented like the last level, and marked."""
HEAD = f"{'node':<24}{'depth':>8}{'tokens':>8}{'hits':>7}{'device':>8}{'host':>7}{'disk':>6}{'hidden':>7}  first tokens"


def tree_lines(nodes: Sequence[CacheNode]) -> list[str]:
    """Return a heading per namespace, then its nodes: each below its parent, siblings in the order of ``nodes``."""
    listed = {node.id for node in nodes}
    below: dict[int, list[CacheNode]] = {}
    tops: dict[str, list[CacheNode]] = {}
    sums: dict[str, tuple[int, int]] = {}
    for node in nodes:
        count, tokens = sums.get(node.namespace, (0, 0))
        sums[node.namespace] = count + 1, tokens + node.tokens
        # The parent of a node may be on a page that was not asked for.
        if node.parent in listed and node.parent is not None:
            below.setdefault(node.parent, []).append(node)
        else:
            tops.setdefault(node.namespace, []).append(node)
    lines = []
    for namespace, roots in tops.items():
        count, tokens = sums[namespace]
        lines += [f"namespace {namespace}: {count:,} nodes, {tokens:,} tokens", HEAD]
        lines += _rows(roots, below)
    return lines


def _rows(roots: Iterable[CacheNode], below: dict[int, list[CacheNode]]) -> list[str]:
    # With a stack of its own, since a conversation may be deeper than Python's.
    waiting = [(node, 0) for node in reversed(list(roots))]
    lines = []
    while waiting:
        node, level = waiting.pop()
        lines.append(_row(node, level))
        waiting += [(child, level + 1) for child in reversed(below.get(node.id, []))]
    return lines


def _row(node: CacheNode, level: int) -> str:
    place = f"{'  ' * min(level, DEEPEST)}{'' if level <= DEEPEST else '…'}{node.id}"
    held = ((node.device, 8), (node.host, 7), (node.disk, 6), (node.hidden, 7))
    counts = "".join(f"{_count(pools):>{width}}" for pools, width in held)
    pins = f"[pins: {', '.join(node.pins)}] " if node.pins else ""
    head = node.head_text if node.head_text is not None else " ".join(map(str, node.head))
    row = f"{shortened(place, 23):<24}{node.depth:>8}{node.tokens:>8}{node.hits:>7}{counts}  "
    return row + shortened(pins + head, WIDTH - len(row))


def _count(held: dict[str, int]) -> str:
    """Return the pages or chunks in all pools of a tier; a node may be in several."""
    return str(sum(held.values())) if held else "-"
