"""Identities of pages and names of chunks, computed when they are first needed.

Those of a node's pages are kept in the node; those of a request's tokens that the tree does not have are computed one
after another, as far as they are needed.
"""

from __future__ import annotations

from operator import attrgetter, itemgetter

from services.scheduler.core.cache.prefix_tree import IDENTITY_BYTES, Node, Path, PrefixTree
from shared.chunks import chunk_pages
from shared.ids import TOKEN_BYTES, chain_pages, chain_root

_NODES, _IDENTITIES = itemgetter(0), attrgetter("rare.identities")


class ChunkNames:
    """Identities of a sequence's pages: taken from the tree where it has them, otherwise computed.

    Each further chunk costs the hashing of its own pages: a search that stops at the first missing chunk pays in
    proportion to the hit.
    """

    def __init__(self, tree: PrefixTree, namespace: str, tokens: bytes, path: Path, max_pages: int) -> None:
        """Take the identities of pages in ``path`` from ``tree``, computing those that its nodes lack.

        ``tokens`` is the whole sequence, packed int32; ``path`` has its first pages, and is empty where the tree has
        none. Only whole chunks of the first ``max_pages`` pages have a name here.
        """
        self.pages_each = chunk_pages(tree.page_size)
        self.count = max_pages // self.pages_each
        self._page_token_bytes = tree.page_token_bytes
        self._tokens = tokens
        self._root = chain_root(namespace)
        self._known = bytearray()
        if path:
            deepest, pages = path[-1]
            page_identities(tree, deepest)  # Which fills in those of all nodes above.
            self._known += b"".join(map(_IDENTITIES, map(_NODES, path)))
            del self._known[(deepest.depth // tree.page_size + pages) * IDENTITY_BYTES :]

    def __getitem__(self, index: int) -> bytes:
        """Return the name of a chunk (16 bytes): the identity of its last page."""
        end = (index + 1) * self.pages_each
        return self.identities(end - 1, end)

    def identities(self, start: int, end: int) -> bytes:
        """Return the identities of pages [start, end), 16 bytes each."""
        known = len(self._known) // IDENTITY_BYTES
        if known < end:
            above = bytes(self._known[-IDENTITY_BYTES:]) or self._root
            tokens = self._tokens[known * self._page_token_bytes : end * self._page_token_bytes]
            self._known += chain_pages(above, tokens, self._page_token_bytes)
        return bytes(self._known[start * IDENTITY_BYTES : end * IDENTITY_BYTES])


def usable_pages(tree: PrefixTree, tokens: bytes) -> int:
    """Return how many whole pages a request with these tokens may reuse: its last token must be computed."""
    return (len(tokens) // TOKEN_BYTES - 1) // tree.page_size


def page_identities(tree: PrefixTree, node: Node) -> bytes:
    """Return 16 bytes for each page of ``node``: the chain digest of its namespace and every token up to its end.

    Fills in ``identities`` of the node and of all its ancestors that lack them.
    """
    missing: list[Node] = []
    above = node
    while above.parent and not above.identities:
        missing.append(above)
        above = tree.nodes[above.parent]
    digest = above.identities[-IDENTITY_BYTES:] if above.parent else chain_root(above.namespace)
    for current in reversed(missing):
        current.set_rare(identities=chain_pages(digest, current.tokens, tree.page_token_bytes))
        digest = current.identities[-IDENTITY_BYTES:]
    return node.identities
