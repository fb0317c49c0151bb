"""Processes that the cell gave up while they stood still or were cut off, and that go on: each case by itself."""

from __future__ import annotations

import pytest

from services.scheduler.core.tiers import loads as neighbours
from shared.codec import Published
from shared.messages.cell_events import CellConfig
from shared.messages.worker_plans import RunBatch, WorkerPlan
from tests.simulation.cell import Cell
from tests.simulation.contents import Broken
from tests.simulation.properties import check_end
from tests.simulation.scenario import Arrival, Fault, Rates, Scenario, Shape
from tests.simulation.virtual_clock import Action
from tests.simulation.worker_process import WRONG_TOKEN, WorkerProcess

DOCUMENT = tuple(range(1, 65))
FREEZE_US = 6_200_000


def _arrival(at_us: int, name: str, prompt: tuple[int, ...], max_tokens: int) -> Arrival:
    return Arrival(
        at_us=at_us,
        request_id=name,
        gateway=0,
        prompt=prompt,
        max_tokens=max_tokens,
        seed=0,
        ignore_eos=True,
    )


def _other(number: int) -> tuple[int, ...]:
    """A prompt that shares nothing."""
    return tuple(range(1_000 * number, 1_000 * number + 96))


class _ReaderStandsStill(Cell):
    """The first worker that copies from its neighbour stands still while it does, until it was given up.

    Meanwhile the neighbour's pages are written anew, and the gateway hears no notice but from the stream.
    """

    def __init__(self) -> None:
        config = CellConfig(policy="lru", host_tier=False, hidden_form="off", defer_tokens=0, max_running=4)
        arrivals = [_arrival(300_000, "first", DOCUMENT, 2)]
        arrivals += [_arrival(310_000 + number, f"busy-{number}", _other(number + 1), 40) for number in range(3)]
        arrivals += [_arrival(312_000 + number, f"again-{number}", (*DOCUMENT, number), 30) for number in range(3)]
        arrivals += [_arrival(5_650_000 + 5_000 * place, f"late-{place}", _other(10 + place), 4) for place in range(30)]
        super().__init__(
            Scenario(
                seed=0,
                config=config,
                shape=Shape(page_size=16, workers=2, device_pages=40, token_us=30),
                rates=Rates(),
                arrivals=tuple(arrivals),
                faults=(Fault(5_600_000, "flush"),),
            )
        )
        self.reader: WorkerProcess | None = None
        self._send_on = self.link.send
        self.link.send = self._lose_notices  # type: ignore[method-assign]

    def _lose_notices(
        self, channel: str, deliver: Action, *, may_be_lost: bool = True, may_repeat: bool = True
    ) -> None:
        if not channel.startswith("out/gateway"):
            self._send_on(channel, deliver, may_be_lost=may_be_lost, may_repeat=may_repeat)

    def publish(self, target: str, output: Published) -> None:
        super().publish(target, output)
        if not isinstance(output, WorkerPlan) or not isinstance(output.order, RunBatch):
            return
        if self.reader is None and any(load.neighbour_id for load in output.order.loads):
            self.reader = self.workers[output.worker_id]
            self._freeze_once_begun(self.reader, output.number)

    def _freeze_once_begun(self, reader: WorkerProcess, plan: int) -> None:
        if reader.begun < plan:
            self.clock.after(20, lambda: self._freeze_once_begun(reader, plan))
        else:
            reader.freeze()
            self.clock.after(FREEZE_US, reader.thaw)


def test_what_a_worker_reads_after_it_was_given_up_is_what_it_was_to_read() -> None:
    """Its tokens reach a gateway that has not heard of the next attempt yet, so they have to be right."""
    cell = _ReaderStandsStill()

    cell.run()

    check_end(cell)
    assert cell.reader is not None
    assert not cell.reader.is_running
    assert cell.state.counters["requests_resumed"] > 0


def test_without_late_locks_a_client_gets_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case above is one that tells."""
    monkeypatch.setattr(neighbours, "LATE_READS_MS", 1)
    cell = _ReaderStandsStill()

    cell.run()

    with pytest.raises(Broken, match=rf"again-0 got \[{WRONG_TOKEN}"):
        check_end(cell)


@pytest.mark.parametrize("kind", ["worker_is_cut_off", "storage_is_cut_off"])
def test_who_is_cut_off_before_the_first_status_is_a_member_again_in_the_end(kind: str) -> None:
    """Nobody lives on unlisted: it learns that it was given up, and a successor joins."""
    faults = (Fault(3_000, kind, lasts_us=9_000_000),)
    shape = Shape(page_size=16, workers=1, device_pages=40, host_pages=20)
    cell = Cell(Scenario(seed=0, config=CellConfig(), shape=shape, rates=Rates(), arrivals=(), faults=faults))

    cell.run()

    assert cell.seen["members_that_learnt_their_end"] == 1
    check_end(cell)
