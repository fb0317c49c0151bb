"""Changes of the radix tree since the last comparison, as events.

Only one namespace is announced: that of the model without adapter, salt or loss. KV of callers with a salt stays
unknown outside of the cell, and so do their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.prefix_tree import IDENTITY_BYTES, Node
from services.scheduler.core.cache.residency import copies_of, devices_of
from services.scheduler.core.state import CellState
from services.scheduler.kv_events.wire import DEVICE, HOST, AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium
from shared.ids import namespace_digest, split_digests
from shared.messages.base import unpack_int32

MOST_BLOCKS = 512
"""Most blocks of one event: a longer run takes several."""

MEDIA: tuple[Medium, ...] = (DEVICE, HOST)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node as it was announced. ``above`` is the identity of the page before its first, b"" below the root."""

    depth: int
    end: int
    media: tuple[Medium, ...]
    above: bytes
    identities: bytes


@dataclass(slots=True)
class _Moves:
    """Blocks that came to a medium and left it, by that medium."""

    came: dict[Medium, dict[bytes, None]] = field(default_factory=lambda: {medium: {} for medium in MEDIA})
    went: dict[Medium, dict[bytes, None]] = field(default_factory=lambda: {medium: {} for medium in MEDIA})


class Holdings:
    """Comparison of the tree with what was announced. O(nodes of the namespace) each time; keeps 16 bytes a page."""

    def __init__(self) -> None:
        """Begin with nothing announced, so that the first comparison announces everything."""
        self._seen: dict[int, _Seen] = {}
        self._is_told = False

    def forget(self) -> None:
        """Announce everything again at the next comparison, behind an event that clears what was announced."""
        self._seen.clear()
        self._is_told = False

    def changes(self, state: CellState) -> list[Event]:
        """Return the events since the last call: removed blocks first, then new ones, parents before their children."""
        events: list[Event] = [] if self._is_told else [AllBlocksCleared()]
        self._is_told = True
        now, fresh, moves = self._look(state)
        for medium in MEDIA:
            gone = [block for block in moves.went[medium] if block not in moves.came[medium]]
            for start in range(0, len(gone), MOST_BLOCKS):
                events.append(BlockRemoved(block_hashes=gone[start : start + MOST_BLOCKS], medium=medium))
        for node_id in fresh:
            for medium in now[node_id].media:
                events += _stored(state, state.tree.nodes[node_id], now[node_id], medium, moves.went[medium])
        self._seen = now
        return events

    def _look(self, state: CellState) -> tuple[dict[int, _Seen], list[int], _Moves]:
        """Return the nodes as they are, the ids of those that differ, top down, and the blocks that moved."""
        now: dict[int, _Seen] = {}
        fresh: list[int] = []
        moves = _Moves()
        for node in _nodes(state):
            before = self._seen.get(node.id)
            media = _media_of(state, node)
            if before is not None and (before.depth, before.end, before.media) == (node.depth, node.end, media):
                now[node.id] = before
                continue
            if not media:
                continue
            identities = page_identities(state.tree, node)
            above = state.tree.nodes[node.parent].identities[-IDENTITY_BYTES:] if node.depth else b""
            now[node.id] = _Seen(node.depth, node.end, media, above, identities)
            fresh.append(node.id)
            for medium in media:
                moves.came[medium] |= dict.fromkeys(split_digests(identities))
        for node_id, before in self._seen.items():
            if now.get(node_id) is not before:
                for medium in before.media:
                    moves.went[medium] |= dict.fromkeys(split_digests(before.identities))
        return now, fresh, moves


def _nodes(state: CellState) -> Iterator[Node]:
    """Yield every node of the namespace but its root, parents first."""
    tree = state.tree
    root = tree.roots.get(namespace_digest(state.model)) if state.model else None
    waiting = list(tree.nodes[root].child_ids) if root is not None else []
    while waiting:
        node = tree.nodes[waiting.pop()]
        yield node
        waiting += node.child_ids


def _media_of(state: CellState, node: Node) -> tuple[Medium, ...]:
    is_copied = any(name not in node.quarantined for name in copies_of(state, node))
    return ((DEVICE,) if devices_of(state, node) else ()) + ((HOST,) if is_copied else ())


def _stored(state: CellState, node: Node, seen: _Seen, medium: Medium, known: dict[bytes, None]) -> Iterator[Event]:
    """Yield the runs of a node's blocks that were not announced for this medium before."""
    blocks, size = split_digests(seen.identities), state.tree.page_size
    start = 0
    while start < len(blocks):
        if blocks[start] in known:
            start += 1
            continue
        stop = start + 1
        while stop < len(blocks) and stop - start < MOST_BLOCKS and blocks[stop] not in known:
            stop += 1
        yield BlockStored(
            block_hashes=blocks[start:stop],
            parent_block_hash=blocks[start - 1] if start else seen.above or None,
            token_ids=list(unpack_int32(node.tokens_between(start * size, stop * size))),
            block_size=size,
            medium=medium,
        )
        start = stop
