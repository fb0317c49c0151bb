"""Which cells hold which heads, against a naive model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.gateway.prompt_heads import Head
from services.gateway.router.head_index import OWN, HeadIndex

CELLS = ("a", "b", "c")
GATEWAYS = (OWN, "g1", "g2")
MOST = 5

sources = st.tuples(st.sampled_from(CELLS), st.sampled_from(GATEWAYS))
digests = st.lists(st.integers(1, 12), max_size=7, unique=True)


class IndexMachine(RuleBasedStateMachine):
    """The model has an ordered dictionary for each source."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HeadIndex(MOST)
        self.model: dict[tuple[str, str], dict[int, float]] = {}
        self.now_s = 0.0

    @rule(source=sources, found=digests)
    def add(self, source: tuple[str, str], found: list[int]) -> None:
        self.now_s += 1
        self.index.add(source, found, self.now_s)
        held = self.model.setdefault(source, {})
        for digest in found:
            held.pop(digest, None)
            held[digest] = self.now_s
        while len(held) > MOST:
            del held[next(iter(held))]

    @rule(source=sources, found=digests)
    def remove(self, source: tuple[str, str], found: list[int]) -> None:
        self.index.remove(source, found)
        for digest in found:
            self.model.get(source, {}).pop(digest, None)

    @rule(source=sources)
    def drop(self, source: tuple[str, str]) -> None:
        self.index.drop(source)
        self.model.pop(source, None)

    @rule(source=sources, age=st.integers(0, 4))
    def expire(self, source: tuple[str, str], age: int) -> None:
        self.index.expire(source, self.now_s - age)
        held = self.model.get(source, {})
        for digest in [digest for digest, told_s in held.items() if told_s < self.now_s - age]:
            del held[digest]

    @rule(asked=digests)
    def match(self, asked: list[int]) -> None:
        head = Head(tuple(asked), tuple(10 * (place + 1) for place in range(len(asked))), 100)
        expected = {}
        for cell in CELLS:
            held = {digest for source, found in self.model.items() if source[0] == cell for digest in found}
            deepest = max((place for place, digest in enumerate(asked, 1) if digest in held), default=0)
            if deepest:
                expected[cell] = 10 * deepest
        known = {digest for found in self.model.values() for digest in found}
        unknown = next((digest for digest in asked if digest not in known), asked[-1] if asked else 0)

        assert self.index.matches(head) == expected
        assert self.index.first_unknown(head) == unknown

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert len(self.index) == len({digest for found in self.model.values() for digest in found})
        for cell in CELLS:
            found = sum(len(held) for source, held in self.model.items() if source[0] == cell)
            assert self.index.count(cell) == found


TestHeadIndex = IndexMachine.TestCase
