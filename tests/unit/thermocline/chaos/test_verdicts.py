"""Which errors a fault excuses."""

from thermocline.chaos.plan import Fault, Kind
from thermocline.chaos.verdicts import SLACK_S, TRANSPORT, ClientError, Windows, excuse


def fault(kind: Kind, target: str) -> Fault:
    """A fault of this kind."""
    return Fault(index=0, at_s=0, kind=kind, target=target)


BROKEN = ClientError(TRANSPORT, 0)
RETRY_LATER = ClientError("service_unavailable", 503, 1)
NO_ADVICE = ClientError("service_unavailable", 503)
TOO_LATE = ClientError("deadline_exceeded", 504)
OUR_FAULT = ClientError("internal_error", 500)


def is_excused(error: ClientError, *felt: Fault, has_deadline: bool = False) -> bool:
    """In a cell of two workers."""
    return bool(excuse(error, felt, has_deadline=has_deadline, workers=2))


def test_a_broken_connection_is_excused_by_the_gateway_s_death_alone() -> None:
    """Streams outlive everybody else."""
    assert is_excused(BROKEN, fault("kill", "gateway"))
    assert not is_excused(BROKEN, fault("stop_long", "gateway"), fault("kill", "scheduler"), fault("kill", "worker-0"))


def test_try_again_later_is_excused_where_the_way_to_the_stream_was_cut() -> None:
    """And only with the header that says when."""
    assert is_excused(RETRY_LATER, fault("kill", "nats"))
    assert is_excused(RETRY_LATER, fault("stall", "gateway"))
    assert not is_excused(NO_ADVICE, fault("kill", "nats"))
    assert not is_excused(RETRY_LATER, fault("kill", "storage"))


def test_one_lost_worker_excuses_nothing_while_another_is_there() -> None:
    """Only when all of them are gone is there nobody to serve."""
    assert not is_excused(RETRY_LATER, fault("kill", "worker-0"), fault("stop_long", "worker-0"))
    assert is_excused(RETRY_LATER, fault("kill", "worker-0"), fault("stop_long", "worker-1"))


def test_a_deadline_is_excused_by_having_been_asked_for() -> None:
    """Nothing else makes a request late."""
    assert is_excused(TOO_LATE, has_deadline=True)
    assert not is_excused(TOO_LATE, fault("kill", "nats"))


def test_no_fault_excuses_an_internal_error() -> None:
    """Faults come from outside; a 500 is ours."""
    assert not is_excused(OUR_FAULT, fault("kill", "nats"), fault("kill", "gateway"), fault("flip", "storage"))


def test_a_fault_is_felt_from_its_start_until_shortly_after_its_end() -> None:
    """By whoever was there at any moment between."""
    windows = Windows()
    window = windows.open(fault("kill", "nats"), 10.0)

    assert windows.felt(0.0, 9.0) == []
    assert windows.felt(0.0, 10.5) == windows.felt(1000.0, 1001.0) == [window.fault]

    window.end_s = 12.0

    assert windows.felt(12.0 + SLACK_S, 30.0) == [window.fault]
    assert windows.felt(12.1 + SLACK_S, 30.0) == []
