"""When a failed request is repeated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.storage.core.retrying import RetryPolicy

POLICY = RetryPolicy(attempts=2001, base_s=0.1, cap_s=0.3)


def test_delays_double_up_to_the_cap_and_attempts_are_bounded() -> None:
    """After the last attempt there is no delay to wait."""
    delays = [POLICY.next_delay_s(failed, now_s=0, deadline_s=100, chance=0.5) for failed in (1, 2, 3, 2000, 2001)]

    assert delays == [pytest.approx(0.05), pytest.approx(0.1), pytest.approx(0.15), pytest.approx(0.15), None]


@given(
    failed=st.integers(1, 10),
    now_s=st.floats(0, 100),
    deadline_s=st.floats(0, 100),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_no_attempt_begins_past_the_deadline(failed: int, now_s: float, deadline_s: float, chance: float) -> None:
    """Whatever chance says, a delay is under the cap and ends before the deadline."""
    delay_s = POLICY.next_delay_s(failed, now_s=now_s, deadline_s=deadline_s, chance=chance)

    if delay_s is not None:
        assert 0 <= delay_s <= POLICY.cap_s
        assert now_s + delay_s < deadline_s
