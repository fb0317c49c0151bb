"""What an eviction policy is: one object a pool, told of everything that happens to the pool's nodes.

A policy is plain data (a msgspec struct). A snapshot carries its bytes beside its name and the version of its state,
so a fold that goes on from one evicts the same nodes as a fold that never stopped. It may look at nodes and keep
records of its own, keyed by node id while a node is resident and by ``node.digest`` afterwards. Which nodes may be
evicted at all is not its business (see :mod:`residency`): a leaf of what is resident that nothing locks.

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
"""A node by its id, if it is resident in the pool and may be evicted now; otherwise None."""


class Hotness(Protocol):
    """Where a policy looks up what is remembered of a prefix, resident or not."""

    @property
    def ages(self) -> int:
        """How often all clocks were lowered by one so far."""

    def lookup(self, digest: int) -> tuple[int, int]:
        """(frequency, clock) of what has this ``Node.digest``; (0, 0) when nothing is known."""


@dataclass(slots=True)
class Moment:
    """What a policy may know of the present besides the node: no policy sees the future."""

    seq: int  # Of the input that is being folded.
    time_ns: int
    requests: int  # Requests that were admitted in the cell so far.
    hotness: Hotness
    # What restoring a token costs as measured on the workers, neutral until something is known (see speed_fit).
    cost_depth_tokens: float = 0.0  # Depth at which computing a token takes twice what it takes at the top; 0: never.
    host_cost: float = 1.0  # Of loading a token from host memory, relative to computing one at the top.
    lent_cost: float = 1.0  # Of having a token lent by another node, relative to the same; of a host pool only.
    admission: int = 0  # For which request something happens, by the number of its admission in the cell; 0: for none.


class Policy(msgspec.Struct):
    """Base of all policies. Subclasses override what they need; every method mutates only the policy."""

    name: ClassVar[str]  # What settings and snapshots call it; bases of several policies have none.
    state_version: ClassVar[int] = 1  # Raised when :meth:`decode` no longer reads what :meth:`encode` gave before.

    capacity: int = 0  # Of the pool, in tokens.

    @classmethod
    def make(cls, capacity: int, config: CellConfig) -> Self:
        """Return a fresh policy for a pool of ``capacity`` tokens. Overridden by policies that have settings."""
        return cls(capacity=capacity)

    def join(self, others: Sequence[Policy]) -> None:
        """Join the pools of its tier, itself perhaps among them: new, or decoded. It may learn with them."""

    def leave(self, others: Sequence[Policy]) -> None:
        """Leave the pools of its tier: this pool is gone, and the others may need what it knew."""

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Note an admitted request of ``prompt_tokens`` that reuses these resident nodes, top first, maybe none."""

    def ended(self, admission: int, answer_tokens: int) -> None:
        """Note the end of that admission's request; so many tokens were sampled for it."""

    def add(self, node: Node, moment: Moment) -> None:
        """Note a node that became resident: computed, loaded or backed up. A parent is added before its children."""

    def admission_of(self, node: Node) -> int:
        """Return the admission of the request that used the resident node last, as far as the policy knows; else 0."""
        return 0

    def remove(self, node: Node, moment: Moment) -> None:
        """Note a node that left the pool, evicted or dropped; ``node`` still has its last values."""

    def split(self, upper: Node, lower: Node) -> None:
        """Note a resident node that was cut in two; ``lower`` keeps its id and both are resident now."""

    def offer(self, node: Node) -> None:
        """Note a node that may be evicted from now on, or was offered before and has changed. Repeats are harmless."""

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the node to evict next, or None when none is evictable. The caller does evict it, or a lower part of
        it.
        """
        raise NotImplementedError

    def prepare(self) -> bool:
        """Do some work now that a later call would do, if there is any that decides nothing; returns whether."""
        return False

    def encode(self) -> bytes:
        """All that it remembers, for a snapshot. Equal policies give equal bytes; does not mutate."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Undo :meth:`encode`. Raises CodecError for bytes that it did not make."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except UNDECODABLE as error:
            raise CodecError(f"not a state of policy {cls.name!r}: {error}") from error

    def share_numbers(self, nodes: Mapping[int, Node]) -> None:
        """Save memory after :meth:`decode`, which makes a number object for every mention of an id in ``nodes``."""

    def check(self) -> str:
        """Return what contradicts itself in what it remembers, from scratch; "" is nothing. For tests; does not
        mutate.
        """
        return ""


class Renewal(msgspec.Struct):
    """A change of policy: the new policies, while they are told of what is resident (see :mod:`eviction_orders`).

    The policies before stay in force until then: what leaves a pool meanwhile is what they name, and a pool is never
    without a victim because its policy does not know its nodes yet. What happens to a node that the new policies know
    they hear as well; of one that they do not know they hear nothing before its turn comes.
    """

    left: list[int] = []  # Ids of nodes to be told of with all below them, the next one at the end.
    told: dict[int, None] = {}  # Nodes that the new policies know, by id; some of them may be gone.
    orders: dict[str, Policy] = {}  # The new policies, as in the state; apart in snapshots.


def size_of(node: Node) -> int:
    """Tokens of a node's own span."""
    return node.size


P = TypeVar("P", bound=type[Policy])

POLICIES: dict[str, type[Policy]] = {}
"""In order of registration, on which no decision may depend."""


def register_policy(policy: P) -> P:
    """Add a policy under the name that its class has; a decorator. Raises ValueError when another has that name."""
    if POLICIES.setdefault(policy.name, policy) is not policy:
        raise ValueError(f"policies {POLICIES[policy.name].__qualname__} and {policy.__qualname__} are {policy.name!r}")
    return policy


def make_policy(name: str, capacity: int, config: CellConfig, others: Sequence[Policy] = ()) -> Policy:
    """Return a fresh policy for a pool of ``capacity`` tokens, beside the others of its tier.

    Raises KeyError for a name that is not in POLICIES.
    """
    policy = POLICIES[name].make(capacity, config)
    policy.join(others)
    return policy
