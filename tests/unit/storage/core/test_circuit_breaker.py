"""The table of a circuit breaker, and the breaker that follows it."""

import pytest

from services.storage.core import circuit_breaker
from services.storage.core.circuit_breaker import TRANSITIONS, CircuitBreaker, next_state
from shared.errors import IllegalTransition


def opened(at_s: float = 0.0) -> CircuitBreaker:
    """A breaker of two failures and ten seconds that opened at ``at_s``."""
    breaker = CircuitBreaker(failures_to_open=2, cool_down_s=10.0)
    for _ in range(2):
        breaker.report(admitted(breaker, at_s), "failed", at_s)
    return breaker


def admitted(breaker: CircuitBreaker, now_s: float) -> int:
    """The term of a call that must be let through."""
    term = breaker.admit(now_s)
    assert term is not None
    return term


def test_every_state_can_be_left_for_every_other() -> None:
    """A breaker is never stuck: from each state each state can be reached."""
    for start in ("closed", "open", "half_open"):
        reached = {start}
        for _ in TRANSITIONS:
            reached |= {to for (source, _), to in TRANSITIONS.items() if source in reached}

        assert reached == {"closed", "open", "half_open"}


def test_an_entry_that_is_missing_is_a_typed_error() -> None:
    """An open breaker has nobody who could succeed."""
    with pytest.raises(IllegalTransition, match="that is open cannot be succeeded"):
        next_state("open", "succeeded")


def test_the_table_in_the_documentation_is_the_table() -> None:
    """Each transition is a row of the module's docstring, and each row a transition."""
    rows = [line.split() for line in (circuit_breaker.__doc__ or "").splitlines()]
    documented = {(row[0], row[1]): row[2] for row in rows if len(row) >= 3 and (row[0], row[1]) in TRANSITIONS}

    assert documented == TRANSITIONS


def test_failures_in_a_row_open_it() -> None:
    """At the second failure in a row nobody is admitted any more."""
    breaker = opened()

    assert breaker.state == "open"
    assert breaker.admit(9.9) is None


def test_an_answer_between_failures_keeps_it_closed() -> None:
    """Failures count only in a row."""
    breaker = CircuitBreaker(failures_to_open=2, cool_down_s=10.0)

    for verdict in ("failed", "succeeded", "failed", "succeeded", "failed"):
        breaker.report(admitted(breaker, 0.0), verdict, 0.0)

    assert breaker.state == "closed"


def test_after_the_cool_down_one_probe_goes_out() -> None:
    """Who asks first after the cool-down is admitted, and nobody else until it ended."""
    breaker = opened()

    admitted(breaker, 10.0)

    assert breaker.state == "half_open"
    assert breaker.admit(10.0) is None


def test_a_probe_that_is_answered_closes_it() -> None:
    """After that, a single failure does not open it again."""
    breaker = opened()
    breaker.report(admitted(breaker, 10.0), "succeeded", 10.5)

    assert breaker.state == "closed"
    breaker.report(admitted(breaker, 10.5), "failed", 10.5)
    assert breaker.state == "closed"


def test_a_probe_that_fails_begins_the_cool_down_anew() -> None:
    """The next probe is ten seconds after this one failed, not after the breaker first opened."""
    breaker = opened()
    breaker.report(admitted(breaker, 10.0), "failed", 12.0)

    assert breaker.remaining_s(12.0) == 10.0
    assert breaker.admit(21.9) is None
    assert breaker.admit(22.0) is not None


def test_a_probe_without_a_verdict_leaves_its_place_to_the_next() -> None:
    """A released probe says nothing about the store, so whoever asks next may probe at once."""
    breaker = opened()
    breaker.report(admitted(breaker, 10.0), "released", 10.1)

    assert breaker.state == "open"
    assert breaker.admit(10.1) is not None


def test_what_began_before_it_opened_changes_nothing_afterwards() -> None:
    """Late answers of an earlier term neither close an open breaker nor decide about a probe."""
    breaker = CircuitBreaker(failures_to_open=2, cool_down_s=10.0)
    early = admitted(breaker, 0.0)
    for _ in range(2):
        breaker.report(early, "failed", 0.0)

    breaker.report(early, "succeeded", 1.0)
    assert breaker.state == "open"
    assert breaker.admit(10.0) is not None
    breaker.report(early, "succeeded", 10.0)

    assert breaker.state == "half_open"  # type: ignore[comparison-overlap]  # The report changed it.


def test_a_call_without_a_verdict_does_not_forgive() -> None:
    """Released calls of a closed breaker leave the failures in a row as they are."""
    breaker = CircuitBreaker(failures_to_open=2, cool_down_s=10.0)
    term = admitted(breaker, 0.0)

    for verdict in ("failed", "released", "failed"):
        breaker.report(term, verdict, 0.0)

    assert breaker.state == "open"
