"""What a router knows of its cells, by what it hears and sends."""

from __future__ import annotations

import pytest

from services.gateway.held_heads import pack_heads
from services.gateway.prompt_heads import Asked, Head
from services.gateway.router.cells import FORGET_S, OWN_S, STALE_S, Cells
from shared.messages.cells import CellHeads, CellLoad

HEAD = Head((1, 2, 3), (1000, 2000, 3000), 3000)


def load(cell: str, number: int = 0, *, running: int = 0, incarnation: str = "one", **extra: object) -> CellLoad:
    facts = {"workers": 4, "max_queued": 10, "heads_number": number, **extra}
    return CellLoad(cell=cell, gateway="g", incarnation=incarnation, running=running, **facts)  # type: ignore[arg-type]


def heads(cell: str, number: int, *added: int, first: bool = False, removed: tuple[int, ...] = ()) -> CellHeads:
    return CellHeads(
        cell=cell,
        gateway="g",
        incarnation="one",
        number=number,
        added=pack_heads(added),
        removed=pack_heads(removed),
        is_first=first,
    )


def chosen(cells: Cells, head: Head = HEAD, **extra: str) -> str:
    choice = cells.choose(Asked(head, extra.get("model", "")), session=extra.get("session", ""))
    assert choice is not None
    return choice.name


@pytest.fixture
def cells() -> Cells:
    made = Cells(["a", "b"])
    for name in ("a", "b"):
        made.hear_load(load(name), 0.0)
        made.hear_heads(heads(name, 0, first=True), 0.0)
    return made


def test_what_a_cell_tells_draws_prompts(cells: Cells) -> None:
    """Both ways round."""
    for number, name in enumerate(("a", "b"), 1):
        cells.hear_heads(heads(name, number if name == "a" else 1, 1, 2, 3), 1.0)
        if name == "a":
            first = chosen(cells)
            cells.hear_heads(heads("a", 2, removed=(1, 2, 3)), 1.0)

    assert first == "a"
    assert chosen(cells) == "b"


def test_what_was_sent_counts_at_once(cells: Cells) -> None:
    """The next turn follows the first before anybody has told."""
    first = chosen(cells)
    cells.begin(first, HEAD, 1.0)
    longer = Head((1, 2, 3, 9), (1000, 2000, 3000, 4000), 4000)

    assert chosen(cells, longer) == first
    assert cells.index.count(first) == 3


def test_a_gap_is_not_trusted_until_a_whole_summary_comes(cells: Cells) -> None:
    """The cell is asked for it meanwhile."""
    cells.hear_heads(heads("a", 2, 1, 2, 3), 1.0)
    held, wanted = cells.index.count("a"), cells.wanting()
    cells.hear_heads(heads("a", 3, 1, 2, 3, first=True), 1.0)

    assert (held, wanted) == (0, ["a"])
    assert (cells.index.count("a"), cells.wanting()) == (3, [])


def test_a_load_that_names_other_heads_shows_a_loss(cells: Cells) -> None:
    """Also when the last change was what got lost."""
    cells.hear_load(load("b", 5), 1.0)

    assert cells.wanting() == ["b"]


def test_a_new_life_of_a_gateway_has_told_nothing(cells: Cells) -> None:
    """What its earlier life told is void."""
    cells.hear_heads(heads("a", 1, 1, 2, 3), 1.0)
    cells.hear_load(load("a", incarnation="two"), 2.0)

    assert cells.index.count("a") == 0
    assert cells.wanting() == ["a"]


def test_load_is_what_was_told_and_what_was_sent_since(cells: Cells) -> None:
    """Requests of this router that the cell counted already are not counted twice."""
    cells.begin("a", HEAD, 1.0)
    cells.hear_load(load("a", running=5), 2.0)
    counted = cells.by_name["a"].candidate.busy
    cells.begin("a", HEAD, 2.0)
    more = cells.by_name["a"].candidate.busy
    cells.end("a")
    cells.end("a")

    assert (counted, more, cells.by_name["a"].candidate.busy) == (5, 6, 4)


def test_old_load_and_old_heads_are_forgotten(cells: Cells) -> None:
    """Load soon, heads later."""
    cells.hear_heads(heads("a", 1, 1, 2, 3), 0.0)
    cells.hear_load(load("a", 1, running=50, queued=10), 0.0)
    full = cells.by_name["a"].candidate.is_full
    cells.sweep(STALE_S + 1)
    stale = cells.by_name["a"].candidate
    counts = cells.index.count("a")
    cells.sweep(FORGET_S + 1)

    assert full
    assert (stale.busy, stale.is_full) == (0, False)
    assert (counts, cells.index.count("a")) == (3, 0)


def test_what_was_sent_is_forgotten_where_the_cell_tells(cells: Cells) -> None:
    """Then the cell knows better, such as that it has evicted it."""
    cells.begin("a", HEAD, 0.0)
    cells.sweep(OWN_S + 1)

    assert cells.index.count("a") == 0


def test_what_was_sent_counts_for_good_where_nobody_tells() -> None:
    """A router without a broker goes by what it sent."""
    cells = Cells(["a", "b"])
    cells.begin("a", HEAD, 0.0)
    cells.sweep(OWN_S + 1)

    assert cells.index.count("a") == 3


def test_closed_cells_and_those_that_refused_are_left_out(cells: Cells) -> None:
    """None is left of none."""
    cells.begin("a", HEAD, 0.0)
    cells.closed("a")
    away = chosen(cells)
    cells.opened("a")

    assert away == "b"
    assert chosen(cells) == "a"
    assert cells.choose(Asked(HEAD), without=("a", "b")) is None


def test_a_session_follows_its_last_request(cells: Cells) -> None:
    """Also where it was moved."""
    for name in ("a", "b"):
        cells.begin(name, Head(), 0.0, session="s")

    assert chosen(cells, session="s") == "b"


def test_requests_go_to_cells_that_serve_their_model(cells: Cells) -> None:
    """An unknown model goes to any, whose gateway refuses it."""
    cells.hear_load(load("a", models=("x",)), 1.0)
    cells.hear_load(load("b", models=("y",)), 1.0)

    assert chosen(cells, model="x") == "a"
    assert chosen(cells, model="y") == "b"
    assert chosen(cells, model="z") in {"a", "b"}


def test_prompts_without_a_head_are_spread(cells: Cells) -> None:
    """Short ones do not all go to one cell."""
    assert {chosen(cells, Head()) for _ in range(20)} == {"a", "b"}


def test_strangers_are_passed_over(cells: Cells) -> None:
    """Cells that are not configured leave no trace."""
    cells.hear_load(load("mallory"), 1.0)
    cells.hear_heads(heads("mallory", 0, 1, 2, 3, first=True), 1.0)

    assert list(cells.by_name) == ["a", "b"]
    assert len(cells.index) == 0
