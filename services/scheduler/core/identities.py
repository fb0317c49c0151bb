"""Identities of a node's pages, computed when a transfer first needs them and kept in the node."""

from __future__ import annotations

from services.scheduler.core.prefix_tree import IDENTITY_BYTES, Node, PrefixTree
from shared.ids import chain_page, chain_root


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
    page = tree.page_token_bytes
    for current in reversed(missing):
        digests = []
        for offset in range(0, len(current.tokens), page):
            digest = chain_page(digest, current.tokens[offset : offset + page])
            digests.append(digest)
        current.identities = b"".join(digests)
    return node.identities
