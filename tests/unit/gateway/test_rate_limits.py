"""Buckets under virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.accounts import OPEN, Account
from services.gateway.rate_limits import Bucket, duration, full, resized
from services.gateway.tenants import Tenant
from shared.errors import RateLimited

SALT = "0123456789abcdef"


class Clock:
    """Seconds that a test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_bucket_lets_a_minutes_worth_through_and_then_its_rate() -> None:
    """Sixty a minute: sixty at once, then one a second, and never more than sixty saved up."""
    bucket = Bucket(60, 60.0, 0.0)
    for _ in range(60):
        assert bucket.wait_s(1, 0.0) == 0
        bucket.spend(1, 0.0)

    assert bucket.wait_s(1, 0.0) == 1.0
    assert bucket.wait_s(1, 0.5) == 0.5
    assert bucket.wait_s(1, 1.0) == 0
    assert (bucket.remaining(3600.0), bucket.reset_s(3600.0)) == (60, 0.0)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 120), st.integers(1, 1500), st.integers(0, 1500)), min_size=1, max_size=60),
)
def test_no_stretch_of_time_sees_more_than_its_rate(per_minute: int, steps: list[tuple[float, int, int]]) -> None:
    """What was let through by any moment is the flow until then, a full bucket, and the last request; and who waits
    as long as told is let through.
    """
    bucket, now_s, spent, last = Bucket(per_minute, float(per_minute), 0.0), 0.0, 0, 0
    for passed_s, prompt, answer in steps:
        now_s += passed_s
        wait_s = bucket.wait_s(prompt, now_s)
        if wait_s > 0:
            assert bucket.wait_s(prompt, now_s) == wait_s
            now_s += wait_s + 1e-6
            assert bucket.wait_s(prompt, now_s) == 0
        bucket.spend(prompt, now_s)
        bucket.spend(answer, now_s)
        spent, last = spent + prompt + answer, prompt + answer

        assert spent - last <= per_minute * (1 + now_s / 60) + 1e-3


def test_a_clock_that_stands_still_or_runs_back_gives_nothing() -> None:
    """And takes nothing."""
    bucket = Bucket(60, 0.0, 10.0)

    assert bucket.wait_s(1, 5.0) == 1.0
    assert bucket.wait_s(1, 11.0) == 0.0


def test_more_than_fits_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    """So no prompt is refused for ever, and the rate holds in the long run."""
    bucket = Bucket(60, 30.0, 0.0)
    assert bucket.wait_s(600, 0.0) == 30.0
    assert bucket.wait_s(600, 30.0) == 0
    bucket.spend(600, 30.0)

    assert bucket.remaining(30.0) == 0
    assert bucket.wait_s(1, 30.0) == 541.0


def test_another_limit_keeps_what_was_spent() -> None:
    """Else a reload would be a way round it; a limit that is new begins full, and none stays none."""
    spent = Bucket(60, 10.0, 0.0)

    raised, lowered = resized(spent, 100, 0.0), resized(spent, 20, 0.0)
    assert raised is not None
    assert lowered is not None
    assert (raised.level, lowered.level) == (50.0, -30.0)
    assert resized(spent, 0, 0.0) is None
    assert resized(None, 60, 0.0) == full(60, 0.0) == Bucket(60, 60.0, 0.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0001, "1ms"), (0.02, "20ms"), (1, "1s"), (1.44, "1.5s"),
     (59.99, "1m0s"), (360, "6m0s"), (90.5, "1m30.5s")],
)  # fmt: skip
def test_durations_read_as_openais(seconds: float, text: str) -> None:
    """Rounded up, so that who waits that long has waited long enough."""
    assert duration(seconds) == text


def test_an_account_without_limits_refuses_nothing_and_says_nothing() -> None:
    """As every caller of a gateway without tenants."""
    account = Account("", OPEN, Clock())
    for _ in range(1000):
        account.begin_request()
        account.spend_prompt(10**6)
        account.take(100)
    account.spend_tokens(10**9)
    account.give_back(100_000)

    assert (account.headers(), account.in_progress) == ({}, 0)


def test_an_answer_is_paid_for_by_the_next_request() -> None:
    """The length of an answer is known at its end."""
    clock = Clock()
    account = Account("a", Tenant(salt=SALT, tokens_per_minute=600), clock)
    account.spend_prompt(100)
    account.spend_tokens(1000)

    with pytest.raises(RateLimited) as refused:
        account.spend_prompt(100)
    assert refused.value.retry_after_ms == 60_000
    clock.now_s += 60
    account.spend_prompt(100)
    assert account.headers() == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0s",
    }


def test_choices_in_progress_are_bounded_and_outlive_a_change() -> None:
    """A lower limit lets what runs go on."""
    account = Account("a", Tenant(salt=SALT, max_concurrent=3), Clock())
    account.take(3)
    with pytest.raises(RateLimited, match="may have 3 choices in progress; 3 are"):
        account.take(1)

    account.change(Tenant(salt=SALT, max_concurrent=1))
    account.give_back(2)
    with pytest.raises(RateLimited):
        account.take(1)
    account.give_back(1)
    account.take(1)
