"""The interface of eviction policies: one object for each pool, told of everything that happens to the pool's nodes.

A policy is plain data (a msgspec struct). A snapshot carries its bytes beside its name and the version of its state,
so a fold that goes on from one evicts the same nodes as a fold that never stopped. It may look at nodes and keep
records of its own, keyed by node id while a node is resident and by ``node.digest`` afterwards. Which nodes may be
evicted at all is decided elsewhere (see :mod:`residency`): unlocked leaves of the resident nodes.

Sizes are in tokens everywhere, time in nanoseconds of the stream's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, TypeVar

import msgspec

from services.scheduler.core.cache.prefix_tree import Node
from shared.errors import CodecError
from shared.undecodable import UNDECODABLE

if TYPE_CHECKING:
    from shared.messages.cell_events import CellConfig

Evictable = Callable[[int], Node | None]
"""Returns a node by its id if it is resident in the pool and may be evicted now; otherwise None."""


class Hotness(Protocol):
    """Lookup of what is remembered of a prefix, resident or not."""

    @property
    def ages(self) -> int:
        """Number of times that all clocks were lowered by one so far."""

    def lookup(self, digest: int) -> tuple[int, int]:
        """Return (frequency, clock) of the prefix with this ``Node.digest``; (0, 0) when nothing is known."""


@dataclass(slots=True)
class Moment:
    """Facts about the present that a policy may use besides the node: no policy sees the future."""

    seq: int  # Sequence number of the input that is being folded.
    time_ns: int
    requests: int  # Requests admitted in the cell so far.
    hotness: Hotness
    # What restoring a token costs as measured on the workers, neutral until it is known (see speed_fit).
    cost_depth_tokens: float = 0.0  # Depth at which computing a token takes twice what it takes at the top; 0: never.
    host_cost: float = 1.0  # Loading a token from host memory, relative to computing one at the top.
    lent_cost: float = 1.0  # Having another node lend a token, relative to the same; host pools only.
    admission: int = 0  # The request that causes the event, by the number of its admission in the cell; 0: none.


class Policy(msgspec.Struct):
    """Base of all policies. Subclasses override what they need; every method changes only the policy."""

    name: ClassVar[str]  # Its name in settings and snapshots; bases of several policies have none.
    state_version: ClassVar[int] = 1  # Raised when :meth:`decode` no longer reads what :meth:`encode` wrote before.

    capacity: int = 0  # Size of the pool in tokens.

    @classmethod
    def make(cls, capacity: int, config: CellConfig) -> Self:
        """Return a fresh policy for a pool of ``capacity`` tokens. Overridden by policies that have settings."""
        return cls(capacity=capacity)

    def join(self, others: Sequence[Policy]) -> None:
        """Join the policies of the other pools of its tier, new or decoded; ``others`` may include itself.

        Policies that share what they learn override it.
        """

    def leave(self, others: Sequence[Policy]) -> None:
        """Leave the policies of its tier: this pool is gone, and the others may need what it knew."""

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Note an admitted request of ``prompt_tokens`` that reuses these resident nodes (top first, maybe none)."""

    def ended(self, admission: int, answer_tokens: int) -> None:
        """Note the end of that admission's request, for which ``answer_tokens`` tokens were sampled."""

    def add(self, node: Node, moment: Moment) -> None:
        """Note a node that became resident: computed, loaded or backed up. A parent is added before its children."""

    def admission_of(self, node: Node) -> int:
        """Return the admission of the request that used the resident node last; 0 where the policy does not know it."""
        return 0

    def remove(self, node: Node, moment: Moment) -> None:
        """Note a node that left the pool, evicted or dropped; ``node`` still has its last values."""

    def split(self, upper: Node, lower: Node) -> None:
        """Note a resident node that was cut in two: both are resident now, and ``lower`` keeps the id."""

    def offer(self, node: Node) -> None:
        """Note a node that may be evicted from now on, or has changed since it was offered. Repeats are harmless."""

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the node to evict next, or None when none is evictable.

        The caller does evict it, or a lower part of it.
        """
        raise NotImplementedError

    def prepare(self) -> bool:
        """Do some work that later calls would wait for, if there is any; return whether there was.

        It is called in steps that do little else, and may never be: calls that need the work do what is left of it.
        """
        return False

    def encode(self) -> bytes:
        """Return all that it remembers, for a snapshot. Equal policies give equal bytes; the policy is unchanged."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the policy that :meth:`encode` wrote. Raises CodecError for other bytes."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except UNDECODABLE as error:
            raise CodecError(f"not a state of policy {cls.name!r}: {error}") from error

    def share_numbers(self, nodes: Mapping[int, Node]) -> None:
        """Save memory after :meth:`decode`, which makes a new int for every mention of an id in ``nodes``."""

    def check(self) -> str:
        """Return a contradiction in its state, computed from scratch; "" for none. For tests; changes nothing."""
        return ""


class Renewal(msgspec.Struct):
    """A change of policy: the new policies, while they are told of all resident nodes (see :mod:`eviction_orders`).

    The old policies stay in force until then: they name the victims, and a pool is never without a victim because its
    policy does not know its nodes yet. The new policies are also told of events of nodes that they know already; they
    hear of other nodes when their turn comes.
    """

    left: list[int] = []  # Ids of nodes to announce with all below them, the next one at the end.
    told: dict[int, None] = {}  # Ids of nodes that the new policies know; some may be gone.
    orders: dict[str, Policy] = {}  # The new policies, keyed as in the state; kept apart in snapshots.


def size_of(node: Node) -> int:
    """Return the number of tokens in a node's own span."""
    return node.size


P = TypeVar("P", bound=type[Policy])

POLICIES: dict[str, type[Policy]] = {}
"""Policies by name, in order of registration; no decision may depend on that order."""


def register_policy(policy: P) -> P:
    """Register a policy class under its ``name``; a decorator. Raises ValueError when another has that name."""
    if POLICIES.setdefault(policy.name, policy) is not policy:
        raise ValueError(f"policies {POLICIES[policy.name].__qualname__} and {policy.__qualname__} are {policy.name!r}")
    return policy


def make_policy(name: str, capacity: int, config: CellConfig, others: Sequence[Policy] = ()) -> Policy:
    """Return a fresh policy for a pool of ``capacity`` tokens, joined to the others of its tier.

    Raises KeyError for a name that is not in POLICIES.
    """
    policy = POLICIES[name].make(capacity, config)
    policy.join(others)
    return policy
