"""Where prompts leave what is cached: which kind of point it is, at which token, with what it cost."""

import random
from typing import Any

import pytest

from services.scheduler.core import find_admissions, find_divergences
from services.scheduler.core.cache.prefix_tree import ancestors
from services.scheduler.core.explain.divergence_points import MOST_SIBLINGS, common_bytes, tokens_in_step
from services.scheduler.core.explain.recollection import MOST_POINTS, Recollection
from services.scheduler.core.speed_fit import SpeedFit
from shared.ids import TOKEN_BYTES
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.cell_events import FlushCache
from shared.messages.explanations import DivergencePoint, Divergences, GetAdmissions, GetDivergences
from tests.stateful.cell_model import CellModel
from tests.stateful.model_pages import expected_output
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import PAGE
from tests.unit.scheduler.core.reading_in_part import QUARTER, put_in_parts, sparse_cell

SYSTEM = list(range(100, 140))
"""Ten pages of four tokens."""


def point_of(cell: CellModel, tokens: list[int], **options: Any) -> DivergencePoint:
    """A request is served; where its prompt left what was cached."""
    name = cell.serve(tokens, **{"max_tokens": 1} | options)
    point = find_admissions(cell.state, GetAdmissions(request_ids=(name,))).admissions[-1].point
    assert point is not None
    return point


def costly(cell: CellModel) -> Divergences:
    return find_divergences(cell.state, GetDivergences())


def test_a_changed_token_is_found_within_its_page(make_cell: MakeCell) -> None:
    """With the tokens of both sides; what stands behind it on both sides is lost, and no whole page of it reused."""
    cell = make_cell(pages=200)
    point_of(cell, [*SYSTEM[:6], 900, *SYSTEM[6:], 7, 8, 9])

    point = point_of(cell, [*SYSTEM[:6], 901, *SYSTEM[6:], 17, 18, 19])

    assert (point.kind, point.position, point.page_start) == ("diverged", 6, 4)
    assert unpack_int32(point.before) == SYSTEM[:6]
    assert unpack_int32(point.prompt) == [901, *SYSTEM[6:], 17, 18, 19]
    assert unpack_int32(point.cached)[:35] == [900, *SYSTEM[6:]]
    assert point.lost_tokens == len(SYSTEM) - 6


def test_the_nearest_of_several_paths_counts(make_cell: MakeCell) -> None:
    """That which agrees longest within the page where a node ends."""
    cell = make_cell(pages=400)
    for page in ([1, 2, 3, 4], [1, 2, 9, 9], [1, 8, 8, 8], [5, 5, 5, 5]):
        point_of(cell, [*SYSTEM, *page, *[6] * 8])

    point = point_of(cell, [*SYSTEM, 1, 2, 3, 7, *[7] * 8])

    assert (point.position, point.page_start) == (len(SYSTEM) + 3, len(SYSTEM))
    assert unpack_int32(point.cached)[0] == 4
    assert point.lost_tokens == 0


def test_equally_near_paths_are_told_by_the_newest(make_cell: MakeCell) -> None:
    """And no more than so many of the newest are looked at."""
    cell = make_cell(pages=4000)
    for number in range(MOST_SIBLINGS + 2):
        point_of(cell, [*SYSTEM, 1, 2000 + number, *[6] * 8])

    point = point_of(cell, [*SYSTEM, 1, 2000, *[7] * 8])

    assert point.position == len(SYSTEM) + 1
    assert unpack_int32(point.cached)[0] == 2000 + MOST_SIBLINGS + 1


@pytest.mark.parametrize("answered", [1, 9])
def test_the_next_turn_loses_nothing(make_cell: MakeCell, answered: int) -> None:
    """It goes on where the cached path ends; other conversations have the same beginning."""
    cell = make_cell(pages=200)
    point_of(cell, [*SYSTEM, 1, *[6] * 30])
    first = cell.serve([*SYSTEM, 2, *[8] * 9], max_tokens=answered)
    answer = expected_output(cell.submitted[first])

    point = point_of(cell, [*SYSTEM, 2, *[8] * 9, *answer, 7, 8, 9, *[5] * 20])

    assert (point.kind, point.lost_tokens, point.cached) == ("continued", 0, b"")
    assert point.position == (50 + len(answer) - 1) // 4 * 4


def test_a_prompt_that_is_cached_to_its_end_loses_nothing(make_cell: MakeCell) -> None:
    """Whether the cached path ends there too or goes on."""
    cell = make_cell(pages=200)
    point_of(cell, [*SYSTEM, *[5] * 20])

    for tokens in ([*SYSTEM, *[5] * 20], SYSTEM, [*SYSTEM, 5, 5]):
        point = point_of(cell, tokens)
        assert (point.kind, point.position, point.lost_tokens) == ("continued", len(tokens), 0)


def test_what_is_read_in_part_is_cached_though_it_has_no_node(make_cell: MakeCell) -> None:
    """The prompt goes on where that ends."""
    cell = sparse_cell(make_cell)
    document = list(range(1000, 1000 + 8 * PAGE))
    put_in_parts(cell, document)

    point = point_of(cell, [*document, *range(2 * PAGE + 3)], importance=QUARTER)

    assert (point.kind, point.position, point.lost_tokens) == ("continued", len(document), 0)


def test_what_has_left_is_told_apart_from_what_differs(make_cell: MakeCell) -> None:
    """With the tokens that would have been reused."""
    cell = make_cell(pages=200)
    point_of(cell, SYSTEM)
    cell.feed(FlushCache(call_id="1"))

    point = point_of(cell, [*SYSTEM, *[5] * 8])

    assert (point.kind, point.position, point.lost_tokens) == ("evicted", 0, len(SYSTEM))


def test_nothing_alike_and_nothing_read_are_told_apart(make_cell: MakeCell) -> None:
    """An empty cache, another namespace, other first tokens; and a request that reads no cache."""
    cell = make_cell(pages=200)

    assert point_of(cell, SYSTEM).kind == "new"
    assert point_of(cell, SYSTEM, salt="another").kind == "new"
    assert point_of(cell, [1, *SYSTEM]).kind == "new"
    assert point_of(cell, SYSTEM, read=False) == DivergencePoint(kind="opted_out")
    assert costly(cell).points == ()


def test_costs_are_in_time_once_the_speed_is_known(make_cell: MakeCell) -> None:
    """By what the worker's prefill took so far; before that they are not known."""
    cell = make_cell(pages=400)
    point_of(cell, [1, 900, *SYSTEM])
    cell.state.speed = SpeedFit()
    for worker in cell.state.workers.values():
        worker.speed = SpeedFit()
    unknown = point_of(cell, [1, 901, *SYSTEM])
    cell.state.speed.note_compute(100, 0, 20_000)

    known = point_of(cell, [1, 902, *SYSTEM])

    assert unknown.lost_tokens == known.lost_tokens == len(SYSTEM) - 2  # Two of them fill no page.
    assert (unknown.lost_us, known.lost_us > 0) == (0, True)


def test_the_costliest_points_of_the_cell_are_counted(make_cell: MakeCell) -> None:
    """The costliest first; prompts that leave the cache in one page are one point, whichever of its tokens differs."""
    cell = make_cell(pages=2000)
    for number in range(5):
        point_of(cell, [*SYSTEM[:5], number, *SYSTEM[6:], *[50 + number] * 4])
    for number in range(3):
        point_of(cell, [9, 9, 9, 9, 9, number, *SYSTEM[:20]])

    found = costly(cell)

    assert [(each.requests, each.point.page_start) for each in found.points] == [(4, 4), (2, 4)]
    first = found.points[0]
    assert first.lost_tokens == 4 * 34
    assert (first.error_tokens, first.at_ns > found.since_ns > 0) == (0, True)
    assert len(find_divergences(cell.state, GetDivergences(most=1)).points) == 1


def test_the_table_of_points_is_bounded_and_says_how_wrong_it_may_be() -> None:
    """A point that takes the place of another goes on from what that had lost; the costliest are never forgotten."""
    memory = Recollection()
    truth: dict[int, int] = {}
    rng = random.Random(5)
    for number in range(4000):
        place = rng.choice([1, 2, 3]) if number % 2 else rng.randrange(10, 2000)
        lost = 100 if place < 10 else 1
        truth[place] = truth.get(place, 0) + lost
        point = DivergencePoint(kind="diverged", position=place, page_start=place, lost_tokens=lost)
        memory.note_point("n", point, str(number), number)

    assert len(memory.points) == MOST_POINTS
    for each in memory.points.values():
        assert each.lost_tokens - each.error_tokens <= truth[each.point.position] <= each.lost_tokens
    assert {1, 2, 3} <= {each.point.position for each in memory.points.values()}


def test_forgetting_makes_nothing_of_it_come_back(make_cell: MakeCell) -> None:
    """A cell that remembers nothing has no points."""
    cell = make_cell()
    cell.state.recollection = None

    assert costly(cell) == Divergences()


def packed(*parts: range | list[int]) -> bytes:
    return pack_int32([token for part in parts for token in part])


def test_two_sides_that_fall_into_step_again_are_counted() -> None:
    """Behind a change of any length, behind several changes, and where parts have changed places."""
    rest, other = range(1000, 1300), range(2000, 2050)

    assert tokens_in_step(packed([1], rest), packed([2, 3, 4, 5, 6], rest)) == 300
    assert tokens_in_step(packed(range(40), rest), packed([7], rest)) == 300
    assert tokens_in_step(packed([1], rest, [3], other), packed([2], rest, [4, 5], other)) == 350
    assert tokens_in_step(packed(other, rest), packed(rest, other)) >= 50
    assert tokens_in_step(packed(other), packed(rest)) == 0
    assert tokens_in_step(packed([1], range(15)), packed([2], range(15))) == 0


def test_no_step_is_found_between_the_bytes_of_tokens() -> None:
    """The bytes of other tokens can look like these, a byte further on."""
    theirs = packed(range(1, 40))
    ours = (b"\0" + theirs)[: len(theirs)]

    assert tokens_in_step(ours, theirs) == 0
    assert tokens_in_step(packed([256] * 8192), packed([1] * 8192)) == 0  # They agree everywhere, a byte further on.


def test_common_bytes_are_whole_tokens() -> None:
    """From any place on, up to the shorter side's end."""
    ours, theirs = packed(range(1, 20)), packed([0], range(1, 10), [99, 11])

    assert common_bytes(ours, 0, theirs, TOKEN_BYTES) == 9 * TOKEN_BYTES
    assert common_bytes(ours, 0, ours[:12], 0) == 12
    assert common_bytes(ours, len(ours), theirs, 0) == 0


@pytest.mark.parametrize("count", [1, 64, 65])
def test_the_first_token_that_differs_ends_what_is_common(count: int) -> None:
    """Whichever of its bits differs, however many tokens there are, and whatever differs behind it."""
    for place in range(count):
        for bit in (0, 9, 31):
            ours, theirs = bytearray(packed([7] * count)), bytearray(packed([7] * count))
            theirs[place * TOKEN_BYTES + bit // 8] ^= 1 << bit % 8
            theirs[-1] ^= 2

            assert common_bytes(bytes(ours), 0, bytes(theirs), 0) == place * TOKEN_BYTES


def cached_paths(cell: CellModel) -> list[list[int]]:
    """Every path from the one root to a leaf, token by token."""
    tree, found = cell.state.tree, []
    for node in tree.nodes.values():
        if not node.children and node.parent:
            nodes = reversed(ancestors(tree, node))
            found.append([token for each in nodes for token in unpack_int32(each.tokens)])
    return found


def shared(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seed", range(6))
def test_the_point_is_where_the_longest_common_path_ends(make_cell: MakeCell, seed: int) -> None:
    """Whatever is cached: by comparing the prompt with every path of the tree."""
    rng = random.Random(seed)
    cell = make_cell(pages=4000, page_size=rng.choice([1, 2, 4]))
    prompts = [[rng.randrange(2) for _ in range(30)]]
    for _ in range(80):
        kept = rng.choice(prompts)
        prompt = kept[: rng.randrange(len(kept))] + [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        paths = cached_paths(cell)
        point = point_of(cell, prompt, max_tokens=rng.randrange(1, 6))
        prompts.append(prompt)
        longest = max((shared(prompt, path) for path in paths), default=0)

        assert point.position == longest
        if longest in (0, len(prompt)):
            assert point.kind == ("continued" if longest else "new")
            continue
        goes_on = [path[longest] for path in paths if shared(prompt, path) == longest < len(path)]
        assert point.kind == ("diverged" if goes_on else "continued")
        assert unpack_int32(point.before) == prompt[max(0, longest - 64 - cell.page_size) : longest]
        assert unpack_int32(point.prompt) == prompt[longest:][:64]
        assert not goes_on or unpack_int32(point.cached)[0] in goes_on
        assert point.lost_tokens <= len(prompt) - longest
