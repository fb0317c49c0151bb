"""Identities of cached pages."""

import pytest

from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.prefix_tree import PrefixTree, add_child, root_of, split
from shared.ids import chain_page, chain_root
from shared.messages.base import pack_int32
from tests.stateful.cell_model import namespace


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_an_identity_covers_everything_from_the_root(cut: int) -> None:
    """Each page's identity is the chain over all pages above it, however the tree is cut."""
    tree = PrefixTree(page_size=2)
    tokens = pack_int32(range(8))
    node = add_child(tree, root_of(tree, namespace()), tokens)
    expected, digest = [], chain_root(namespace())
    for start in range(0, len(tokens), 8):
        digest = chain_page(digest, tokens[start : start + 8])
        expected.append(digest)

    upper = split(tree, node, cut) if cut else None
    lower = page_identities(tree, node)

    assert (upper.identities if upper else b"") + lower == b"".join(expected)


def test_namespaces_never_share_an_identity() -> None:
    """Equal tokens of two tenants are different pages."""
    tree = PrefixTree(page_size=2)
    nodes = [add_child(tree, root_of(tree, namespace(salt)), pack_int32([1, 2])) for salt in ("a", "b")]

    first, second = (page_identities(tree, node) for node in nodes)

    assert first != second
