"""How many connections a server has, and which of them makes way."""

from __future__ import annotations

from services.gateway.connections import Connections


class Made:
    """A connection that notes that it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def make_way(self) -> None:
        self.is_closed = True


def admitted(bounds: Connections, count: int) -> list[Made]:
    made = [Made() for _ in range(count)]
    for each in made:
        assert bounds.admit(each)
    return made


def test_the_longest_idle_connection_makes_way() -> None:
    """Whoever asked since is not idle."""
    bounds = Connections(3, 1.0)
    first, second, third = admitted(bounds, 3)
    bounds.asks(first)
    bounds.asks(second)
    bounds.rests(second)

    admitted(bounds, 1)

    assert [each.is_closed for each in (first, second, third)] == [False, False, True]
    assert len(bounds) == 3


def test_where_all_are_at_work_another_is_refused() -> None:
    """And is not counted."""
    bounds = Connections(2, 1.0)
    for each in admitted(bounds, 2):
        bounds.asks(each)
    another = Made()

    assert not bounds.admit(another)

    assert len(bounds) == 2


def test_a_closed_connection_leaves_room_once() -> None:
    """However often that is said, and whatever is said of it afterwards."""
    bounds = Connections(1, 1.0)
    (first,) = admitted(bounds, 1)
    bounds.forget(first)
    bounds.forget(first)
    bounds.rests(first)
    (second,) = admitted(bounds, 1)
    bounds.asks(second)

    assert not bounds.admit(Made())
    assert not first.is_closed
