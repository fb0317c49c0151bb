"""Snapshots: the state as bytes and back. Equal states give equal bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec

from services.scheduler.core.cache.eviction import POLICIES, Policy
from services.scheduler.core.cache.eviction_orders import RENEWAL_TIMER, renew_orders
from services.scheduler.core.cache.holdings import (
    NO_DIGESTS,
    shared_count,
    shared_depth,
    with_lists,
    written,
)
from services.scheduler.core.cache.labels import NARROW_BYTES, keyed_by_page, label_of
from services.scheduler.core.cache.prefix_tree import NOTHING_RARE, owned
from services.scheduler.core.cache.residency import orders_of_tier
from services.scheduler.core.explain.recollection import forgotten
from services.scheduler.core.queue.schedules import SCHEDULES
from services.scheduler.core.state import CellState
from services.scheduler.core.tiers.host_admission import ADMISSIONS, BUILT_IN_ADMISSIONS
from shared.errors import CodecError, PolicyMissing
from shared.ids import TOKEN_BYTES
from shared.undecodable import UNDECODABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from services.scheduler.core.cache.prefix_tree import Node, PrefixTree

    Announce = Callable[[str], None]
    """Called with a sentence for each part of a snapshot that was not taken over."""

EARLIER_VERSION = 12
"""An earlier version that is still read. Its nodes have a dictionary of pages for each tier, longer keys for children,
and rare fields beside the others. No release wrote 13.
"""
_VERSION = 14
_TIERS = ("d", "l", "h")  # Device, loading and host, in the order in which a node has their pages.
_TOKENS, _CHILDREN, _RECORD, _DIGEST, _END_DIGEST = "t", "c", "a", "s", "z"
_RARE, _RARELY = "v", ("n", "r", "y", "q", "m", "o")


class _KeptPolicy(msgspec.Struct, array_like=True):
    """The eviction policy of a pool: its name, the version of its state, and that state in the policy's own bytes."""

    name: str
    state_version: int
    state: memoryview  # Of decoded ones: a view of the snapshot's bytes, so that they are not held twice.


class _Versioned(msgspec.Struct):
    version: int


class _Snapshot(_Versioned):
    state: CellState  # Without ``orders``, its own and those of a renewal.
    orders: dict[str, _KeptPolicy]
    coming: dict[str, _KeptPolicy]  # Those of ``state.renewal``.
    token_bytes: int = (
        TOKEN_BYTES  # Bytes of a token in labels not marked wide; the default is for snapshots without narrow labels.
    )


_ENCODER = msgspec.msgpack.Encoder()
_VERSION_DECODER = msgspec.msgpack.Decoder(_Versioned)
_FIRST = _ENCODER.encode(_Versioned(_VERSION))
"""A map of one entry. A snapshot begins with the same bytes but for the number of entries and the version. Decoding a
whole snapshot for its version takes a quarter of a second where the tree has a million nodes.
"""
_DECODER = msgspec.msgpack.Decoder(_Snapshot)


def encode_state(state: CellState) -> bytes:
    """Encode the whole state. A fold that goes on from it gives the same outputs as one that never stopped.

    The memory for explanations is left out: it grows large, and no output depends on it.
    """
    renewal, coming = state.renewal, _coming(state)
    if renewal is not None:
        renewal = msgspec.structs.replace(renewal, orders={})
    bare = msgspec.structs.replace(state, recollection=None, orders={}, retired=[], renewal=renewal)
    return _ENCODER.encode(_Snapshot(_VERSION, bare, _kept(state.orders), _kept(coming), NARROW_BYTES))


def _kept(orders: Mapping[str, Policy]) -> dict[str, _KeptPolicy]:
    return {
        pool: _KeptPolicy(each.name, each.state_version, memoryview(each.encode())) for pool, each in orders.items()
    }


def _coming(state: CellState) -> Mapping[str, Policy]:
    return state.renewal.orders if state.renewal is not None else {}


def decode_state(data: bytes | memoryview, announce: Announce = lambda told: None) -> CellState:
    """Undo :func:`encode_state`.

    Where the version of a policy's state differs from this release's, every pool's policy starts anew with the resident
    nodes, as after a change of policy: what is cached is worth more than what was learned of it. ``announce`` is called
    with a sentence for each such policy.

    Raises CodecError for bytes that are not a snapshot of this version or :data:`EARLIER_VERSION`, and PolicyMissing
    where they name a policy, a schedule or an admission that is not registered here.
    """
    try:
        version = _version(data)
        if version == EARLIER_VERSION:
            data = renewed(data)
        elif version != _VERSION:
            raise CodecError(f"snapshot of version {version}, not {_VERSION}")
        snapshot = _DECODER.decode(data)
        if snapshot.token_bytes == TOKEN_BYTES:
            _narrow_labels(snapshot.state.tree)
            _narrow_labels(snapshot.state.transient.tree)
    except UNDECODABLE as error:
        raise CodecError(f"not a snapshot: {error}") from error
    state = snapshot.state
    _require("policy", state.policy, POLICIES)
    _require("schedule", state.config.schedule, SCHEDULES)
    _require("admission", state.config.admission, (*BUILT_IN_ADMISSIONS, *ADMISSIONS))
    state.recollection = forgotten()
    _share(state.tree.nodes)
    _take_orders(state, snapshot.orders, snapshot.coming, announce)
    for policy in (*state.orders.values(), *_coming(state).values()):
        policy.share_numbers(state.tree.nodes)
    for account in state.quotas.accounts.values():
        for order in account.orders.values():
            order.share_numbers(state.tree.nodes)
    return state


def _version(data: bytes | memoryview) -> int:
    """Return the version alone: the types of another version's state are not known.

    Raises CodecError where the version does not come first, and one of :data:`UNDECODABLE` where it is not a number.
    """
    first = bytes(data[: len(_FIRST)])
    if first[1:-1] != _FIRST[1:-1]:
        raise CodecError("not a snapshot: it does not begin with its version")
    return _VERSION_DECODER.decode(_FIRST[:1] + first[1:]).version


def renewed(data: bytes | memoryview) -> bytes:
    """Return a snapshot of :data:`EARLIER_VERSION` in today's form.

    Raises CodecError where the nodes are not of that version, and one of :data:`UNDECODABLE` for bytes of another kind.
    """
    told = msgspec.msgpack.decode(data)
    try:
        state = told["state"]
        for tree in (state["tree"], state["transient"]["tree"]):
            for node in tree["nodes"].values():
                _renew(node, tree["nodes"], tree["page_size"] * TOKEN_BYTES)
    except (AttributeError, KeyError, TypeError, struct.error) as error:
        raise CodecError(f"not a snapshot of version {EARLIER_VERSION}: {error}") from error
    told["version"], told["coming"] = _VERSION, {}
    return msgspec.msgpack.encode(told)


def _renew(node: dict[str, Any], nodes: dict[int, Any], page_bytes: int) -> None:
    lists: list[bytes] = []
    for tier in _TIERS:
        held = node.pop(tier, {})
        if held:
            node[tier] = list(held)
            lists += held.values()
    digests = written(node.pop(_DIGEST, 0), node.pop(_END_DIGEST, 0))
    if digests != NO_DIGESTS or lists:
        node[_RECORD] = with_lists(digests, lists)
    rare = {name: node.pop(name) for name in _RARELY if name in node}
    if rare:
        node[_RARE] = rare
    children = node.get(_CHILDREN, {})
    if len(children) == 1:
        (node[_CHILDREN],) = children.values()
    elif children:
        node[_CHILDREN] = keyed_by_page([(nodes[each][_TOKENS], each) for each in children.values()], page_bytes)


def _narrow_labels(tree: PrefixTree) -> None:
    """Give nodes with packed int32 tokens the labels that this tree would have given them.

    Raises CodecError for a node whose bytes are not whole tokens.
    """
    for node in tree.nodes.values():
        if len(node.label) % TOKEN_BYTES:
            raise CodecError(f"node {node.id} has {len(node.label)} bytes of tokens")
        if node.parent:
            node.label, is_wide = label_of(node.label, is_kept=tree.has_digests)
            node.set_rare(is_wide=is_wide)


def _require(kind: str, name: str, known: Container[str]) -> None:
    if name not in known:
        raise PolicyMissing.of("the snapshot", f"{kind} {name!r}")


def _take_orders(
    state: CellState, kept: dict[str, _KeptPolicy], coming: dict[str, _KeptPolicy], announce: Announce
) -> None:
    both = [*kept.values(), *coming.values()]
    for each in both:
        _require("policy", each.name, POLICIES)
    others = {each.name: each.state_version for each in both if each.state_version != _version_here(each)}
    if others:
        for name, version in others.items():
            here = POLICIES[name].state_version
            announce(f"policy {name!r} begins anew: the snapshot has version {version} of its state, this is {here}")
        renew_orders(state)
        state.timers.pop(RENEWAL_TIMER, None)
        return
    state.orders = _decoded(kept)
    if state.renewal is not None:
        state.renewal.orders = _decoded(coming)


def _version_here(kept: _KeptPolicy) -> int:
    return POLICIES[kept.name].state_version


def _decoded(kept: dict[str, _KeptPolicy]) -> dict[str, Policy]:
    orders = {pool: POLICIES[each.name].decode(bytes(each.state)) for pool, each in kept.items()}
    for pool, policy in orders.items():
        policy.join(orders_of_tier(orders, pool.partition("/")[0]))
    return orders


def _share(nodes: dict[int, Node]) -> None:
    """Share objects again: one number object for every mention of a node, and equal names, counts and depths of nodes.

    Decoding makes an object for every mention: three more ids of 32 bytes for each node.
    """
    # One pass with plain dictionaries: for a million nodes it is a tenth of a restart, and three passes were a fifth.
    own_id = dict(zip(nodes, nodes, strict=True)).get
    names: dict[tuple[str, ...], tuple[str, ...]] = {}
    common = owned(0, is_wide=True)
    for node_id, node in nodes.items():
        node.id = node_id
        node.parent = own_id(node.parent, node.parent)
        children = node.children
        if isinstance(children, int):
            node.children = own_id(children, children)
        else:
            for key, child_id in children.items():
                children[key] = own_id(child_id, child_id)
        node.depth = shared_depth(node.depth)
        if node.device:
            node.device = names.setdefault(node.device, node.device)
        if node.host:
            node.host = names.setdefault(node.host, node.host)
        if len(node.below) == 1:
            node.below = shared_count(node.below)
        if node.rare == common:
            node.rare = common
        elif node.rare is not NOTHING_RARE:
            node.set_rare()
