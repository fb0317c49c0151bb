"""The choice of a cell, as a pure function."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.router.choice import Candidate, Choice, Rules, choose

RULES = Rules(spare=0.1, noise=0.0, few=1, price=4.0, session_over=1.0)


def chosen(*cells: Candidate, nbytes: int = 1000, key: int = 1, session: str = "", **matched: int) -> str:
    choice = choose(cells, nbytes=nbytes, matched=matched, mean_bytes=1000, key=key, session=session, rules=RULES)
    assert choice is not None
    return choice.name


def evenly(busy: int = 10) -> list[Candidate]:
    return [Candidate(name, 4, busy) for name in "abcd"]


def test_the_longest_match_wins_among_equally_loaded_cells() -> None:
    """Whatever the hash says."""
    assert {chosen(*evenly(), key=key, b=500, c=900) for key in range(50)} == {"c"}


def test_unknown_prompts_are_spread_and_equal_ones_meet() -> None:
    """By the key alone, whoever asks, and evenly."""
    found = Counter(chosen(*evenly(), key=key) for key in range(4000))

    assert chosen(*evenly(), key=7) == chosen(*reversed(evenly()), key=7)
    assert min(found.values()) > 800


def test_cells_with_more_workers_get_more() -> None:
    """In proportion."""
    cells = [Candidate("a", 30, 30), Candidate("b", 10, 10)]
    found = Counter(chosen(*cells, key=key) for key in range(4000))

    assert 2.5 < found["a"] / found["b"] < 3.5


def test_a_match_is_left_only_for_a_load_that_is_worth_it() -> None:
    """Within the spare share it stays; far above it goes; a longer match stays for longer."""
    a_little = [Candidate("a", 4, 10), *evenly()[1:]]
    more = [Candidate("a", 4, 20), *evenly()[1:]]
    much = [Candidate("a", 4, 60), *evenly()[1:]]

    assert chosen(*a_little, a=500) == "a"
    assert chosen(*more, a=200) != "a"
    assert chosen(*more, nbytes=9000, a=9000) == "a"
    assert chosen(*much, a=1000) != "a"


def test_a_session_stays_until_its_cell_has_twice_its_share() -> None:
    """Even where others hold more of the prompt."""
    crowded = [Candidate("a", 4, 60), *evenly()[1:]]

    assert chosen(*evenly(), session="a", b=1000) == "a"
    assert chosen(*crowded, session="a", b=1000) == "b"
    assert chosen(*evenly(), session="gone", b=1000) == "b"


def test_requests_leave_a_cell_that_had_more_than_its_share_of_work() -> None:
    """Although each has as many in progress; a cell that has next to nothing in progress is not left."""
    worked = [Candidate("a", 4, 10, work=90_000), *(Candidate(name, 4, 10, work=30_000) for name in "bcd")]
    idle = [Candidate("a", 4, 0, work=90_000), *(Candidate(name, 4, 0, work=30_000) for name in "bcd")]

    assert chosen(*worked, a=900) != "a"
    assert chosen(*worked, nbytes=90_000, a=90_000) == "a"
    assert chosen(*idle, a=900) == "a"


def test_a_full_cell_is_chosen_only_among_full_ones() -> None:
    """A match and a session do not help it."""
    full = Candidate("a", 4, 10, is_full=True)

    assert chosen(full, Candidate("b", 4, 10), session="a", a=1000) == "b"
    assert chosen(full) == "a"


def test_nothing_is_chosen_of_nothing() -> None:
    """No cell, no choice."""
    assert choose([], nbytes=1, matched={}, mean_bytes=1, key=1) is None


def test_a_hot_prefix_is_spread_when_one_cell_cannot_carry_it() -> None:
    """Requests with one prompt of average length fill its cell up to a bound, and then others."""
    cells = {name: Candidate(name, 4, 10) for name in "abcd"}
    holding = {"a": 1000}
    for _ in range(40):
        choice = choose(cells.values(), nbytes=1000, matched=holding, mean_bytes=1000, key=1, rules=RULES)
        assert choice is not None
        cells[choice.name].busy += 1
        holding[choice.name] = 1000

    assert max(cell.busy for cell in cells.values()) < 1.6 * sum(cell.busy for cell in cells.values()) / 4


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2000), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 2**64 - 1),
    st.integers(0, 10**6),
)
def test_every_state_has_a_choice(cells: list[tuple[int, int, bool]], key: int, nbytes: int) -> None:
    """And it is one of the cells, whatever order they come in."""
    made = [Candidate(f"c{place}", *each) for place, each in enumerate(cells)]
    arguments = {"nbytes": nbytes, "matched": {"c0": nbytes}, "mean_bytes": 100.0, "key": key}
    choice = choose(made, **arguments)  # type: ignore[arg-type]

    assert isinstance(choice, Choice)
    assert choice == choose(made[::-1], **arguments)  # type: ignore[arg-type]
