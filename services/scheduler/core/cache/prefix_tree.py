"""The radix tree of cached prefixes: one root per namespace, edges labelled with whole pages of tokens.

Only shape lives here: adding, splitting and removing nodes (:mod:`prefix_match` finds what a prompt shares with
them). The pages of a node's KV are listed in the node too, but :mod:`residency` changes them. Tokens and pages are
packed, so that matching is a comparison of bytes in place and no loop runs over tokens.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from services.scheduler.core.cache.digests import extend, root_digest
from services.scheduler.core.cache.holdings import (
    EMPTY_MAP,
    NO_DIGESTS,
    copied,
    counted_once,
    digests_of,
    inserted,
    listed,
    lists_of,
    run_at,
    runs_at,
    shared_depth,
    shared_names,
    taken,
    with_lists,
    written,
)
from services.scheduler.core.cache.labels import NARROW_BYTES, attach, detach, exchange, label_of, tokens_of
from shared.chunks import chunk_pages
from shared.ids import TOKEN_BYTES

if TYPE_CHECKING:
    from _collections_abc import dict_values

PAGE_NUMBER_BYTES = 4  # Bytes of a page number in a packed list.
HEAD_TOKENS = 16
"""A node is remembered by its first page, and by more of them where pages are smaller than this. Where it ends is
chance: the same prefix comes back in a longer or a shorter span once its node was evicted."""
IDENTITY_BYTES = 16


_SHORT_NAMES = {
    "id": "i",
    "parent": "p",
    "label": "t",
    "namespace": "n",
    "children": "c",
    "device": "d",
    "loading": "l",
    "host": "h",
    "record": "a",
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
    "rare": "v",
    "importance": "m",
    "owner": "o",
    "is_wide": "w",
    "is_sealed": "s",
}


class Rare(msgspec.Struct, omit_defaults=True, rename=_SHORT_NAMES, gc=False, frozen=True):
    """Fields that few nodes set. Nodes with the defaults share one object, as do those that only have an owner."""

    namespace: str = ""
    host_locks: dict[str, int] = EMPTY_MAP
    identities: bytes = b""
    quarantined: tuple[str, ...] = ()
    importance: float = 1.0
    owner: int = 0
    is_wide: bool = False
    is_sealed: bool = False


NOTHING_RARE = Rare()


@lru_cache(maxsize=4096)
def owned(owner: int, *, is_wide: bool = False, is_sealed: bool = False) -> Rare:
    """Return the :class:`Rare` that many nodes share: an owner, a wide label, a namespace with a key of its own."""
    is_common = not (owner or is_wide or is_sealed)
    return NOTHING_RARE if is_common else Rare(owner=owner, is_wide=is_wide, is_sealed=is_sealed)


class Node(msgspec.Struct, omit_defaults=True, rename=_SHORT_NAMES, gc=False):
    """A span of whole pages under one parent. Dictionaries are keyed by worker id or storage id.

    ``label`` has its tokens, in three bytes each unless it is wide (see :mod:`labels`). A pool holds all pages of
    a node or none. ``device``: workers on which its pages are valid. ``loading``: workers with device pages that a load
    in flight will fill. ``host``: storages in whose host pool they are valid. ``record`` has the numbers of those
    pages, see :meth:`device_pages`. ``locks``: running requests of a worker whose prefix includes this node. ``below``:
    numbers of children with ``device`` or ``loading`` pages on a worker. ``transfer`` is the backup that reads this
    node (0: none) and ``backup_pages`` the host pages that it fills.

    Rarely set, and kept apart: ``namespace``, on roots only. ``host_locks``: loads that read the host copy.
    ``identities``: 16 bytes a page once they were needed. ``quarantined``: storages whose copy failed verification
    while another load reads it. ``importance``: what its tokens are worth relative to those of others, where measured
    (see :mod:`shares`). ``owner``: whose quotas its pages count against (0: none), as of its root (see
    :mod:`quotas`). ``is_wide``: its label has packed int32 tokens. ``is_sealed``: its namespace has a key of its own,
    so that no node lends it to another.

    Names, counts and depths are shared with other nodes (see :mod:`holdings`): replace them, do not change them.
    Snapshots leave out fields that have their default, so that a decoded node is as small as a new one. The
    tokens that a node's id stands for, from the root to the node's end, never change while the node lives, and ids are
    not used again.
    """

    id: int
    parent: int
    label: bytes
    children: int | dict[int, int] = 0  # An only child, or ids by a hash of the first page; see :mod:`children`.
    device: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    record: bytes = NO_DIGESTS  # Its digests, then page numbers of device, loading and host; see :mod:`holdings`.
    locks: dict[str, int] = EMPTY_MAP
    below: dict[str, int] = EMPTY_MAP
    last_use: int = 0  # Sequence number of the input that last used it.
    hits: int = 0
    transfer: int = 0
    backup_pages: bytes = b""
    depth: int = 0  # Tokens above this node's own span.
    rare: Rare = NOTHING_RARE

    @property
    def size(self) -> int:
        """Number of tokens in its own span."""
        return len(self.label) // (TOKEN_BYTES if self.rare.is_wide else NARROW_BYTES)

    @property
    def tokens(self) -> bytes:
        """Tokens of its own span, packed int32. Copies; :meth:`tokens_between` copies less."""
        return tokens_of(self.label, 0, len(self.label), is_wide=self.rare.is_wide)

    def tokens_between(self, start: int, end: int) -> bytes:
        """Return tokens ``start`` to ``end`` of its span, packed int32."""
        return tokens_of(self.label, start, end, is_wide=self.rare.is_wide)

    @property
    def end(self) -> int:
        """Number of tokens from the root to the node's end."""
        return self.depth + len(self.label) // (TOKEN_BYTES if self.rare.is_wide else NARROW_BYTES)

    @property
    def digest(self) -> int:
        """Hash of the tokens from the root through its head (see HEAD_TOKENS), by which the node is remembered."""
        return digests_of(self.record)[0]

    @property
    def end_digest(self) -> int:
        """Hash of the tokens from the root to the node's end; digests of children continue it."""
        return digests_of(self.record)[1]

    def chunks_ending(self, page_size: int) -> list[bytes]:
        """Return the names of the chunks that end in this node, whose identities are known."""
        per_chunk, identities = chunk_pages(page_size), self.rare.identities
        ends = range(-(self.depth // page_size + 1) % per_chunk, len(identities) // IDENTITY_BYTES, per_chunk)
        return [identities[at * IDENTITY_BYTES : (at + 1) * IDENTITY_BYTES] for at in ends]

    @property
    def child_ids(self) -> tuple[int, ...] | dict_values[int, int]:
        """Ids of its children, in the order in which they were added; a view where there are several."""
        children = self.children
        if isinstance(children, int):
            return (children,) if children else ()
        return children.values()

    @property
    def namespace(self) -> str:
        """Namespace of a root; "" for all other nodes."""
        return self.rare.namespace

    @property
    def host_locks(self) -> dict[str, int]:
        """Number of holders of the host copy by storage: loads that read it, pins and leases."""
        return self.rare.host_locks

    @property
    def identities(self) -> bytes:
        """Identities of its pages, 16 bytes each; b"" until they were needed."""
        return self.rare.identities

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Storages whose copy failed verification and stays only until its readers end."""
        return self.rare.quarantined

    @property
    def importance(self) -> float:
        """Measured worth of its tokens relative to those of others; 1.0 where not measured."""
        return self.rare.importance

    @property
    def owner(self) -> int:
        """Number of the owner whose quotas its pages count against; 0 for none."""
        return self.rare.owner

    def set_rare(self, **changes: Any) -> None:
        """Change fields that few nodes set."""
        rare = msgspec.structs.replace(self.rare, **changes)
        common = owned(rare.owner, is_wide=rare.is_wide, is_sealed=rare.is_sealed)
        self.rare = common if rare == common else rare

    def device_pages(self, worker_id: str) -> bytes:
        """Return its page numbers on a worker of ``device``, packed int32. Raises ValueError for another worker."""
        return self._listed(self.device.index(worker_id))

    def loading_pages(self, worker_id: str) -> bytes:
        """Return its page numbers on a worker of ``loading``, packed int32. Raises ValueError for another worker."""
        return self._listed(len(self.device) + self.loading.index(worker_id))

    def host_pages(self, storage_id: str) -> bytes:
        """Return its page numbers at a storage of ``host``, packed int32. Raises ValueError for another storage."""
        return self._listed(len(self.device) + len(self.loading) + self.host.index(storage_id))

    def put_on_device(self, worker_id: str, pages: bytes) -> None:
        """Add a worker that is not in ``device``, with its pages (packed int32)."""
        self._insert(len(self.device), pages)
        self.device = shared_names((*self.device, worker_id))

    def take_from_device(self, worker_id: str) -> bytes:
        """Remove a worker from ``device`` and return the pages there. Raises ValueError if it is not there."""
        pages = self._take(self.device.index(worker_id))
        self.device = _without(self.device, worker_id)
        return pages

    def put_loading(self, worker_id: str, pages: bytes) -> None:
        """Add a worker that is not in ``loading``, with the pages that the load will fill."""
        self._insert(len(self.device) + len(self.loading), pages)
        self.loading = shared_names((*self.loading, worker_id))

    def take_loading(self, worker_id: str) -> bytes:
        """Remove a worker whose load is over from ``loading`` and return its pages."""
        pages = self._take(len(self.device) + self.loading.index(worker_id))
        self.loading = _without(self.loading, worker_id)
        return pages

    def put_in_host(self, storage_id: str, pages: bytes) -> None:
        """Add a storage that is not in ``host``, with its pages (packed int32)."""
        self._insert(self.pools, pages)
        self.host = shared_names((*self.host, storage_id))

    def take_from_host(self, storage_id: str) -> bytes:
        """Remove a storage from ``host`` and return the pages there. Raises ValueError if it is not there."""
        pages = self._take(len(self.device) + len(self.loading) + self.host.index(storage_id))
        self.host = _without(self.host, storage_id)
        return pages

    @property
    def pools(self) -> int:
        """Number of pools with pages of the node, valid or being loaded."""
        return len(self.device) + len(self.loading) + len(self.host)

    def _listed(self, place: int) -> bytes:
        record = self.record
        return run_at(record, place) if len(record) & 3 else listed(record, self.pools, place)

    def _insert(self, place: int, pages: bytes) -> None:
        """Insert a pool's pages into the record; called before the pool's name is added."""
        self.record = inserted(self.record, self.pools, place, pages)

    def _take(self, place: int) -> bytes:
        """Remove and return a pool's pages; called before the pool's name is removed."""
        pages = self._listed(place)
        self.record = taken(self.record, self.pools, place)
        return pages


def _without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return shared_names(tuple(each for each in names if each != name)) if len(names) > 1 else ()


class PrefixTree(msgspec.Struct, dict=True):
    """All nodes by id, and the root of each namespace. ``page_size`` is in tokens; 0 while no geometry is known.

    Without ``has_digests`` nodes have no digests and are not remembered once they are gone. Such nodes are few and
    short-lived, so their labels are wide and cost nothing to make. ``owners`` has the owner of each namespace whose KV
    counts against quotas. ``sealed`` namespaces have a key of their own.
    """

    page_size: int = 0
    nodes: dict[int, Node] = {}
    roots: dict[str, int] = {}
    next_id: int = 1
    has_digests: bool = True
    owners: dict[str, int] = {}
    sealed: dict[str, None] = {}

    @property
    def page_token_bytes(self) -> int:
        """Bytes of the packed tokens of one page."""
        return self.page_size * TOKEN_BYTES

    @property
    def head_tokens(self) -> int:
        """Tokens at most by which a node is remembered: whole pages, at least HEAD_TOKENS."""
        return -(-HEAD_TOKENS // self.page_size) * self.page_size

    @cached_property
    def ways(self) -> KeptWays:
        """Cache of recently walked ways. It follows from the nodes, and is in no snapshot."""
        return KeptWays()

    def owner_of(self, namespace: str) -> int:
        """Return the number of a namespace's owner; 0 where it counts against no quota. Changes nothing."""
        return self.owners.get(namespace, 0)


Path = list[tuple[Node, int]]
"""Nodes from below the root downwards, each with its number of matching pages; only the last may match in part."""

_MANY = 8
"""Nodes from which on one vectorised look-up is cheaper than one for each."""

_MOST_KEPT = 1 << 17
_OF_A_WAY = 8
"""Overhead of a kept way, in nodes; with it, all kept ways have at most _MOST_KEPT nodes together: 8 MB."""

_MOST_TOKEN_BYTES = 1 << 25
"""Bytes at most of kept tokens of ways that prompts refer to: sixty sessions of 131,072 tokens."""

_PARENTS, _RECORDS, _DEVICES, _DEPTHS = map(attrgetter, ("parent", "record", "device", "depth"))


class Way(msgspec.Struct, frozen=True, gc=False):
    """The nodes between a root and the end of a node, known without walking there. Its lists never change.

    ``path`` has the nodes, top first, each with all of its pages, ``nodes`` the same without pages, and ``parents`` the
    ids of their parents.
    """

    root: Node
    path: Path
    nodes: list[Node]
    parents: list[int]


class KeptWays:
    """A bounded cache of ways by the ids of the nodes in which they end, oldest first.

    While a node lives so do all nodes above it, and only a split puts another node between them, which then is the
    parent of the lower part. So a session that goes on pays for its new nodes only.
    """

    def __init__(self) -> None:
        """Begin with no ways."""
        self._by_end: dict[int, Way] = {}
        self._kept = 0
        self._tokens: dict[int, bytes] = {}
        self._token_bytes = 0

    def get(self, node_id: int) -> Way | None:
        """Return the kept way to the end of a living node; None where none is kept or a node on it was split since."""
        way = self._by_end.get(node_id)
        if way is not None and list(map(_PARENTS, way.nodes)) != way.parents:
            self.drop(node_id)
            return None
        return way

    def keep(self, node_id: int, way: Way) -> None:
        """Keep a way to the end of this node, which has none; the oldest ways make room."""
        self._by_end[node_id] = way
        self._kept += _OF_A_WAY + len(way.nodes)
        while self._kept > _MOST_KEPT:
            self.drop(next(iter(self._by_end)))

    def tokens(self, node_id: int) -> bytes | None:
        """Return the tokens of the whole way to a living node's end, packed int32; None where they are not kept."""
        return self._tokens.get(node_id)

    def keep_tokens(self, node_id: int, tokens: bytes) -> None:
        """Keep the tokens of a way, which never change; the oldest make room."""
        self._tokens[node_id] = tokens
        self._token_bytes += len(tokens)
        while self._token_bytes > _MOST_TOKEN_BYTES:
            self.drop_tokens(next(iter(self._tokens)))

    def drop_tokens(self, node_id: int) -> None:
        """Drop the tokens of the way to this node, if kept."""
        self._token_bytes -= len(self._tokens.pop(node_id, b""))

    def forget(self, node_id: int) -> None:
        """Drop way and tokens of a node that is gone."""
        self.drop(node_id)
        self.drop_tokens(node_id)

    def drop(self, node_id: int) -> None:
        """Drop the way to the end of this node, if kept."""
        way = self._by_end.pop(node_id, None)
        self._kept -= 0 if way is None else _OF_A_WAY + len(way.nodes)


def way_to(tree: PrefixTree, node: Node) -> Way:
    """Return the way from the root to the end of a node, which may be a root itself. Does not change the tree."""
    kept = tree.ways
    found = kept.get(node.id)
    if found is not None:
        return found
    below: Path = []
    at = node
    while at.parent and found is None:
        below.append((at, page_count(tree, at)))
        at = tree.nodes[at.parent]
        found = kept.get(at.id)
    below.reverse()
    path = below if found is None else found.path + below
    nodes = [each for each, _ in below]
    parents = [each.parent for each in nodes]
    if found is None:
        way = Way(at, path, nodes, parents)
    else:
        way = Way(found.root, path, found.nodes + nodes, found.parents + parents)
    kept.keep(node.id, way)
    return way


def tokens_to(tree: PrefixTree, node: Node) -> bytes:
    """Return the tokens from the root to the end of a node, packed int32. Does not change the tree.

    They are kept, so that a later call for a node below it copies only what is new.
    """
    kept, nodes = tree.ways, way_to(tree, node).nodes
    known, place = b"", len(nodes)
    while place:
        found = kept.tokens(nodes[place - 1].id)
        if found is not None:
            known = found
            break
        place -= 1
    if place == len(nodes):
        return known
    tokens = b"".join((known, *(each.tokens for each in nodes[place:])))
    if place:
        kept.drop_tokens(nodes[place - 1].id)
    kept.keep_tokens(node.id, tokens)
    return tokens


def device_pages_of(tree: PrefixTree, nodes: list[Node], worker_id: str) -> bytes:
    """Return the page numbers of these nodes of one way on a worker that has all of them, top first, packed int32."""
    if len(nodes) < _MANY:
        return b"".join([node.device_pages(worker_id) for node in nodes])
    names, last = nodes[-1].device, nodes[-1]
    if list(map(_DEVICES, nodes)).count(names) < len(nodes):
        return b"".join([node.device_pages(worker_id) for node in nodes])
    begins = np.fromiter([*map(_DEPTHS, nodes), last.end], np.int64, len(nodes) + 1) // tree.page_size
    begins -= begins[0]
    pages, others = runs_at(list(map(_RECORDS, nodes)), names.index(worker_id), begins)
    for place in others:
        pages[begins[place] : begins[place + 1]] = np.frombuffer(nodes[place].device_pages(worker_id), "<i4")
    return pages.tobytes()


def page_count(tree: PrefixTree, node: Node) -> int:
    """Return the number of pages in a node's own span."""
    return len(node.label) // (TOKEN_BYTES if node.rare.is_wide else NARROW_BYTES) // tree.page_size


def head_of(tree: PrefixTree, tokens: bytes) -> bytes:
    """Return the first pages of a span that tell it from others: at least HEAD_TOKENS tokens, or the whole span."""
    return tokens[: tree.head_tokens * TOKEN_BYTES]


def root_of(tree: PrefixTree, namespace: str) -> Node:
    """Return the namespace's root, made if there is none yet."""
    root_id = tree.roots.get(namespace)
    if root_id is not None:
        return tree.nodes[root_id]
    digest = root_digest(namespace)
    rare = Rare(namespace=namespace, owner=tree.owners.get(namespace, 0), is_sealed=namespace in tree.sealed)
    root = Node(id=tree.next_id, parent=0, label=b"", record=written(digest, digest), rare=rare)
    tree.next_id += 1
    tree.nodes[root.id] = root
    tree.roots[namespace] = root.id
    return root


def add_child(tree: PrefixTree, parent: Node, tokens: bytes) -> Node:
    """Add a leaf with this span: at least one whole page, and no sibling with the same first page."""
    label, is_wide = label_of(tokens, is_kept=tree.has_digests)
    node = Node(
        id=tree.next_id,
        parent=parent.id,
        label=label,
        depth=shared_depth(parent.end),
        record=_digests(tree, parent, tokens),
        rare=owned(parent.rare.owner, is_wide=is_wide, is_sealed=parent.rare.is_sealed),
    )
    tree.next_id += 1
    tree.nodes[node.id] = node
    attach(tree, parent, node, tokens[: tree.page_token_bytes])
    return node


def split(tree: PrefixTree, node: Node, pages: int) -> Node:
    """Split ``node`` after ``pages`` of its pages and return the new upper part. Changes both.

    The lower part keeps the id: a holder of a node means it and everything above, so the upper part inherits
    every lock and every reader, and no reference elsewhere needs a change (a transfer's list of nodes does;
    see :func:`residency.split_node`).
    """
    tokens, cut = node.tokens, pages * tree.page_token_bytes
    label_cut = pages * len(node.label) // page_count(tree, node)
    parent = tree.nodes[node.parent]
    page_cut = pages * PAGE_NUMBER_BYTES
    held = (*node.device, *node.loading)
    lists = lists_of(node.record, node.pools)
    upper = Node(
        id=tree.next_id,
        parent=parent.id,
        label=node.label[:label_cut],
        children=node.id,
        device=node.device,
        loading=node.loading,
        host=node.host,
        record=with_lists(_digests(tree, parent, tokens[:cut]), [each[:page_cut] for each in lists]),
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
    exchange(tree, parent, node, upper)
    node.label = node.label[label_cut:]
    digest = extend(upper.end_digest, head_of(tree, tokens[cut:])) if tree.has_digests else 0
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
    """Return the record of a node with these tokens right below ``above``, not yet held by a pool."""
    if not tree.has_digests:
        return NO_DIGESTS
    head = head_of(tree, tokens)
    end_above = above.end_digest
    digest = extend(end_above, head)
    return written(digest, digest if len(head) == len(tokens) else extend(end_above, tokens))


def remove_leaf(tree: PrefixTree, node: Node) -> Node | None:
    """Remove a node without children; return its parent, or None when that was a root and is removed, too."""
    parent = tree.nodes[node.parent]
    detach(tree, parent, node)
    tree.ways.forget(node.id)
    del tree.nodes[node.id]
    if parent.parent == 0 and not parent.children:
        del tree.nodes[parent.id]
        del tree.roots[parent.namespace]
        return None
    return parent


def remove_subtree(tree: PrefixTree, top: Node) -> tuple[list[Node], Node | None]:
    """Remove a node with all below it; return them, children first, and the result of :func:`remove_leaf` for it."""
    if not top.children:
        return [top], remove_leaf(tree, top)
    gone = descendants_first(tree, top)
    for node in gone:
        node.children = 0
        if node is not top:
            tree.ways.forget(node.id)
            del tree.nodes[node.id]
    return gone, remove_leaf(tree, top)


def descendants_first(tree: PrefixTree, top: Node) -> list[Node]:
    """Return ``top`` and everything below it, every child before its parent. Changes nothing."""
    order, stack = [], [top]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(tree.nodes[child] for child in node.child_ids)
    order.reverse()
    return order


def ancestors(tree: PrefixTree, node: Node) -> list[Node]:
    """Return ``node`` and every node above it, without the root, lowest first. Changes nothing."""
    return way_to(tree, node).nodes[::-1]


def namespace_of(tree: PrefixTree, node: Node) -> str:
    """Return the namespace whose tree this node is in. Changes nothing."""
    return way_to(tree, node).root.namespace
