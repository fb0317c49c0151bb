"""The duel finds the rule that suits a workload, soon, and forgets it when the workload changes."""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.policies.thermo.duel import MOST_ENTERING, MOST_HELD, Duel
from services.scheduler.policies.thermo.law import COUNT_SHIFT, Law
from services.scheduler.policies.thermo.rules import FADING, FREQUENCY, LASTING, LEARNED, RECENCY, ROUNDS, RULES

TOKENS = 100


class Player:
    """Asks for items of ``TOKENS`` tokens each, one a request, of a pool of so many items."""

    def __init__(self, capacity: int) -> None:
        self.duel, self.capacity = Duel(), capacity
        self.uses: dict[int, int] = {}
        self.now = 0.0
        self.rules: list[int] = []

    def ask(self, item: int) -> None:
        self.now += 1.0
        self.duel.reused(item)
        self.uses[item] = self.uses.get(item, 0) + 1
        self.duel.used(item, TOKENS)
        for digest, weight in self.duel.entering:
            self.duel.enter(digest, self.now, self.uses[digest] << COUNT_SHIFT, weight)
        self.duel.entering = []
        self.rules.append(self.duel.settle(self.capacity * TOKENS, TOKENS, 1.0, self.now, Law()))


def popular(count: int, items: int) -> Iterator[int]:
    """Some items often, some seldom, always the same ones."""
    value = 7
    for _ in range(count):
        value = (value * 1_103_515_245 + 12_345) % 2**31
        yield int(items * ((value >> 16) / 2**15) ** 3)


def fashions(count: int, size: int = 20, length: int = 120) -> Iterator[int]:
    """A few items again and again in no order, then others, and the first ones never again."""
    value = 7
    for number in range(count):
        value = (value * 1_103_515_245 + 12_345) % 2**31
        yield number // length * size + (value >> 16) % size


def test_rounds_are_the_rule_before_anything_came_back() -> None:
    """Where everything is asked for in turn, the first to go is the newest, from the first eviction on."""
    player = Player(50)
    for number in range(90 * 5):
        player.ask(number % 90)

    assert set(player.rules) == {ROUNDS}


def test_frequency_wins_where_popularity_is_fixed() -> None:
    """Or uses that fade slowly: within five hundred requests and for good, whichever comes first among equals."""
    player = Player(30)
    for item in popular(1500, 400):
        player.ask(item)

    assert set(player.rules[500:]) <= {FREQUENCY, ROUNDS, LASTING}


def test_recency_wins_where_fashions_change() -> None:
    """What was popular is worth nothing then."""
    player = Player(30)
    for item in fashions(2500):
        player.ask(item)

    assert player.rules[-1] == RECENCY


def test_the_rule_follows_a_change_of_workload() -> None:
    """Old evidence fades: popularity first, then fashions."""
    player = Player(30)
    for item in popular(1500, 400):
        player.ask(item)
    before = player.rules[-1]
    for item in fashions(4000):
        player.ask(10**7 + item)

    assert before in (FREQUENCY, ROUNDS, LASTING)
    assert player.rules[-1] in {RECENCY, FADING, LASTING}


def test_scouts_leave_when_the_pool_was_full() -> None:
    """Their evidence is handed over, as far as a little goes."""
    player = Player(40)
    for item in popular(30, 400):
        player.ask(item)
    has_scouts_before = player.duel.scouts is not None
    for item in popular(600, 400):
        player.ask(item)

    assert has_scouts_before
    assert player.duel.scouts is None


def test_memory_of_a_huge_pool_is_bounded() -> None:
    """The larger the pool, the fewer tokens are sampled."""
    player = Player(1_000_000)
    for number in range(20_000):
        player.ask(number)
    shadows = player.duel.shadows

    assert len(shadows.rows) <= RULES * (MOST_HELD + 64)
    assert player.duel.tokens > 400 * TOKENS


def test_nodes_without_a_request_are_sampled_in_bounded_number() -> None:
    """Many nodes can be added between two requests."""
    duel = Duel()
    for number in range(10_000):
        duel.used(number, TOKENS)

    assert len(duel.entering) == MOST_ENTERING


def test_the_learned_rule_cannot_win_before_it_has_learned() -> None:
    """Until then it ranks by recency, and that rule is there under its own name."""
    player = Player(30)
    for item in fashions(2500):
        player.ask(item)

    assert LEARNED not in player.rules
