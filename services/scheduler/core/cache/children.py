"""Children of a node: an only one as its id, several by a 32-bit hash of their first pages.

The page itself decides. A sibling with the same hash has the next free key after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.core.cache.prefix_tree import Node, PrefixTree

page_key: Callable[[bytes], int] = xxhash.xxh32_intdigest
"""The key of a first page, packed int32, among siblings. One of 64 bits would take 16 bytes more, and no fewer
look-ups.
"""


def child_of(tree: PrefixTree, node: Node, tokens: bytes, offset: int) -> Node | None:
    """The child whose first page equals the page of ``tokens`` at byte ``offset``. Does not mutate."""
    first_page = tokens[offset : offset + tree.page_token_bytes]
    children = node.children
    if isinstance(children, int):
        only = tree.nodes[children] if children else None
        return only if only is not None and _first_page(tree, only) == first_page else None
    key = page_key(first_page)
    while (child_id := children.get(key)) is not None:
        child = tree.nodes[child_id]
        if _first_page(tree, child) == first_page:
            return child
        key += 1
    return None


def attach(tree: PrefixTree, parent: Node, child: Node, first_page: bytes) -> None:
    """Put a child with this first page, which no sibling has, under its parent."""
    siblings = parent.children
    if not siblings:
        parent.children = child.id
        return
    if isinstance(siblings, int):
        siblings = parent.children = {page_key(_first_page(tree, tree.nodes[siblings])): siblings}
    siblings[_free_key(siblings, first_page)] = child.id


def exchange(tree: PrefixTree, parent: Node, child: Node, other: Node) -> None:
    """Put another node that begins with the same page in a child's place."""
    if isinstance(parent.children, int):
        parent.children = other.id
    else:
        parent.children[_key_of(tree, parent.children, child)] = other.id


def detach(tree: PrefixTree, parent: Node, child: Node) -> None:
    """Take a child from its parent, and close the gap in a run of siblings with one hash."""
    children = parent.children
    if isinstance(children, int):
        parent.children = 0
        return
    gap = _key_of(tree, children, child)
    del children[gap]
    key = gap + 1
    while (sibling := children.get(key)) is not None:
        if page_key(_first_page(tree, tree.nodes[sibling])) <= gap:
            children[gap] = children.pop(key)
            gap = key
        key += 1
    if len(children) == 1:
        (parent.children,) = children.values()


def keyed_by_page(children: list[tuple[bytes, int]], page_bytes: int) -> dict[int, int]:
    """Ids of several children by the keys of their first pages, from the tokens and the id of each, in this order."""
    keyed: dict[int, int] = {}
    for tokens, child_id in children:
        keyed[_free_key(keyed, tokens[:page_bytes])] = child_id
    return keyed


def _first_page(tree: PrefixTree, node: Node) -> bytes:
    return node.tokens_between(0, tree.page_size)


def _key_of(tree: PrefixTree, children: dict[int, int], child: Node) -> int:
    """The key under which ``child`` is among ``children``."""
    key = page_key(_first_page(tree, child))
    while children[key] != child.id:
        key += 1
    return key


def _free_key(children: dict[int, int], first_page: bytes) -> int:
    key = page_key(first_page)
    while key in children:
        key += 1
    return key
