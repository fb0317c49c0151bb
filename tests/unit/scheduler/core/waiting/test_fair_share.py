"""The ready order: priorities, fair share, arrival."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler.core.waiting.fair_share import Queue
from shared.errors import InvariantViolated


def fill(queue: Queue, *requests: tuple[int, str, int]) -> None:
    """Let requests wait, given as (priority, tenant, place in arrival order)."""
    for priority, tenant, arrival in requests:
        queue.add(priority, tenant, (1, arrival, f"{tenant}{arrival}"))


def order(queue: Queue, limit: int = 100, cost: int = 10) -> list[str]:
    """The ids in the order in which they would be served."""
    return queue.window(limit, lambda name: cost)


def serve_next(queue: Queue, tokens: Callable[..., Any], cost: int = 10) -> str:
    """Serve the first request; returns its id."""
    (name,) = order(queue, 1, cost)
    for priority, level in queue.levels.items():
        for tenant, lane in level.lanes.items():
            for entry in lane.waiting:
                if entry[2] == name:
                    queue.charge(priority, tenant, tokens(tenant), is_start=True)
                    queue.remove(priority, tenant, entry)
                    return name
    raise AssertionError("nobody waits")


def test_higher_priorities_go_first_whatever_their_tenant_was_served() -> None:
    """Shares are weighed within a priority only."""
    queue = Queue()
    fill(queue, (0, "a", 1), (5, "b", 2), (5, "b", 3), (0, "a", 4))
    queue.charge(5, "b", 1_000_000, is_start=True)

    assert order(queue) == ["b2", "b3", "a1", "a4"]


def test_a_tenant_with_one_request_does_not_wait_behind_a_thousand() -> None:
    """It goes right after what is served when it comes."""
    queue = Queue()
    fill(queue, *((0, "big", number) for number in range(1000)))
    for _ in range(10):
        serve_next(queue, lambda tenant: 100)
    fill(queue, (0, "small", 5000))

    assert "small5000" in order(queue, 2)


def test_tenants_take_turns_by_tokens_not_by_requests() -> None:
    """One whose requests cost four times as much gets a fourth as many through."""
    queue = Queue()
    for number in range(200):
        fill(queue, (0, "dear", 2 * number), (0, "cheap", 2 * number + 1))
    costs = {"dear": 400, "cheap": 100}
    served = [serve_next(queue, costs.__getitem__) for _ in range(100)]

    assert 18 <= sum(name.startswith("dear") for name in served) <= 22


def test_the_window_foretells_the_order_of_service() -> None:
    """What is looked at as a whole is what would be served one by one."""
    queue = Queue()
    chance = random.Random(3)
    fill(queue, *((chance.randrange(2), chance.choice("abc"), number) for number in range(60)))

    expected = order(queue, 60)
    assert [serve_next(queue, lambda tenant: 10) for _ in range(60)] == expected


def test_who_returns_stands_before_its_own_tenant_but_in_its_turn() -> None:
    """Rank 0 is the front of the lane; a tenant that was served less still goes first."""
    queue = Queue()
    fill(queue, (0, "a", 1), (0, "a", 2), (0, "b", 3))
    queue.add(0, "a", (0, 9, "back"))

    assert order(queue) == ["back", "b3", "a1", "a2"]


def test_a_tenant_that_was_away_does_not_make_up_for_it() -> None:
    """It starts where the others are, not at zero."""
    queue = Queue()
    fill(queue, *((0, "a", number) for number in range(100)))
    for _ in range(50):
        serve_next(queue, lambda tenant: 10)
    fill(queue, *((0, "late", 1000 + number) for number in range(50)))

    served = [serve_next(queue, lambda tenant: 10) for _ in range(40)]
    assert 18 <= sum(name.startswith("late") for name in served) <= 22


def test_leaving_the_queue_for_a_moment_wins_nothing() -> None:
    """A tag ahead of the others is remembered while its tenant waits for nothing."""
    queue = Queue()
    fill(queue, (0, "a", 1), (0, "b", 2), (0, "b", 3))
    queue.charge(0, "a", 500, is_start=True)
    queue.remove(0, "a", (1, 1, "a1"))
    fill(queue, (0, "a", 4))

    assert order(queue) == ["b2", "b3", "a4"]


def test_idle_tenants_are_forgotten() -> None:
    """However many tenants come and go, only so many tags are kept, and none when nobody waits."""
    queue = Queue()
    fill(queue, (0, "stays", 0))
    for number in range(5000):
        fill(queue, (0, f"t{number}", number + 1))
        queue.charge(0, f"t{number}", 10 + number, is_start=True)
        queue.remove(0, f"t{number}", (1, number + 1, f"t{number}{number + 1}"))

    assert len(queue.levels[0].idle) <= 1024
    queue.remove(0, "stays", (1, 0, "stays0"))
    assert queue == Queue()


def test_removing_what_does_not_wait_is_a_fault() -> None:
    """The caller's books would be wrong."""
    queue = Queue()
    fill(queue, (0, "a", 1))

    with pytest.raises(InvariantViolated):
        queue.remove(0, "a", (1, 2, "a2"))


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_keeps_the_books(seed: int) -> None:
    """Against a plain list: nothing is lost, doubled or out of order within a tenant."""
    chance = random.Random(seed)
    queue = Queue()
    model: dict[Any, Any] = {}
    for number in range(300):
        if model and chance.random() < 0.4:
            entry = chance.choice(sorted(model))
            priority, tenant = model.pop(entry)
            if chance.random() < 0.5:
                queue.charge(priority, tenant, chance.randrange(50), is_start=chance.random() < 0.5)
            queue.remove(priority, tenant, entry)
        else:
            entry = (chance.randrange(2), number, f"r{number}")
            priority, tenant = model[entry] = (chance.randrange(3), chance.choice("abcd"))
            queue.add(priority, tenant, entry)
        names = order(queue, 1000)
        assert sorted(names) == sorted(entry[2] for entry in model)
        assert queue.size == len(model)
        for kind in dict.fromkeys(model.values()):
            own = [entry[2] for entry in sorted(model) if model[entry] == kind]
            assert [name for name in names if name in own] == own
