"""Reading ahead on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from services.worker.importance.speculation import Landed, LayerOutcome, ReadAhead
from shared.errors import IntegrityError

LONG_S = 30.0
TOKENS = torch.tensor([2, 5, 9])


class GatedSource:
    """K and V whose every number is the token's; a read returns when ``gate`` is open."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate, self.started = threading.Event(), threading.Event()
        self._error = error

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        self.started.set()
        assert self.gate.wait(LONG_S)
        if self._error is not None:
            raise self._error
        return tokens.float()[None, None, :, None].expand(2, 1, -1, 4)

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is read ahead by head")

    def values(self, layer: int, head: int, tokens: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only K and V together are read ahead")


@pytest.fixture
def read_ahead() -> Iterator[ReadAhead]:
    ticks = iter(range(1000))
    made = ReadAhead(reads=2, clock=lambda: float(next(ticks)))
    yield made
    made.close()


def test_what_was_read_lands_with_its_time(read_ahead: ReadAhead) -> None:
    """The layer gets K and V of the tokens, and how long reading took by the clock handed in."""
    source = GatedSource()
    source.gate.set()
    flight = read_ahead.start(source, 3, TOKENS, 96)
    assert flight is not None

    landed = flight.land(LONG_S)

    assert landed is not None
    assert (flight.layer, flight.nbytes, landed.seconds) == (3, 96, 1.0)
    assert landed.kv[0, 0, :, 0].tolist() == [2.0, 5.0, 9.0]


def test_it_reads_while_the_caller_goes_on(read_ahead: ReadAhead) -> None:
    """Starting returns before anything is read; what waits is bounded, and there is room again when a read ends."""
    source = GatedSource()
    flights = [read_ahead.start(source, layer, TOKENS, 96) for layer in (1, 2)]
    assert source.started.wait(LONG_S)

    assert read_ahead.start(source, 3, TOKENS, 96) is None

    source.gate.set()
    for flight in flights:
        assert flight is not None
        assert flight.land(LONG_S) is not None
    assert read_ahead.start(source, 3, TOKENS, 96) is not None


def test_what_is_overdue_does_not_land(read_ahead: ReadAhead) -> None:
    """Past its deadline the layer goes on without it."""
    source = GatedSource()
    flight = read_ahead.start(source, 1, TOKENS, 96)

    assert flight is not None
    assert flight.land(0.0) is None
    source.gate.set()


@pytest.mark.parametrize("error", [IntegrityError("torn"), OSError("gone")])
def test_what_failed_does_not_land(read_ahead: ReadAhead, error: Exception) -> None:
    """The same read on demand will say why."""
    source = GatedSource(error)
    source.gate.set()
    flight = read_ahead.start(source, 1, TOKENS, 96)

    assert flight is not None
    assert flight.land(LONG_S) is None


def test_a_fault_of_ours_is_not_swallowed(read_ahead: ReadAhead) -> None:
    """Only what a source may fail with counts as not landed."""
    source = GatedSource(ZeroDivisionError())
    source.gate.set()
    flight = read_ahead.start(source, 1, TOKENS, 96)

    assert flight is not None
    with pytest.raises(ZeroDivisionError):
        flight.land(LONG_S)


@pytest.mark.parametrize("error", [None, IntegrityError("torn"), ZeroDivisionError()])
def test_one_can_wait_for_the_end_of_a_read(read_ahead: ReadAhead, error: Exception | None) -> None:
    """However it ends, its source is not touched afterwards."""
    source = GatedSource(error)
    flight = read_ahead.start(source, 1, TOKENS, 96)
    assert flight is not None
    assert not flight.ends_within(0.0)

    source.gate.set()

    assert flight.ends_within(LONG_S)


def test_landed_tokens_are_found() -> None:
    """Whether a token is here, and in which column; those beyond the last are not."""
    landed = Landed(TOKENS, torch.empty(0), 0.0)

    is_here, columns = landed.find(torch.tensor([0, 2, 4, 9, 12]))

    assert is_here.tolist() == [False, True, False, True, False]
    assert columns.tolist() == [0, 2]


def test_an_outcome_tells_recall_precision_waste_and_stall() -> None:
    """Of 100 bytes needed and 80 read ahead, 60 are the same."""
    outcome = LayerOutcome(
        layer=1,
        needed_bytes=100,
        speculated_bytes=80,
        hit_bytes=60,
        on_demand_bytes=40,
        keys_s=1.0,
        wait_s=2.0,
        on_demand_s=4.0,
        ahead_s=8.0,
    )

    assert (outcome.recall, outcome.precision, outcome.wasted_bytes, outcome.stall_s) == (0.6, 0.75, 20, 7.0)
