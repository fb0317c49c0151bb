"""The radix tree of cached prefixes: one root per namespace, edges labelled with whole pages of tokens.

Only shape lives here: finding, adding, splitting and removing nodes. Whose pages a node's KV lies in is kept
in the node too, but :mod:`residency` changes it. Tokens and pages are packed little-endian int32, so that
matching is a comparison of bytes and no loop runs over tokens.
"""

from __future__ import annotations

import msgspec
import numpy as np

from services.scheduler.core.digests import extend, root_digest

TOKEN_BYTES = 4
PAGE_BYTES = 4  # of a page number in a packed list
IDENTITY_BYTES = 16


class Node(msgspec.Struct, array_like=True, gc=False):
    """A span of whole pages under one parent. Dictionaries are keyed by worker id or storage id.

    A pool has either all pages of a node or none. ``device``: pages valid on a worker. ``loading``: device pages
    that a load on its way will fill. ``host``: pages valid in a storage's host pool. ``locks``: running requests
    of a worker whose prefix includes this node. ``host_locks``: loads that read the host copy. ``below``:
    children with ``device`` or ``loading`` pages on a worker. ``transfer`` is the backup that reads this node
    (0 is none) and ``backup_pages`` the host pages that it fills. ``identities`` holds 16 bytes a page once they
    were needed. ``quarantined`` names storages whose copy failed verification while another load reads it.
    """

    id: int
    parent: int
    tokens: bytes
    namespace: str = ""  # On roots only.
    children: dict[bytes, int] = {}
    device: dict[str, bytes] = {}
    loading: dict[str, bytes] = {}
    host: dict[str, bytes] = {}
    locks: dict[str, int] = {}
    host_locks: dict[str, int] = {}
    below: dict[str, int] = {}
    last_use: int = 0  # Sequence number of the input that last used it.
    hits: int = 0
    transfer: int = 0
    backup_pages: bytes = b""
    identities: bytes = b""
    quarantined: tuple[str, ...] = ()
    depth: int = 0  # Tokens above this node's own span.
    digest: int = 0  # 64-bit hash of the namespace and all tokens from the root to this node's end.


class PrefixTree(msgspec.Struct):
    """All nodes by id, and the root of each namespace. ``page_size`` is in tokens; 0 while no geometry is known."""

    page_size: int = 0
    nodes: dict[int, Node] = {}
    roots: dict[str, int] = {}
    next_id: int = 1

    @property
    def page_token_bytes(self) -> int:
        """Bytes of the packed tokens of one page."""
        return self.page_size * TOKEN_BYTES


Path = list[tuple[Node, int]]
"""Nodes from below the root downwards, each with how many of its pages match; only the last may match in part."""


def page_count(tree: PrefixTree, node: Node) -> int:
    """Pages of a node's own span."""
    return len(node.tokens) // tree.page_token_bytes


def match_prefix(tree: PrefixTree, namespace: str, tokens: bytes, max_pages: int) -> Path:
    """The longest path of the namespace's tree that ``tokens`` follow, of at most ``max_pages``. Does not mutate."""
    root = tree.roots.get(namespace)
    path: Path = []
    if root is None:
        return path
    page = tree.page_token_bytes
    nodes = tree.nodes
    node = nodes[root]
    offset, end = 0, min(len(tokens) // page, max_pages) * page
    while offset < end:
        child_id = node.children.get(tokens[offset : offset + page])
        if child_id is None:
            break
        node = nodes[child_id]
        following = offset + len(node.tokens)
        if following > end or tokens[offset:following] != node.tokens:
            path.append((node, _common_pages(node.tokens, tokens, offset, end, page)))
            break
        path.append((node, (following - offset) // page))
        offset = following
    return path


def common_pages(tree: PrefixTree, node: Node, tokens: bytes, offset: int, end: int) -> int:
    """How many whole pages of ``node`` equal ``tokens[offset:end]`` (byte offsets). Does not mutate."""
    return _common_pages(node.tokens, tokens, offset, end, tree.page_token_bytes)


def _common_pages(label: bytes, tokens: bytes, offset: int, end: int, page: int) -> int:
    length = min(len(label), end - offset) // page * page
    if tokens[offset : offset + length] == label[:length]:
        return length // page
    ours = np.frombuffer(label, dtype="<i4", count=length // TOKEN_BYTES)
    theirs = np.frombuffer(tokens, dtype="<i4", count=length // TOKEN_BYTES, offset=offset)
    return int((ours != theirs).argmax()) * TOKEN_BYTES // page


def root_of(tree: PrefixTree, namespace: str) -> Node:
    """The namespace's root, made if there is none yet."""
    root_id = tree.roots.get(namespace)
    if root_id is not None:
        return tree.nodes[root_id]
    root = Node(id=tree.next_id, parent=0, tokens=b"", namespace=namespace, digest=root_digest(namespace))
    tree.next_id += 1
    tree.nodes[root.id] = root
    tree.roots[namespace] = root.id
    return root


def child_of(tree: PrefixTree, node: Node, tokens: bytes, offset: int) -> Node | None:
    """The child whose first page equals the page of ``tokens`` at byte ``offset``. Does not mutate."""
    child_id = node.children.get(tokens[offset : offset + tree.page_token_bytes])
    return None if child_id is None else tree.nodes[child_id]


def add_child(tree: PrefixTree, parent: Node, tokens: bytes) -> Node:
    """Add a leaf with this span (at least one whole page, no sibling with the same first page)."""
    node = Node(
        id=tree.next_id,
        parent=parent.id,
        tokens=tokens,
        depth=parent.depth + len(parent.tokens) // TOKEN_BYTES,
        digest=extend(parent.digest, tokens),
    )
    tree.next_id += 1
    tree.nodes[node.id] = node
    parent.children[tokens[: tree.page_token_bytes]] = node.id
    return node


def split(tree: PrefixTree, node: Node, pages: int) -> Node:
    """Cut ``node`` after ``pages`` of its pages and return the new upper part. Mutates both.

    The lower part keeps the id: whoever holds a node means it and everything above, so the upper part inherits
    every lock and every reader, and no reference elsewhere needs a change (a transfer's list of nodes does;
    see :func:`residency.split_node`).
    """
    cut = pages * tree.page_token_bytes
    parent = tree.nodes[node.parent]
    page_cut = pages * PAGE_BYTES
    upper = Node(
        id=tree.next_id,
        parent=parent.id,
        tokens=node.tokens[:cut],
        device={worker: held[:page_cut] for worker, held in node.device.items()},
        loading={worker: held[:page_cut] for worker, held in node.loading.items()},
        host={storage: held[:page_cut] for storage, held in node.host.items()},
        locks=dict(node.locks),
        host_locks=dict(node.host_locks),
        below=dict.fromkeys((*node.device, *node.loading), 1),
        last_use=node.last_use,
        hits=node.hits,
        transfer=node.transfer,
        backup_pages=node.backup_pages[:page_cut],
        identities=node.identities[: pages * IDENTITY_BYTES],
        quarantined=node.quarantined,
        depth=node.depth,
        digest=extend(parent.digest, node.tokens[:cut]),
    )
    tree.next_id += 1
    tree.nodes[upper.id] = upper
    parent.children[node.tokens[: tree.page_token_bytes]] = upper.id
    node.tokens = node.tokens[cut:]
    node.depth += cut // TOKEN_BYTES
    node.parent = upper.id
    node.device = {worker: held[page_cut:] for worker, held in node.device.items()}
    node.loading = {worker: held[page_cut:] for worker, held in node.loading.items()}
    node.host = {storage: held[page_cut:] for storage, held in node.host.items()}
    node.backup_pages = node.backup_pages[page_cut:]
    node.identities = node.identities[pages * IDENTITY_BYTES :]
    upper.children[node.tokens[: tree.page_token_bytes]] = node.id
    return upper


def remove_leaf(tree: PrefixTree, node: Node) -> Node | None:
    """Remove a node without children; returns its parent, or None when the parent was an emptied root."""
    parent = tree.nodes[node.parent]
    del parent.children[node.tokens[: tree.page_token_bytes]]
    del tree.nodes[node.id]
    if parent.parent == 0 and not parent.children:
        del tree.nodes[parent.id]
        del tree.roots[parent.namespace]
        return None
    return parent


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
