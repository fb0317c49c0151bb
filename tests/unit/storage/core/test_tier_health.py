"""When a tier that failed is tried again."""

from services.storage.core.tier_health import TierHealth


def test_pauses_grow_to_their_bound() -> None:
    """Each failure in a row doubles the pause; the first is news."""
    health = TierHealth(first_s=1.0, most_s=3.0)

    assert health.may_try(0.0)
    assert health.failed(0.0)
    assert not health.may_try(0.9)
    assert health.wait_s(0.25) == 0.75
    assert health.may_try(1.0)
    assert not health.failed(1.0)
    assert not health.may_try(2.9)
    assert not health.failed(3.0)
    assert not health.may_try(5.9)
    assert health.may_try(6.0)


def test_failures_at_once_count_as_one() -> None:
    """Calls that were under way together do not lengthen the pause."""
    health = TierHealth(first_s=1.0, most_s=60.0)
    for _ in range(10):
        health.failed(0.0)

    assert health.may_try(1.0)


def test_success_forgets_failures() -> None:
    """It is news once, and the next pause is short again."""
    health = TierHealth(first_s=1.0, most_s=60.0)
    health.failed(0.0)
    health.failed(1.0)

    assert health.worked()
    assert not health.worked()
    assert health.may_try(1.0)
    assert health.failed(1.0)
    assert health.may_try(2.0)
