"""The kit finds each way in which a policy can be wrong, and says which."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Self

import pytest

from thermocline.policies import CellConfig, CodecError, Evictable, Moment, Node, Policy, Rank, RankedPolicy
from thermocline.testing import ContractBroken, PolicyContract

Test = Callable[[PolicyContract], None]


class Careful(RankedPolicy):
    """Keeps the contract."""

    name = "careful"

    def rank(self, node: Node) -> Rank:
        return (node.last_use, node.id)


class NamesLocked(Careful):
    """Does not ask whether a node may leave."""

    name = "names-locked"
    nodes: dict[int, Node] = {}

    def add(self, node: Node, moment: Moment) -> None:
        self.nodes[node.id] = node

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        return next(iter(self.nodes.values()), None)

    def encode(self) -> bytes:
        return b""

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls()


class Forgets(Careful):
    """Loses sight of a node that it named and that stayed."""

    name = "forgets"
    named: dict[int, bool] = {}

    def offer(self, node: Node) -> None:
        if node.id not in self.named:
            super().offer(node)

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        found = super().victim(evictable, moment)
        if found is not None:
            self.named[found.id] = True
        return found


class Forgetful(Careful):
    """Writes less than it goes by."""

    name = "forgetful"

    def encode(self) -> bytes:
        return Careful(capacity=self.capacity).encode()


class ComesToNoEnd(Careful):
    """Asks again and again."""

    name = "no-end"

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        while evictable(1) is None:
            pass
        return super().victim(evictable, moment)


class LooksAtTheClock(Careful):
    """Ranks by a clock of its own."""

    name = "clock"

    def rank(self, node: Node) -> Rank:
        return (time.monotonic_ns(),)


class Draws(Careful):
    """Ranks by chance."""

    name = "chance"
    drawn: dict[int, float] = {}

    def add(self, node: Node, moment: Moment) -> None:
        self.drawn[node.id] = random.random()

    def split(self, upper: Node, lower: Node) -> None:
        self.drawn[upper.id] = self.drawn[lower.id]

    def rank(self, node: Node) -> Rank:
        return (self.drawn[node.id],)


class DrawsOnce(Careful):
    """Is made by chance, and goes by that."""

    name = "drawn-once"
    salt: int = 0

    @classmethod
    def make(cls, capacity: int, config: CellConfig) -> Self:
        return cls(capacity=capacity, salt=random.getrandbits(20))

    def rank(self, node: Node) -> Rank:
        return (node.id ^ self.salt,)


class ByHash(Careful):
    """Ranks by what differs from process to process."""

    name = "by-hash"

    def rank(self, node: Node) -> Rank:
        return (hash(str(node.id)),)


class Meddles(Careful):
    """Changes the node that it is given."""

    name = "meddles"

    def add(self, node: Node, moment: Moment) -> None:
        node.hits += 1


class Hoards(Careful):
    """Remembers all that ever was."""

    name = "hoards"
    seen: list[int] = []

    def add(self, node: Node, moment: Moment) -> None:
        self.seen.append(node.digest)


class GoesOverAll(Careful):
    """Looks at every node for each victim."""

    name = "over-all"
    nodes: dict[int, int] = {}

    def add(self, node: Node, moment: Moment) -> None:
        self.nodes[node.id] = 0

    def remove(self, node: Node, moment: Moment) -> None:
        del self.nodes[node.id]

    def split(self, upper: Node, lower: Node) -> None:
        self.nodes[upper.id] = 0

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        found = None
        for node_id in self.nodes:
            node = evictable(node_id)
            if node is not None and (found is None or node.last_use < found.last_use):
                found = node
        return found


class TakesAnything(Careful):
    """Reads bytes that it did not make."""

    name = "takes-anything"

    @classmethod
    def decode(cls, data: bytes) -> Self:
        try:
            return super().decode(data)
        except CodecError:
            return cls()


class NeedsANode(Careful):
    """Fails where there is nothing."""

    name = "needs-a-node"

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        if not path and not self.latest:
            raise LookupError("no node")


def contract_for(kind: type[Policy]) -> PolicyContract:
    """The contract of one class."""
    contract = type("Contract", (PolicyContract,), {"policy": kind})()
    assert isinstance(contract, PolicyContract)
    return contract


class TestCareful(PolicyContract):
    """What is right passes, whatever else its module imports."""

    policy = Careful
    may_import = ("random", "time", "hash()")


WALKS, SAME = (
    PolicyContract.test_it_names_what_may_leave_and_forgets_nothing,
    (PolicyContract.test_the_same_inputs_give_the_same_victims_and_bytes),
)


@pytest.mark.parametrize(
    ("kind", "test", "said"),
    [
        (NamesLocked, WALKS, "which is gone, is locked or has children"),
        (Forgets, WALKS, "names none although nodes"),
        (Forgetful, WALKS, "what decode() reads is not equal to what encode() wrote"),
        (ComesToNoEnd, WALKS, "victim() comes to no end in a pool of"),
        (LooksAtTheClock, WALKS, "time.monotonic_ns() is called where decisions are made"),
        (Draws, WALKS, "random.random() is called where decisions are made"),
        (DrawsOnce, SAME, "decides otherwise when repeated"),
        (ByHash, SAME, "decides otherwise in a process with another hash seed"),
        (Meddles, WALKS, "add() changes a node"),
        (Hoards, PolicyContract.test_its_memory_is_bounded, "its state has"),
        (GoesOverAll, PolicyContract.test_its_work_does_not_grow_with_the_pool, "lines a request in a pool of 768"),
        (TakesAnything, PolicyContract.test_bytes_that_it_did_not_make_are_refused, "does not raise CodecError"),
        (
            LooksAtTheClock,
            PolicyContract.test_its_module_imports_no_clock_no_chance_and_no_files,
            "imports time",
        ),
    ],
)
def test_what_is_wrong_is_found_and_said(kind: type[Policy], test: Test, said: str) -> None:
    """With the name of the policy, or of its module."""
    with pytest.raises(ContractBroken) as caught:
        test(contract_for(kind))

    assert said in str(caught.value)


def test_what_a_policy_raises_comes_through() -> None:
    """With its own traceback, which says more than the kit could."""
    with pytest.raises(LookupError, match="no node"):
        PolicyContract.test_an_empty_pool_has_no_victim(contract_for(NeedsANode))
