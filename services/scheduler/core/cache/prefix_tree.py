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
from services.scheduler.core.cache.holdings import EMPTY_MAP, copied, counted_once, shared_depth
from services.scheduler.core.cache.node import Node, Rare, owned
from services.scheduler.core.cache.node_record import NO_DIGESTS, lists_of, with_lists, written
from shared.ids import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "HEAD_TOKENS",
    "IDENTITY_BYTES",
    "PAGE_NUMBER_BYTES",
    "Node",
    "Path",
    "PrefixTree",
    "add_child",
    "ancestors",
    "child_of",
    "descendants_first",
    "head_of",
    "keyed_by_page",
    "namespace_of",
    "page_count",
    "remove_leaf",
    "remove_subtree",
    "root_of",
    "split",
]

PAGE_NUMBER_BYTES = 4  # of a page number in a packed list
HEAD_TOKENS = 16
"""A node is remembered by its first page, and by more of them where pages are smaller than this. Where it ends is
chance: the same prefix comes back in a longer or a shorter span once its node was evicted."""
IDENTITY_BYTES = 16


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
    rare = Rare(namespace=namespace, owner=tree.owners.get(namespace, 0))
    root = Node(id=tree.next_id, parent=0, tokens=b"", record=written(digest, digest), rare=rare)
    tree.next_id += 1
    tree.nodes[root.id] = root
    tree.roots[namespace] = root.id
    return root


page_key: Callable[[bytes], int] = xxhash.xxh32_intdigest
"""The key of a first page among siblings. One of 64 bits would take 16 bytes more, and no fewer look-ups."""


def child_of(tree: PrefixTree, node: Node, tokens: bytes, offset: int) -> Node | None:
    """The child whose first page equals the page of ``tokens`` at byte ``offset``. Does not mutate.

    The page itself decides: a sibling with the same hash has the next free key after it.
    """
    first_page = tokens[offset : offset + tree.page_token_bytes]
    children = node.children
    if isinstance(children, int):
        only = tree.nodes[children] if children else None
        return only if only is not None and only.tokens.startswith(first_page) else None
    key = page_key(first_page)
    while (child_id := children.get(key)) is not None:
        child = tree.nodes[child_id]
        if child.tokens.startswith(first_page):
            return child
        key += 1
    return None


def _key_of(tree: PrefixTree, children: dict[int, int], child: Node) -> int:
    """The key under which ``child`` is among ``children``."""
    key = page_key(child.tokens[: tree.page_token_bytes])
    while children[key] != child.id:
        key += 1
    return key


def _forget_child(tree: PrefixTree, parent: Node, child: Node) -> None:
    """Take a child from its parent, and close the gap in a run of siblings with one hash."""
    children = parent.children
    if isinstance(children, int):
        parent.children = 0
        return
    gap = _key_of(tree, children, child)
    del children[gap]
    key = gap + 1
    while (sibling := children.get(key)) is not None:
        if page_key(tree.nodes[sibling].tokens[: tree.page_token_bytes]) <= gap:
            children[gap] = children.pop(key)
            gap = key
        key += 1
    if len(children) == 1:
        (parent.children,) = children.values()


def add_child(tree: PrefixTree, parent: Node, tokens: bytes) -> Node:
    """Add a leaf with this span (at least one whole page, no sibling with the same first page)."""
    node = Node(
        id=tree.next_id,
        parent=parent.id,
        tokens=tokens,
        depth=shared_depth(parent.end),
        record=_digests(tree, parent, tokens),
        rare=owned(parent.rare.owner),
    )
    tree.next_id += 1
    tree.nodes[node.id] = node
    siblings = parent.children
    if not siblings:
        parent.children = node.id
        return node
    page = tree.page_token_bytes
    if isinstance(siblings, int):
        siblings = parent.children = {page_key(tree.nodes[siblings].tokens[:page]): siblings}
    siblings[_free_key(siblings, tokens[:page])] = node.id
    return node


def keyed_by_page(children: list[tuple[bytes, int]], page_bytes: int) -> dict[int, int]:
    """Ids of several children by the keys of their first pages, from the tokens and the id of each, in this order."""
    keyed: dict[int, int] = {}
    for tokens, child_id in children:
        keyed[_free_key(keyed, tokens[:page_bytes])] = child_id
    return keyed


def _free_key(children: dict[int, int], first_page: bytes) -> int:
    key = page_key(first_page)
    while key in children:
        key += 1
    return key


def split(tree: PrefixTree, node: Node, pages: int) -> Node:
    """Cut ``node`` after ``pages`` of its pages and return the new upper part. Mutates both.

    The lower part keeps the id: whoever holds a node means it and everything above, so the upper part inherits
    every lock and every reader, and no reference elsewhere needs a change (a transfer's list of nodes does;
    see :func:`residency.split_node`).
    """
    cut = pages * tree.page_token_bytes
    parent = tree.nodes[node.parent]
    page_cut = pages * PAGE_NUMBER_BYTES
    tokens = node.tokens[:cut]
    held = (*node.device, *node.loading)
    lists = lists_of(node.record, node.pools)
    upper = Node(
        id=tree.next_id,
        parent=parent.id,
        tokens=tokens,
        children=node.id,
        device=node.device,
        loading=node.loading,
        host=node.host,
        record=with_lists(_digests(tree, parent, tokens), [each[:page_cut] for each in lists]),
        locks=copied(node.locks),
        below=counted_once(held[0]) if len(held) == 1 else dict.fromkeys(held, 1) or EMPTY_MAP,
        last_use=node.last_use,
        hits=node.hits,
        transfer=node.transfer,
        backup_pages=node.backup_pages[:page_cut],
        depth=node.depth,
        rare=node.rare,
    )
    tree.next_id += 1
    tree.nodes[upper.id] = upper
    if isinstance(parent.children, int):
        parent.children = upper.id
    else:
        parent.children[_key_of(tree, parent.children, node)] = upper.id
    node.tokens = node.tokens[cut:]
    digest = extend(upper.end_digest, head_of(tree, node.tokens)) if tree.has_digests else 0
    node.record = with_lists(written(digest, node.end_digest), [each[page_cut:] for each in lists])
    node.depth = shared_depth(upper.end)
    node.parent = upper.id
    node.backup_pages = node.backup_pages[page_cut:]
    if upper.rare.host_locks:
        upper.set_rare(host_locks=copied(node.rare.host_locks))
    if node.rare.identities:
        identity_cut = pages * IDENTITY_BYTES
        upper.set_rare(identities=node.rare.identities[:identity_cut])
        node.set_rare(identities=node.rare.identities[identity_cut:])
    return upper


def _digests(tree: PrefixTree, above: Node, tokens: bytes) -> bytes:
    """The record of a node with these tokens right below another, which no pool holds."""
    if not tree.has_digests:
        return NO_DIGESTS
    head = head_of(tree, tokens)
    end_above = above.end_digest
    digest = extend(end_above, head)
    return written(digest, digest if len(head) == len(tokens) else extend(end_above, tokens))


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
        node.children = 0
        if node is not top:
            del tree.nodes[node.id]
    return gone, remove_leaf(tree, top)


def descendants_first(tree: PrefixTree, top: Node) -> list[Node]:
    """``top`` and everything below it, every child before its parent. Does not mutate."""
    order, stack = [], [top]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(tree.nodes[child] for child in node.child_ids)
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
