"""By what a prefix is remembered: how many that come back after their eviction are known again, by head or by end.

Replays a trace of block ids through the scheduler's radix tree, evicting the leaf used longest ago, and looks up
every newly computed span among the names of all nodes there ever were: the digest through a node's first page,
and the digest through its last. Truth is a set of all prefixes ever seen, block by block.

``python -m bench.hotness_names --trace mooncake_conversation.jsonl [--blocks 600,2000,6000,20000]``
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from bench import results_file
from services.scheduler.core.cache.digests import extend
from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import (
    Node,
    PrefixTree,
    add_child,
    page_count,
    remove_leaf,
    root_of,
    split,
)

PAGE_SIZE = 16  # One page stands for a block of the trace.


def prompts(trace: Path) -> Iterator[bytes]:
    """The packed tokens of each request: every block becomes a page of its own."""
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            yield np.repeat(np.array(json.loads(line)["hash_ids"], dtype="<i4"), PAGE_SIZE).tobytes()


class Replay:
    """A tree of bounded size and the names of all that was ever in it."""

    def __init__(self, blocks: int) -> None:
        self.capacity = blocks
        self.tree = PrefixTree(page_size=PAGE_SIZE)
        self.used = 0
        self.heads: set[int] = set()
        self.ends: set[int] = set()
        self.prefixes: set[int] = set()
        self.leaves: list[tuple[int, int]] = []  # (last use, id), void where the node is used since or no leaf.
        self.counts = {"computed_spans": 0, "came_back": 0, "known_by_head": 0, "known_by_end": 0}

    def ask(self, tokens: bytes, now: int) -> None:
        """Reuse what there is of a prompt, compute the rest, evict."""
        tree = self.tree
        root = root_of(tree, "trace")
        path = match_prefix(tree, "trace", tokens, len(tokens))
        node, matched = root, 0
        for node, pages in path:
            matched += pages
            if pages < page_count(tree, node):
                lower, node = node, split(tree, node, pages)
                self.name(node, lower)
                self.note(lower, lower.last_use)
            node.last_use = now
        rest = tokens[matched * tree.page_token_bytes :]
        if rest:
            leaf = add_child(tree, node, rest)
            self.judge(leaf)
            self.name(leaf)
            node = leaf
            self.used += page_count(tree, leaf)
        node.last_use = now
        self.note(node, now)
        self.see(tokens)
        self.evict(now)

    def judge(self, node: Node) -> None:
        """Count a computed span, and whether each name tells that its prefix was here before."""
        self.counts["computed_spans"] += 1
        if node.digest in self.prefixes:
            self.counts["came_back"] += 1
            self.counts["known_by_head"] += node.digest in self.heads
            self.counts["known_by_end"] += node.end_digest in self.ends

    def name(self, *nodes: Node) -> None:
        for node in nodes:
            self.heads.add(node.digest)
            self.ends.add(node.end_digest)

    def see(self, tokens: bytes) -> None:
        digest = root_of(self.tree, "trace").digest
        for start in range(0, len(tokens), self.tree.page_token_bytes):
            digest = extend(digest, tokens[start : start + self.tree.page_token_bytes])
            self.prefixes.add(digest)

    def note(self, node: Node, now: int) -> None:
        if not node.children:
            heappush(self.leaves, (now, node.id))

    def evict(self, now: int) -> None:
        while self.used > self.capacity:
            last_use, node_id = heappop(self.leaves)
            node = self.tree.nodes.get(node_id)
            if node is None or node.children or node.last_use != last_use:
                continue
            self.used -= page_count(self.tree, node)
            parent = remove_leaf(self.tree, node)
            if parent is not None and parent.parent:
                self.note(parent, parent.last_use)


def main() -> None:
    parser = results_file.arguments(__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--blocks", default="600,2000,6000,20000")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for blocks in map(int, options.blocks.split(",")):
        replay = Replay(blocks)
        for now, tokens in enumerate(prompts(options.trace)):
            replay.ask(tokens, now)
        rows.append({"blocks": blocks} | replay.counts)
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    print(results_file.write("hotness_names", {"rows": rows}, seed=0))


if __name__ == "__main__":
    main()
