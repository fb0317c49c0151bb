"""Prompts by reference: the place in the tree of the tokens that a digest of whole blocks stands for.

A gateway names the front of a prompt by a digest (:mod:`shared.prompt_chain`). The table has a node for it, noted when
the request that computed those tokens gave its pages to the tree. The tokens that a node's id stands for never change
while it lives, so an entry is right or its node is gone, and splits, evictions and flushes need no updates here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.prefix_tree import namespace_of, tokens_to
from services.scheduler.core.require import require
from shared import prompt_chain
from shared.ids import DIGEST_BYTES, TOKEN_BYTES
from shared.prompt_chain import block_digests

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node, PrefixTree
    from shared.messages.requests import PromptBase, SubmitRequest

MOST_BLOCKS = 65_536
"""Blocks in the table at most: 67 million tokens, in some 16 MB of memory and 2 MB of a snapshot."""


class HeldBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The prefix that a digest stands for: the first ``tokens`` of the tokens down to the end of ``node``."""

    node: int
    tokens: int


HeldBlocks = dict[bytes, HeldBlock]
"""Blocks by digest, the least recently used first. Their nodes may be gone."""


class PromptBlocks(msgspec.Struct):
    """Digests of the whole blocks of a prompt, 16 bytes each, without the first ``above`` blocks.

    A request that came with a base has them from that base on: the first digest is the base's.
    """

    digests: bytes = b""
    above: int = 0
    noted: int = 0  # Blocks noted in the table by this request so far.


def blocks_behind(message: SubmitRequest, base: PromptBase) -> PromptBlocks:
    """Return the digests of a request that came with a base: the base's own, and those of the tail."""
    digests = base.digest + block_digests(message.namespace, message.tail, above=base.digest)
    return PromptBlocks(digests, above=base.tokens // prompt_chain.BLOCK_TOKENS - 1)


def find_base(blocks: HeldBlocks, tree: PrefixTree, namespace: str, base: PromptBase) -> Node | None:
    """Return the node whose way from the root begins with the base; None where the tree lacks it. Changes nothing."""
    held = blocks.get(base.digest)
    if held is None or held.tokens != base.tokens:
        return None
    node = tree.nodes.get(held.node)
    return node if node is not None and namespace_of(tree, node) == namespace else None


def prompt_behind(tree: PrefixTree, node: Node, base_tokens: int, tail: bytes) -> bytes:
    """Return the first ``base_tokens`` of the tokens down to a node's end, and ``tail`` behind them, packed int32."""
    return b"".join((memoryview(tokens_to(tree, node))[: base_tokens * TOKEN_BYTES], tail))


def note_blocks(blocks: HeldBlocks, tree: PrefixTree, digests: bytes, above: int, node: Node, end_tokens: int) -> int:
    """Note where the tree has these blocks; ``above`` blocks come before the first.

    The first ``end_tokens`` of the prompt lie on the way to ``node``. Returns how many blocks end within them.
    """
    count = min(len(digests) // DIGEST_BYTES, end_tokens // prompt_chain.BLOCK_TOKENS - above)
    if count <= 0:
        return 0
    first_end = (above + 1) * prompt_chain.BLOCK_TOKENS
    way = []
    while node.parent and node.end >= first_end:
        way.append(node)
        node = tree.nodes[node.parent]
    holder = way.pop()
    for number in range(count):
        tokens = first_end + number * prompt_chain.BLOCK_TOKENS
        while holder.end < tokens:
            holder = way.pop()
        digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        blocks.pop(digest, None)
        blocks[digest] = HeldBlock(holder.id, tokens)
    while len(blocks) > MOST_BLOCKS:
        del blocks[next(iter(blocks))]
    return count


def check_blocks(blocks: HeldBlocks, tree: PrefixTree) -> None:
    """Raise InvariantViolated where an entry whose node lives stands for other tokens. For tests; slow."""
    require(len(blocks) <= MOST_BLOCKS, "more blocks are remembered than may be")
    chains: dict[int, bytes] = {}
    for digest, held in blocks.items():
        node = tree.nodes.get(held.node)
        if node is None:
            continue
        name = f"the block of {held.tokens} tokens in node {node.id}"
        require(0 < held.tokens <= node.end, f"{name} is not on the way to it")
        if node.id not in chains:
            chains[node.id] = block_digests(namespace_of(tree, node), prompt_behind(tree, node, node.end, b""))
        number = held.tokens // prompt_chain.BLOCK_TOKENS
        named = chains[node.id][(number - 1) * DIGEST_BYTES : number * DIGEST_BYTES]
        require(digest == named, f"{name} has another digest")
