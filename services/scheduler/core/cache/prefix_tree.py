"""The radix tree of cached prefixes: one root per namespace, edges labelled with whole pages of tokens.

Only shape lives here: adding, splitting and removing nodes (:mod:`prefix_match` finds what a prompt shares with
them). Whose pages a node's KV lies in is kept in the node too, but :mod:`residency` changes it. Tokens and pages are
packed little-endian int32, so that matching is a comparison of bytes in place and no loop runs over tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import xxhash

from services.scheduler.core.cache.digests import extend, root_digest
from services.scheduler.core.cache.empty_map import EMPTY_MAP
from shared.ids import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_NUMBER_BYTES = 4  # of a page number in a packed list
HEAD_TOKENS = 16
"""A node is remembered by its first page, and by more of them where pages are smaller than this. Where it ends is
chance: the same prefix comes back in a longer or a shorter span once its node was evicted."""
IDENTITY_BYTES = 16

_SHORT_NAMES = {
    "id": "i",
    "parent": "p",
    "tokens": "t",
    "namespace": "n",
    "children": "c",
    "device": "d",
    "loading": "l",
    "host": "h",
    "locks": "k",
    "host_locks": "r",
    "below": "b",
    "last_use": "u",
    "hits": "x",
    "transfer": "f",
    "backup_pages": "g",
    "identities": "y",
    "quarantined": "q",
    "depth": "e",
    "digest": "s",
    "end_digest": "z",
    "importance": "m",
    "owner": "o",
}


class Node(msgspec.Struct, omit_defaults=True, rename=_SHORT_NAMES, gc=False):
    """A span of whole pages under one parent. Dictionaries are keyed by worker id or storage id.

    A pool has either all pages of a node or none. ``device``: pages valid on a worker. ``loading``: device pages
    that a load on its way will fill. ``host``: pages valid in a storage's host pool. ``locks``: running requests
    of a worker whose prefix includes this node. ``host_locks``: loads that read the host copy. ``below``:
    children with ``device`` or ``loading`` pages on a worker. ``transfer`` is the backup that reads this node
    (0 is none) and ``backup_pages`` the host pages that it fills. ``identities`` holds 16 bytes a page once they
    were needed. ``quarantined`` names storages whose copy failed verification while another load reads it.

    An empty dictionary is the shared :data:`NOTHING`, which refuses changes: replace the field with what
    :func:`nothing.with_entry` and :func:`nothing.without_entry` return. Snapshots leave out fields that have their
    default, so that a decoded node is as small as a new one. What a node's id stands for, the tokens from the root
    to the node's end, never changes while the node lives, and ids are not used again.
    """

    id: int
    parent: int
    tokens: bytes
    namespace: str = ""  # On roots only.
    children: dict[int, int] = EMPTY_MAP  # Ids by a hash of the child's first page; see :func:`child_of`.
    device: dict[str, bytes] = EMPTY_MAP
    loading: dict[str, bytes] = EMPTY_MAP
    host: dict[str, bytes] = EMPTY_MAP
    locks: dict[str, int] = EMPTY_MAP
    host_locks: dict[str, int] = EMPTY_MAP
    below: dict[str, int] = EMPTY_MAP
    last_use: int = 0  # Sequence number of the input that last used it.
    hits: int = 0
    transfer: int = 0
    backup_pages: bytes = b""
    identities: bytes = b""
    quarantined: tuple[str, ...] = ()
    depth: int = 0  # Tokens above this node's own span.
    digest: int = 0  # What the node is remembered by: a hash from the root through its head (see HEAD_TOKENS).
    end_digest: int = 0  # The same from the root to the node's end; digests of children go on from it.
    importance: float = 1.0  # What its tokens are worth beside those of others, as far as is known (see :mod:`shares`).
    owner: int = 0  # Whose quotas its pages count against, 0 is nobody's; that of its root (see :mod:`quotas`).


class PrefixTree(msgspec.Struct):
    """All nodes by id, and the root of each namespace. ``page_size`` is in tokens; 0 while no geometry is known.

    Without ``has_digests`` nodes have none: nobody remembers them once they are gone. ``owners`` are of namespaces
    whose KV counts against somebody's quotas.
    """

    page_size: int = 0
    nodes: dict[int, Node] = {}
    roots: dict[str, int] = {}
    next_id: int = 1
    has_digests: bool = True
    owners: dict[str, int] = {}

    @property
    def page_token_bytes(self) -> int:
        """Bytes of the packed tokens of one page."""
        return self.page_size * TOKEN_BYTES

    def owner_of(self, namespace: str) -> int:
        """The number of who owns a namespace's KV; 0 where no quota is for it. Does not mutate."""
        return self.owners.get(namespace, 0)


Path = list[tuple[Node, int]]
"""Nodes from below the root downwards, each with how many of its pages match; only the last may match in part."""


def page_count(tree: PrefixTree, node: Node) -> int:
    """Pages of a node's own span."""
    return len(node.tokens) // (tree.page_size * TOKEN_BYTES)


def head_of(tree: PrefixTree, tokens: bytes) -> bytes:
    """The first pages of a span that tell it from others: at least HEAD_TOKENS tokens, or all that there are."""
    pages = -(-HEAD_TOKENS // tree.page_size)
    return tokens[: pages * tree.page_token_bytes]


def root_of(tree: PrefixTree, namespace: str) -> Node:
    """The namespace's root, made if there is none yet."""
    root_id = tree.roots.get(namespace)
    if root_id is not None:
        return tree.nodes[root_id]
    digest = root_digest(namespace)
    root = Node(id=tree.next_id, parent=0, tokens=b"", namespace=namespace, digest=digest, end_digest=digest)
    root.owner = tree.owners.get(namespace, 0)
    tree.next_id += 1
    tree.nodes[root.id] = root
    tree.roots[namespace] = root.id
    return root


page_key: Callable[[bytes], int] = xxhash.xxh3_64_intdigest
"""The key of a first page among siblings: eight bytes instead of the page's tokens."""


def child_of(tree: PrefixTree, node: Node, tokens: bytes, offset: int) -> Node | None:
    """The child whose first page equals the page of ``tokens`` at byte ``offset``. Does not mutate.

    The page itself decides: a sibling with the same hash has the next free key after it.
    """
    first_page = tokens[offset : offset + tree.page_token_bytes]
    key = page_key(first_page)
    while (child_id := node.children.get(key)) is not None:
        child = tree.nodes[child_id]
        if child.tokens.startswith(first_page):
            return child
        key += 1
    return None


def _key_of(tree: PrefixTree, parent: Node, child: Node) -> int:
    """The key under which ``parent`` has ``child``."""
    key = page_key(child.tokens[: tree.page_token_bytes])
    while parent.children[key] != child.id:
        key += 1
    return key


def _forget_child(tree: PrefixTree, parent: Node, child: Node) -> None:
    """Take a child from its parent, and close the gap in a run of siblings with one hash."""
    children = parent.children
    gap = _key_of(tree, parent, child)
    del children[gap]
    key = gap + 1
    while (sibling := children.get(key)) is not None:
        if page_key(tree.nodes[sibling].tokens[: tree.page_token_bytes]) <= gap:
            children[gap] = children.pop(key)
            gap = key
        key += 1
    if not children:
        parent.children = EMPTY_MAP


def add_child(tree: PrefixTree, parent: Node, tokens: bytes) -> Node:
    """Add a leaf with this span (at least one whole page, no sibling with the same first page)."""
    node = Node(
        id=tree.next_id,
        parent=parent.id,
        tokens=tokens,
        depth=parent.depth + len(parent.tokens) // TOKEN_BYTES,
        digest=_digest(tree, parent, head_of(tree, tokens)),
        end_digest=_digest(tree, parent, tokens),
        owner=parent.owner,
    )
    tree.next_id += 1
    tree.nodes[node.id] = node
    key = page_key(tokens[: tree.page_token_bytes])
    if not parent.children:
        parent.children = {key: node.id}
        return node
    while key in parent.children:
        key += 1
    parent.children[key] = node.id
    return node


def split(tree: PrefixTree, node: Node, pages: int) -> Node:
    """Cut ``node`` after ``pages`` of its pages and return the new upper part. Mutates both.

    The lower part keeps the id: whoever holds a node means it and everything above, so the upper part inherits
    every lock and every reader, and no reference elsewhere needs a change (a transfer's list of nodes does;
    see :func:`residency.split_node`).
    """
    cut = pages * tree.page_token_bytes
    parent = tree.nodes[node.parent]
    page_cut = pages * PAGE_NUMBER_BYTES
    upper = Node(
        id=tree.next_id,
        parent=parent.id,
        tokens=node.tokens[:cut],
        device=_cut(node.device, 0, page_cut),
        loading=_cut(node.loading, 0, page_cut),
        host=_cut(node.host, 0, page_cut),
        locks=dict(node.locks) or EMPTY_MAP,
        host_locks=dict(node.host_locks) or EMPTY_MAP,
        below=dict.fromkeys((*node.device, *node.loading), 1) or EMPTY_MAP,
        last_use=node.last_use,
        hits=node.hits,
        transfer=node.transfer,
        backup_pages=node.backup_pages[:page_cut],
        identities=node.identities[: pages * IDENTITY_BYTES],
        quarantined=node.quarantined,
        depth=node.depth,
        digest=_digest(tree, parent, head_of(tree, node.tokens[:cut])),
        end_digest=_digest(tree, parent, node.tokens[:cut]),
        importance=node.importance,
        owner=node.owner,
    )
    tree.next_id += 1
    tree.nodes[upper.id] = upper
    parent.children[_key_of(tree, parent, node)] = upper.id
    node.tokens = node.tokens[cut:]
    node.digest = _digest(tree, upper, head_of(tree, node.tokens))
    node.depth += cut // TOKEN_BYTES
    node.parent = upper.id
    node.device = _cut(node.device, page_cut)
    node.loading = _cut(node.loading, page_cut)
    node.host = _cut(node.host, page_cut)
    node.backup_pages = node.backup_pages[page_cut:]
    node.identities = node.identities[pages * IDENTITY_BYTES :]
    upper.children = {page_key(node.tokens[: tree.page_token_bytes]): node.id}
    return upper


def _digest(tree: PrefixTree, above: Node, tokens: bytes) -> int:
    """The digest of what ends with these tokens right below a node; 0 in a tree that keeps none."""
    return extend(above.end_digest, tokens) if tree.has_digests else 0


def _cut(held: dict[str, bytes], start: int, end: int | None = None) -> dict[str, bytes]:
    """A part of the pages in every pool (byte offsets)."""
    return {owner: pages[start:end] for owner, pages in held.items()} if held else EMPTY_MAP


def remove_leaf(tree: PrefixTree, node: Node) -> Node | None:
    """Remove a node without children; returns its parent, or None when the parent was an emptied root."""
    parent = tree.nodes[node.parent]
    _forget_child(tree, parent, node)
    del tree.nodes[node.id]
    if parent.parent == 0 and not parent.children:
        del tree.nodes[parent.id]
        del tree.roots[parent.namespace]
        return None
    return parent


def remove_subtree(tree: PrefixTree, top: Node) -> tuple[list[Node], Node | None]:
    """Remove a node with all below it; returns them, every child before its parent, and what remove_leaf returns."""
    if not top.children:
        return [top], remove_leaf(tree, top)
    gone = descendants_first(tree, top)
    for node in gone:
        node.children = EMPTY_MAP
        if node is not top:
            del tree.nodes[node.id]
    return gone, remove_leaf(tree, top)


def descendants_first(tree: PrefixTree, top: Node) -> list[Node]:
    """``top`` and everything below it, every child before its parent. Does not mutate."""
    order, stack = [], [top]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(tree.nodes[child] for child in node.children.values())
    order.reverse()
    return order


def ancestors(tree: PrefixTree, node: Node) -> list[Node]:
    """``node`` and every node above it, without the root, lowest first. Does not mutate."""
    chain = []
    while node.parent:
        chain.append(node)
        node = tree.nodes[node.parent]
    return chain


def namespace_of(tree: PrefixTree, node: Node) -> str:
    """The namespace whose tree this node is in. Does not mutate."""
    while node.parent:
        node = tree.nodes[node.parent]
    return node.namespace
