"""Cache leases: what they keep, for how long, within which budget, and what is said of them."""

from typing import Any

import pytest

from services.scheduler.core import decode_state, encode_state, list_cache, status
from shared.messages.requests import Lease
from shared.messages.status import ListCache
from shared.messages.worker_plans import LeaseGrant
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, path_of, timer_of

PROMPT = [7] * 40
MINUTE_MS = 60_000


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell of pages of 4 tokens: 24 on the device, 80 in host memory, of which leases may have 20."""
    return make_cell(pages=24, host_pages=80, policy="lru")


def ask(cell: CellModel, tokens: list[int], *leases: Lease, **options: Any) -> None:
    """Have a prompt answered whose tenant may lease 100 tokens."""
    options = {"max_tokens": 1, "max_leased_tokens": 100, "tenant": "a", **options}
    cell.serve(tokens, leases=leases, **options)


def lease(tokens: int = 40, ttl_ms: int = MINUTE_MS, **options: Any) -> Lease:
    """A lease of so many tokens."""
    return Lease(tokens=tokens, ttl_ms=ttl_ms, **options)


def cached(cell: CellModel, tokens: list[int]) -> int:
    """How many of the tokens are cached somewhere."""
    return sum(pages for _, pages in path_of(cell, tokens)) * cell.state.tree.page_size


def churn(cell: CellModel, count: int = 12) -> None:
    """Enough other prompts to drive everything that nobody leased out of both pools."""
    for number in range(count):
        cell.serve([50 + number] * 40, max_tokens=1)


def answers(cell: CellModel) -> list[LeaseGrant]:
    """What was said of every lease that was asked for."""
    return [grant for order in cell.admitted for grant in order.leases]


def test_a_leased_prefix_survives_what_evicts_others(cell: CellModel) -> None:
    """Churn takes what nobody leased; the leased prefix leaves the device and keeps its host copy."""
    ask(cell, [1] * 40)
    ask(cell, PROMPT, lease())

    churn(cell)

    assert cached(cell, PROMPT) == 40
    assert cached(cell, [1] * 40) == 0


def test_only_what_is_asked_for_is_kept(cell: CellModel) -> None:
    """A lease ends at a page's end at or before its tokens."""
    ask(cell, PROMPT, lease(tokens=19))

    churn(cell)

    assert cached(cell, PROMPT) == 16


def test_a_lease_ends_with_its_time(cell: CellModel) -> None:
    """After its timer what it kept is evicted as anything else is."""
    ask(cell, PROMPT, lease())

    cell.fire(timer_of(cell, "cache_lease."))
    churn(cell)

    assert cell.state.cache_leases.leases == {}
    assert cell.state.cache_leases.locked.get("storage", 0) == 0
    assert cached(cell, PROMPT) == 0


def test_a_use_begins_the_time_anew(cell: CellModel) -> None:
    """A prompt that finds all that a lease of its tenant keeps renews it; another tenant's does not."""
    ask(cell, PROMPT, lease())
    (held,) = cell.state.cache_leases.leases.values()
    first = held.expires_ns

    ask(cell, [*PROMPT, 1, 2, 3, 4], tenant="b")
    after_stranger = held.expires_ns
    ask(cell, [*PROMPT, 1, 2, 3, 4])
    renewed = held.expires_ns
    cell.fire(held.timer_id)

    assert after_stranger == first
    assert renewed > first
    assert list(cell.state.cache_leases.leases.values()) == [held]


def test_where_a_budget_is_full_what_would_end_first_gives_way(cell: CellModel) -> None:
    """Of three prompts whose tenant may keep two and a half, the one with the least time left is let go."""
    for number, minutes in ((1, 5), (2, 1), (3, 5)):
        ask(cell, [number] * 40, lease(ttl_ms=minutes * MINUTE_MS), max_leased_tokens=100)

    churn(cell)

    assert [cached(cell, [number] * 40) for number in (1, 2, 3)] == [40, 0, 40]


def test_what_two_leases_share_counts_once(cell: CellModel) -> None:
    """Prompts that go on from one prefix lease it together."""
    for last in (1, 2, 3):
        ask(cell, [*PROMPT[:32], *[last] * 8], lease(), max_leased_tokens=56)

    assert cell.state.cache_leases.accounts["a"].pages == (32 + 3 * 8) // 4
    assert cell.state.counters.get("cache_leases_gave_way", 0) == 0


@pytest.mark.parametrize(
    ("wanted", "budget", "refusal"),
    [
        (lease(), 0, "no_budget"),
        (lease(), 39, "over_budget"),
        (lease(tokens=3), 100, "malformed"),
        (lease(tokens=-5), 100, "malformed"),
        (lease(ttl_ms=0), 100, "malformed"),
        (lease(tokens=1 << 40), 1 << 40, ""),
    ],
)
def test_a_refusal_is_told(cell: CellModel, wanted: Lease, budget: int, refusal: str) -> None:
    """Whoever asks for what cannot be had is answered all the same, and hears why it is not kept."""
    ask(cell, PROMPT, wanted, max_leased_tokens=budget)

    assert [grant.refusal for grant in answers(cell)] == [refusal]
    assert len(cell.state.cache_leases.leases) == (not refusal)


def test_without_a_host_pool_nothing_is_promised(make_cell: MakeCell) -> None:
    """Where what leaves the device is gone, leases are refused."""
    cell = make_cell(pages=24, host_pages=0, policy="lru")

    ask(cell, PROMPT, lease())

    assert [grant.refusal for grant in answers(cell)] == ["no_host_pool"]


def test_all_tenants_together_keep_to_their_share_of_host_memory(cell: CellModel) -> None:
    """The third of three tenants with two prompts' worth each finds no room below a quarter of the host pool."""
    for number, tenant in enumerate("abc"):
        ask(cell, [number] * 40, lease(), tenant=tenant)

    assert [grant.refusal for grant in answers(cell)] == ["", "", "over_capacity"]
    assert cell.state.cache_leases.pages == 20


def test_the_answer_says_how_much_is_kept_and_until_when(cell: CellModel) -> None:
    """Two leases of one request are answered apart, with their own times from its admission."""
    ask(cell, PROMPT, lease(tokens=16, ttl_ms=60 * MINUTE_MS), lease(tokens=38))

    longer, shorter = answers(cell)
    assert (longer.tokens, shorter.tokens) == (16, 36)
    assert longer.expires_ns - shorter.expires_ns == 59 * MINUTE_MS * 1_000_000
    assert sorted(held.expires_ns for held in cell.state.cache_leases.leases.values()) == [
        shorter.expires_ns,
        longer.expires_ns,
    ]


def test_a_key_names_the_last_lease_of_its_session(cell: CellModel) -> None:
    """The next request of a key takes the place of the one before, which is let go; another key's stays."""
    ask(cell, [1] * 40, lease(key="one"))
    ask(cell, [2] * 20, lease(key="two"))
    ask(cell, [3] * 40, lease(key="one"))

    churn(cell)

    assert [cached(cell, tokens) for tokens in ([1] * 40, [2] * 20, [3] * 40)] == [0, 20, 40]


def test_an_answer_is_kept_with_its_prompt_where_that_is_asked(cell: CellModel) -> None:
    """A session's lease goes on to the last whole page of the answer."""
    ask(cell, PROMPT, lease(key="one", with_answer=True), max_tokens=9)

    (held,) = cell.state.cache_leases.leases.values()
    assert cell.state.tree.nodes[held.node].end == 48


def test_leases_never_keep_a_request_waiting(cell: CellModel) -> None:
    """A prompt that needs the whole device gets it, though what was there is leased."""
    ask(cell, PROMPT, lease())
    ask(cell, [8] * 40, lease())

    ask(cell, [9] * 88)

    assert cell.state.counters["finished_length"] == 3
    assert [cached(cell, tokens) for tokens in (PROMPT, [8] * 40)] == [40, 40]


def test_a_lost_storage_takes_its_copies_with_it_and_no_more(cell: CellModel) -> None:
    """What was only in host memory is no longer leased; the lease ends at its time without a word."""
    ask(cell, PROMPT, lease())
    churn(cell, count=2)

    cell.lose_storage("storage")
    cell.drain()

    assert cell.state.cache_leases.pages * 4 == cached(cell, PROMPT)
    cell.fire(timer_of(cell, "cache_lease."))
    assert cell.state.cache_leases.leases == {}


def test_a_cancelled_request_reserves_nothing_any_more(cell: CellModel) -> None:
    """What was computed of it is leased, and the rest of its reservation is free for others."""
    name = cell.submit(PROMPT, max_tokens=8, leases=(lease(),), max_leased_tokens=100, tenant="a")
    cell.round()

    cell.cancel(name)
    cell.drain()

    assert cell.state.cache_leases.pending == {}
    assert all(not account.reserved for account in cell.state.cache_leases.accounts.values())


def test_leases_are_listed_and_counted(cell: CellModel) -> None:
    """With their tenants and keys, as many as are asked for; pages of two leases count once."""
    ask(cell, PROMPT, lease(), lease(tokens=20, ttl_ms=60 * MINUTE_MS, key="s"))

    found = list_cache(cell.state, ListCache(max_leases=5)).leases
    counted = status(cell.state, "scheduler")

    assert [(each.tenant, each.key, each.tokens, each.ttl_ms) for each in found] == [
        ("a", "s", 20, 60 * MINUTE_MS),
        ("a", "", 40, MINUTE_MS),
    ]
    assert len(list_cache(cell.state, ListCache(max_leases=1)).leases) == 1
    assert list_cache(cell.state, ListCache(max_leases=5, namespace="f" * 32)).leases == ()
    assert (counted.cache_leases, counted.leased_pages) == (2, 10)


def test_leases_are_in_snapshots(cell: CellModel) -> None:
    """A fold that goes on from a snapshot keeps what it kept, and lets go at the same time."""
    ask(cell, PROMPT, lease())

    cell.state = decode_state(encode_state(cell.state))
    churn(cell)

    assert cached(cell, PROMPT) == 40
    cell.fire(timer_of(cell, "cache_lease."))
    assert cell.state.cache_leases.nodes == {}


def test_what_is_expected_back_soon_is_evicted_after_what_is_not(make_cell: MakeCell) -> None:
    """Though it was used longest ago; once its session is late it is evicted as anything else is."""
    cell = make_cell(pages=24, host_pages=0, policy="lru")
    ask(cell, PROMPT, returns_in_ms=MINUTE_MS)
    churn(cell)
    kept = cached(cell, PROMPT)

    cell.time_ns += 10 * MINUTE_MS * 1_000_000
    churn(cell)

    assert (kept, cached(cell, PROMPT)) == (40, 0)
    assert cell.state.counters["returns_late"] == 1


def test_a_session_that_came_back_is_expected_no_longer(make_cell: MakeCell) -> None:
    """Until it says again when it will come."""
    cell = make_cell(pages=24, host_pages=0, policy="lru")
    ask(cell, PROMPT, returns_in_ms=MINUTE_MS)

    ask(cell, [*PROMPT, 1, 2, 3, 4])
    churn(cell)

    assert cached(cell, PROMPT) == 0
    assert cell.state.counters["returns_met"] == 1


def test_of_sessions_that_are_all_expected_the_last_gives_way(make_cell: MakeCell) -> None:
    """Nothing waits for them: a prompt that needs their pages gets them."""
    cell = make_cell(pages=24, host_pages=0, policy="lru")
    ask(cell, [1] * 40, returns_in_ms=MINUTE_MS)
    ask(cell, [2] * 40, returns_in_ms=2 * MINUTE_MS)

    ask(cell, [3] * 40)

    assert [cached(cell, [number] * 40) for number in (1, 3)] == [40, 40]
    assert cached(cell, [2] * 40) < 40


def test_sessions_are_expected_within_their_tenant_s_budget(make_cell: MakeCell) -> None:
    """Beyond it, the one that is expected last is given up; without one, none is waited for."""
    cell = make_cell(pages=24, host_pages=0, policy="lru")
    ask(cell, [1] * 40, returns_in_ms=2 * MINUTE_MS, max_leased_tokens=60)
    ask(cell, [2] * 40, returns_in_ms=MINUTE_MS, max_leased_tokens=60)
    ask(cell, [3] * 8, returns_in_ms=MINUTE_MS, max_leased_tokens=0, tenant="b")

    assert [state.tenant for state in cell.state.returns.values()] == ["a"]
    churn(cell)
    assert [cached(cell, [number] * 40) for number in (1, 2)] == [0, 40]
