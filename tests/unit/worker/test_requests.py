"""A running request counts its KV and its room truly, and ends once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.requests import TRANSITIONS, RunningRequest
from shared.errors import IllegalTransition
from shared.messages.tokens import ImportanceUsage
from tests.unit.worker.made_requests import decoding, made_sparse, make_request


def sample(request: RunningRequest, count: int) -> None:
    for _ in range(count):
        request.tokens.append(1)


@pytest.mark.parametrize("end", ["finish", "preempt", "replace"])
def test_a_request_ends_once(end: str) -> None:
    """No change leads out of an ended state."""
    request = make_request()
    request.change(end)  # type: ignore[arg-type]

    for change in ("compute", "sample", "finish", "preempt", "replace"):
        with pytest.raises(IllegalTransition):
            request.change(change)


def test_every_live_state_can_end() -> None:
    """The table has all three ends for each state that has any entry."""
    live = {state for state, _ in TRANSITIONS}

    assert live == {"waiting", "prefilling", "decoding"}
    assert all((state, end) in TRANSITIONS for state in live for end in ("finish", "preempt", "replace"))


def test_room_counts_decode_steps() -> None:
    """16 slots and 10 tokens: positions 9 (the last token's own) to 15 can be computed."""
    request = make_request(tokens=10)

    assert request.room == 7


def test_loaded_pages_extend_what_is_computed_up_to_the_last_token() -> None:
    """Loads that continue the prefix count; the last token itself is always computed."""
    request = make_request(tokens=12, pages=(5, 6, 7), computed=4)

    request.extend_coverage(frozenset({6, 7}))

    assert request.computed == 11


def test_loaded_pages_after_a_hole_do_not_count() -> None:
    """KV without the KV before it is of no use."""
    request = make_request(tokens=12, pages=(5, 6, 7), computed=4)

    request.extend_coverage(frozenset({7}))

    assert request.computed == 4


@given(st.integers(0, 16), st.frozensets(st.integers(4, 9)))
def test_losing_pages_keeps_only_the_prefix_before_them(computed: int, bad: frozenset[int]) -> None:
    """What remains is computed, contiguous and on good pages."""
    request = make_request(tokens=16, computed=computed)

    lost = request.lose_pages(bad)

    kept = request.pages[: -(-request.computed // 4)].tolist()
    assert request.computed + lost == computed
    assert not bad & set(kept)
    assert lost == 0 or request.pages[request.computed // 4] in bad


def test_pages_are_asked_for_when_half_the_lease_is_used() -> None:
    """And not again until they have come."""
    request = decoding(tokens=10)
    assert request.needs_lease(low_tokens=1) is True  # Room for 7 of 16.

    request.lease_requested = True
    assert request.needs_lease(low_tokens=1) is False

    request.grant(np.array([9, 10], dtype=np.int32))
    assert request.capacity == 24
    assert request.needs_lease(low_tokens=1) is False  # Room for 15 of 8.


def test_of_a_long_lease_the_last_part_is_enough_to_ask_in_time() -> None:
    """Half of it would be asked for long before it is used; one that asks then joins another's message only."""
    request = decoding(tokens=10, max_tokens=500)
    request.grant(np.arange(100, 132, dtype=np.int32))  # 128 tokens; with what there was, 135 steps.

    sample(request, 135 - 64)
    assert not request.needs_lease(low_tokens=32)
    assert request.may_join_lease(low_tokens=32)

    sample(request, 32)
    assert request.room == 32
    assert request.needs_lease(low_tokens=32)


def test_a_low_mark_above_the_lease_does_not_make_every_token_ask() -> None:
    """A lease of one page is asked for again when half of it is used."""
    request = decoding(tokens=9)
    request.grant(np.array([9], dtype=np.int32))
    sample(request, 8)

    assert request.room == 4
    assert request.needs_lease(low_tokens=32) is False
    sample(request, 2)
    assert request.needs_lease(low_tokens=32) is True


def test_no_pages_are_asked_for_that_the_answer_cannot_use() -> None:
    """Room for seven steps is enough for an answer of five tokens."""
    assert decoding(tokens=10, max_tokens=5).needs_lease(low_tokens=32) is False


def test_a_request_that_is_not_decoding_asks_for_nothing() -> None:
    """Its decode room is not used yet."""
    assert make_request(tokens=16).needs_lease(low_tokens=32) is False


def test_a_request_admitted_without_any_decode_room_asks() -> None:
    """Else it would wait for ever."""
    request = decoding(tokens=16)
    request.lease_tokens = 0
    request.tokens.append(1)

    assert request.room == 0
    assert request.needs_lease(low_tokens=32) is True


def test_lost_loads_are_taken_from_what_lies_deepest() -> None:
    """Object store and disk before host memory; never more than there is."""
    request = make_request(tokens=16)
    request.host_tokens, request.disk_tokens, request.remote_tokens = 8, 4, 2

    request.lose_loaded(7)
    assert (request.host_tokens, request.disk_tokens, request.remote_tokens) == (7, 0, 0)

    request.lose_loaded(100)
    assert request.host_tokens == 0


def test_restored_tokens_count_as_computed_prefix() -> None:
    """Run after run; in usage only those of the caller's prompt are named."""
    request = make_request(tokens=16)
    request.prompt_ids = range(10)

    request.note_restored(0, 4)
    request.note_restored(4, 12)

    assert (request.state, request.computed, request.hidden_tokens) == ("prefilling", 12, 10)
    assert request.computed_tokens == 0


def test_lost_restorations_are_taken_back() -> None:
    """From the lost page on, and they are not taken for lost loads; what is computed instead is no restoration."""
    request = make_request(tokens=16, computed=4)
    request.note_restored(4, 8)
    request.note_restored(8, 12)
    request.computed = 14

    assert request.lose_pages(frozenset({7, 8})) == 2
    assert (request.computed, request.hidden_tokens) == (8, 4)
    request.computed = 14
    assert request.hidden_tokens == 4
    assert request.lose_pages(frozenset({5})) == 10
    assert (request.computed, request.hidden_tokens) == (0, 0)


def test_kv_lost_before_a_sparse_prefix_takes_the_prefix_along() -> None:
    """Nothing stands behind a hole; sparse tokens were never loaded as such, so they are not counted as lost."""
    request = made_sparse()

    assert request.lose_pages(frozenset({6})) == 20 - 4 - 12

    assert (request.computed, request.sparse_losses) == (4, 1)
    assert request.lose_pages(frozenset({5, -1})) == 4
    assert (request.computed, request.sparse_losses) == (0, 1)


def test_kv_lost_behind_a_sparse_prefix_leaves_it_alone() -> None:
    """What was chosen does not depend on it."""
    request = made_sparse()
    request.computed = 26

    assert request.lose_pages(frozenset({8, -1})) == 2
    assert (request.computed, request.sparse_losses) == (24, 0)


def test_coverage_goes_on_behind_a_sparse_prefix() -> None:
    """Once all before it is there; its own entries are no pages, whatever a load may name."""
    request = made_sparse()
    request.computed = 4

    request.extend_coverage(frozenset({-1, 7}))
    assert request.computed == 4

    request.extend_coverage(frozenset({6}))
    assert request.computed == 20
    request.extend_coverage(frozenset({-1, 7}))
    assert request.computed == 24


def test_only_tokens_outside_of_a_sparse_prefix_can_be_computed() -> None:
    """Those before it and those behind it, but no chunk over both."""
    request = made_sparse()

    assert [request.can_compute(*span) for span in ((0, 8), (20, 26))] == [True, True]
    assert [request.can_compute(*span) for span in ((0, 9), (8, 20), (19, 26), (7, 21))] == [False] * 4
    assert make_request().can_compute(7, 21)


@pytest.mark.parametrize(("prompt", "sparse"), [(26, 12), (15, 7), (8, 0), (3, 0)])
def test_sparse_tokens_are_those_of_the_callers_prompt(prompt: int, sparse: int) -> None:
    """Output tokens of earlier attempts are no prompt, and what was not loaded yet is not counted."""
    request = made_sparse()
    request.prompt_ids = range(prompt)
    assert request.sparse_tokens == 0

    request.importance = ImportanceUsage(
        ratio=0.5, metric="h2o", loaded_tokens=6, layers=3, layers_fallen_back=0, disk_bytes=1
    )

    assert request.sparse_tokens == sparse
