"""How nodes hold their tokens, and how a child is found by them.

Tokens take three bytes each where all of them are below 2**24, as those of every real vocabulary are. Prompts and
messages have tokens as packed int32, a quarter of whose bytes is zero; more than half of the memory of a tree is
tokens. Longer spans of the main tree keep them narrow: a prompt is narrowed as far as a match gets, once, and compared
in place. A short span, and one with a token that needs more, keeps int32 and is marked so (``Rare.is_wide``).

An only child is kept as its id, several by a 32-bit hash of their first pages. The page itself decides; a sibling with
the same hash has the next free key after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from shared.ids import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.core.cache.prefix_tree import Node, PrefixTree

NARROW_BYTES = 3
"""Bytes of a token in a narrow label, little-endian."""

LEAST_NARROWED = 256
"""Tokens from which on a span is kept narrow. Shorter spans have a quarter of all bytes, and cause most of the work."""

_FEW = 1024
"""Tokens up to which a span is narrowed byte by byte: a few calls on arrays take longer where they are the first in
milliseconds."""

page_key: Callable[[bytes], int] = xxhash.xxh32_intdigest
"""Returns the key of a first page (packed int32) among siblings. One of 64 bits would take 16 bytes more, and save no
look-ups."""

_LEAST_WIDE = 1 << 8 * NARROW_BYTES
_NUMBER = np.dtype("<u4")


def label_of(tokens: bytes, *, is_kept: bool = True) -> tuple[bytes, bool]:
    """Return the label of a node with these tokens (packed int32), and whether it is wide.

    Labels that are not to be kept are always wide.
    """
    narrowed = narrow(tokens) if is_kept and len(tokens) >= LEAST_NARROWED * TOKEN_BYTES else None
    return (tokens, True) if narrowed is None else (narrowed, False)


def narrow(tokens: bytes) -> bytes | None:
    """Return these packed int32 tokens in NARROW_BYTES each; None where a token needs more."""
    narrowed = narrow_behind(tokens, 0, len(tokens))
    return None if narrowed is None else bytes(memoryview(narrowed)[:-1])


def narrow_behind(tokens: bytes, start: int, end: int) -> bytearray | None:
    """Return ``tokens[start:end]`` (byte offsets) narrowed, with a spare byte at the end.

    None where a token needs more than NARROW_BYTES. The result is not copied.
    """
    count = (end - start) // TOKEN_BYTES
    if count <= _FEW:
        return _narrow_few(tokens[start : start + count * TOKEN_BYTES], count)
    numbers = np.frombuffer(tokens, _NUMBER, count, start)
    if np.maximum.reduce(numbers) >= _LEAST_WIDE:
        return None
    narrowed = bytearray(NARROW_BYTES * count + 1)
    # In order: the lowest byte of each number is written over the highest one, zero, of the number before.
    np.ndarray(count, _NUMBER, narrowed, 0, (NARROW_BYTES,))[...] = numbers
    return narrowed


def _narrow_few(tokens: bytes, count: int) -> bytearray | None:
    if tokens[3::TOKEN_BYTES].count(0) < count:
        return None
    narrowed = bytearray(NARROW_BYTES * count + 1)
    for place in range(NARROW_BYTES):
        narrowed[place:-1:NARROW_BYTES] = tokens[place::TOKEN_BYTES]
    return narrowed


def widened(label: bytes) -> bytes:
    """Return the packed int32 tokens of a narrow label."""
    numbers = np.ndarray(len(label) // NARROW_BYTES, _NUMBER, label + b"\0", 0, (NARROW_BYTES,))
    return (numbers & (_LEAST_WIDE - 1)).tobytes()


def tokens_of(label: bytes, start: int, end: int, *, is_wide: bool) -> bytes:
    """Return tokens ``start`` to ``end`` of a label, as packed int32."""
    if is_wide:
        return label[start * TOKEN_BYTES : end * TOKEN_BYTES]
    return widened(label[start * NARROW_BYTES : end * NARROW_BYTES])


def child_of(tree: PrefixTree, node: Node, tokens: bytes, offset: int) -> Node | None:
    """Return the child whose first page equals the page of ``tokens`` at byte ``offset``, or None. Changes nothing."""
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
    """Add a child below its parent; no sibling has the same first page."""
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
    """Remove a child from its parent, and close the gap in a run of siblings with one hash."""
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
    """Return the ids of several children by the keys of their first pages; ``children`` gives tokens and id of each."""
    keyed: dict[int, int] = {}
    for tokens, child_id in children:
        keyed[_free_key(keyed, tokens[:page_bytes])] = child_id
    return keyed


def _first_page(tree: PrefixTree, node: Node) -> bytes:
    return node.tokens_between(0, tree.page_size)


def _key_of(tree: PrefixTree, children: dict[int, int], child: Node) -> int:
    """Return the key of ``child`` among ``children``."""
    key = page_key(_first_page(tree, child))
    while children[key] != child.id:
        key += 1
    return key


def _free_key(children: dict[int, int], first_page: bytes) -> int:
    key = page_key(first_page)
    while key in children:
        key += 1
    return key
