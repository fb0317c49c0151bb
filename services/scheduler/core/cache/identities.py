"""Identities of a node's pages, computed when a transfer first needs them and kept in the node."""

from __future__ import annotations

from services.scheduler.core.cache.prefix_tree import IDENTITY_BYTES, Node, PrefixTree
from shared.chunks import chunk_pages
from shared.ids import chain_pages, chain_root


def page_identities(tree: PrefixTree, node: Node) -> bytes:
    """16 bytes for each page of ``node``: the chain digest of its namespace and every token up to its end.

    Fills in ``identities`` of the node and of all its ancestors that lack them.
    """
    missing: list[Node] = []
    above = node
    while above.parent and not above.identities:
        missing.append(above)
        above = tree.nodes[above.parent]
    digest = above.identities[-IDENTITY_BYTES:] if above.parent else chain_root(above.namespace)
    for current in reversed(missing):
        current.identities = chain_pages(digest, current.tokens, tree.page_token_bytes)
        digest = current.identities[-IDENTITY_BYTES:]
    return node.identities


def chunks_ending_in(tree: PrefixTree, node: Node) -> list[bytes]:
    """Names of the chunks that end in a node whose identities are known. Does not mutate."""
    per_chunk = chunk_pages(tree.page_size)
    first = node.depth // tree.page_size
    pages = len(node.identities) // IDENTITY_BYTES
    ends = range(-(first + 1) % per_chunk, pages, per_chunk)
    return [node.identities[at * IDENTITY_BYTES : (at + 1) * IDENTITY_BYTES] for at in ends]
