"""What a router knows of its cells, by what it hears and sends."""

from __future__ import annotations

from math import exp

import pytest
from msgspec.structs import replace

from services.gateway.held_heads import pack_heads
from services.gateway.prompt_heads import Asked, Head
from services.gateway.router.cell_work import UNTOLD_SWEEPS, WORK_S
from services.gateway.router.cells import FORGET_S, OWN_S, STALE_S, Cells
from services.gateway.router.choice import Choice
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
    cells.begin(Choice(first, 0), HEAD, 1.0)
    longer = Head((1, 2, 3, 9), (1000, 2000, 3000, 4000), 4000)

    assert chosen(cells, longer) == first
    assert cells.index.count(first) == 3


def test_requests_without_a_prompt_and_refused_ones_are_no_short_prompts(cells: Cells) -> None:
    """Load is priced in average prompts: after a thousand calls of ``/tokenize`` it would cost nothing."""
    cells.hear_heads(heads("a", 1, 1, 2, 3), 1.0)
    cells.hear_load(load("a", 1, running=40), 1.0)
    before = chosen(cells)
    for nbytes in (0, 20) * 1000:
        cells.begin(Choice("b", 0), Head(nbytes=nbytes), 1.0)
        cells.end("b", answered_bytes=0)
    after = chosen(cells)
    for _ in range(2000):
        cells.begin(Choice("b", 0), Head(nbytes=20), 1.0)
        cells.end("b", answered_bytes=20)

    assert (before, after, chosen(cells)) == ("b", "b", "a")


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
    cells.begin(Choice("a", 0), HEAD, 1.0)
    cells.hear_load(load("a", running=5), 2.0)
    counted = cells.by_name["a"].candidate.busy
    cells.begin(Choice("a", 0), HEAD, 2.0)
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


def test_a_gateway_that_ended_is_forgotten_beside_one_that_goes_on(cells: Cells) -> None:
    """Each start of a gateway has a name of its own, and a cell has room for so many only."""
    cells.hear_heads(heads("a", 0, 1, 2, 3, first=True), 0.0)
    cells.hear_load(load("a", 0), 0.0)
    other = replace(load("a", -1), gateway="another")
    cells.hear_load(other, 0.0)

    cells.hear_load(other, FORGET_S + 1)
    cells.sweep(FORGET_S + 1)

    assert list(cells.by_name["a"].feeds) == ["another"]
    assert cells.index.count("a") == 0


def test_what_was_sent_is_forgotten_where_the_cell_tells(cells: Cells) -> None:
    """Then the cell knows better, such as that it has evicted it."""
    cells.begin(Choice("a", 0), HEAD, 0.0)
    cells.sweep(OWN_S + 1)

    assert cells.index.count("a") == 0


def test_what_was_sent_counts_for_good_where_nobody_tells() -> None:
    """A router without a broker goes by what it sent."""
    cells = Cells(["a", "b"])
    cells.begin(Choice("a", 0), HEAD, 0.0)
    cells.sweep(OWN_S + 1)

    assert cells.index.count("a") == 3


def test_closed_cells_and_those_that_refused_are_left_out(cells: Cells) -> None:
    """None is left of none."""
    cells.begin(Choice("a", 0), HEAD, 0.0)
    cells.closed("a")
    away = chosen(cells)
    cells.opened("a")

    assert away == "b"
    assert chosen(cells) == "a"
    assert cells.choose(Asked(HEAD), without=("a", "b")) is None


def test_a_session_follows_its_last_request(cells: Cells) -> None:
    """Also where it was moved."""
    for name in ("a", "b"):
        cells.begin(Choice(name, 0), Head(), 0.0, session="s")

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


def work(cells: Cells, name: str = "a") -> float:
    return round(cells.by_name[name].candidate.work)


def test_work_is_what_all_gateways_asked_for_less_what_the_cell_found(cells: Cells) -> None:
    """A gateway's first word is where counting begins, and one that began anew has asked for nothing."""
    for asked, found, life in ((1000, 500, "one"), (3000, 1500, "one"), (50, 1500, "two")):
        cells.hear_load(load("a", incarnation=life, asked_tokens=asked, found_tokens=found, token_bytes=4.0), 1.0)

    assert work(cells) == (3000 - 1500) * 4


def test_an_older_count_of_what_was_found_is_passed_over(cells: Cells) -> None:
    """Gateways tell by turns; a count that begins again, behind a cell that lost all, is followed."""
    for asked, found in ((1000, 1000), (2000, 1400), (2000, 1300), (2400, 1500), (2400, 0), (2900, 100)):
        cells.hear_load(load("a", asked_tokens=asked, found_tokens=found, token_bytes=1.0), 1.0)

    assert work(cells) == 2900 - 1000 - 500 - 100


def test_what_was_sent_is_work_until_the_cell_tells_the_real_one(cells: Cells) -> None:
    """The bytes that were not known to be held; a cell that tells nothing is taken at the router's word."""
    cells.hear_load(load("a", asked_tokens=10), 1.0)
    for name in ("a", "b"):
        cells.begin(Choice(name, 1000), HEAD, 1.0)
    at_once = [work(cells, name) for name in "ab"]
    for _ in range(UNTOLD_SWEEPS):
        cells.sweep(1.0)

    assert at_once == [2040, 2000]
    assert [work(cells, name) for name in "ab"] == [40, 2000]


def test_work_grows_old(cells: Cells) -> None:
    """So that a cell which was busy long ago is chosen again."""
    cells.begin(Choice("b", 0), HEAD, 0.0)
    cells.sweep(0.0)
    before = work(cells, "b")
    cells.sweep(3600.0)

    assert (before, work(cells, "b")) == (3000, round(3000 * exp(-3600.0 / WORK_S)))


def test_routers_in_turn_send_a_conversation_to_one_cell() -> None:
    """By its name where its prompts begin differently, by what the cells tell where they go on."""
    names = ["a", "b", "c", "d"]
    first, restarted = Cells(names), Cells(names)
    by_name = [
        (
            chosen(first, Head((2 * n,), (1000,), 1000), session=f"s{n}"),
            chosen(restarted, Head((2 * n + 1,), (1000,), 1000), session=f"s{n}"),
        )
        for n in range(100, 140)
    ]
    restarted.hear_load(load("c"), 0.0)
    restarted.hear_heads(heads("c", 0, 1, 2, first=True), 0.0)

    assert all(before == after for before, after in by_name)
    assert {before for before, _ in by_name} == set(names)
    assert chosen(restarted, HEAD, session="told") == "c"


def test_a_session_stays_while_its_cell_lives(cells: Cells) -> None:
    """Also when another cell holds more; it moves when its cell is closed, and stays there."""
    cells.begin(Choice("a", 0), Head(), 0.0, session="s")
    cells.hear_heads(heads("b", 1, 1, 2, 3), 1.0)
    before = chosen(cells, session="s")
    cells.closed("a")
    moved = chosen(cells, session="s")
    cells.begin(Choice(moved, 0), HEAD, 1.0, session="s")
    cells.opened("a")

    assert (before, moved) == ("a", "b")
    assert chosen(cells, session="s") == "b"


def test_a_cell_with_another_model_of_the_name_gets_no_requests(cells: Cells) -> None:
    """Whatever it holds, and also where it alone is open: its answers would be another model's."""
    cells.hear_load(load("a", models=("m",), fingerprint="one"), 1.0)
    cells.hear_load(load("b", models=("m",), fingerprint="two"), 1.0)
    cells.hear_heads(heads("b", 1, 1, 2, 3), 1.0)

    (odd,) = cells.other_models.items()

    assert chosen(cells) == "a"
    assert odd[0] == "b"
    assert "than that of the cell a (one)" in odd[1]
    cells.closed("a")
    assert cells.choose(Asked(HEAD, "m")) is None


def test_cells_with_one_model_or_of_an_earlier_release_are_all_chosen(cells: Cells) -> None:
    """An earlier release tells no fingerprint, and models of two names are not compared."""
    cells.hear_load(load("a", models=("m",), fingerprint="one"), 1.0)
    cells.hear_load(load("b", models=("m",)), 1.0)

    assert cells.other_models == {}

    cells.hear_load(load("b", models=("other",), fingerprint="two"), 2.0)

    assert cells.other_models == {}
    assert chosen(cells, model="other") == "b"
