"""What passes between the event loop and the compute thread is in order and bounded both ways."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.worker import report_channel
from services.worker.inbox import Arrival, Inbox
from services.worker.report_channel import ReportChannel
from services.worker.reports import Report
from shared.errors import InternalError
from shared.messages.worker_plans import DetachHostPool


def arrival(number: int) -> Arrival:
    return Arrival(number, DetachHostPool(storage_id="s"), 0)


def test_orders_are_taken_in_order() -> None:
    """First in, first out, and None when there is nothing."""
    inbox = Inbox()
    for number in range(3):
        inbox.put(arrival(number))

    taken = [inbox.take() for _ in range(4)]

    assert [one.number if one else None for one in taken] == [0, 1, 2, None]


def test_the_inbox_is_bounded() -> None:
    """One order too many is an error, not a growing queue."""
    inbox = Inbox(capacity=2)
    inbox.put(arrival(1))
    inbox.put(arrival(2))

    with pytest.raises(InternalError, match="2 orders"):
        inbox.put(arrival(3))


def test_looking_takes_nothing() -> None:
    """The oldest order stays where it is."""
    inbox = Inbox()
    assert inbox.peek() is None
    inbox.put(arrival(1))
    inbox.put(arrival(2))

    assert inbox.peek() == inbox.peek() == inbox.take()


@pytest.mark.parametrize("wake", ["put", "wake", "close"])
def test_a_sleeping_reader_is_woken(wake: str) -> None:
    """By an order, by somebody who wants it to look around, and by the end."""
    inbox = Inbox()
    woken = threading.Event()

    def read() -> None:
        inbox.wait()
        woken.set()

    reader = threading.Thread(target=read)
    reader.start()
    if wake == "put":
        inbox.put(arrival(1))
    elif wake == "wake":
        inbox.wake()
    else:
        inbox.close()
    reader.join(10)

    assert woken.is_set()
    assert inbox.is_closed == (wake == "close")


def test_one_call_wakes_once() -> None:
    """A reader that was woken sleeps again, rather than turning in circles."""
    inbox = Inbox()
    inbox.wake()
    inbox.wait()
    reader = threading.Thread(target=inbox.wait)
    reader.start()

    reader.join(0.05)
    assert reader.is_alive()
    inbox.close()
    reader.join(10)
    assert not reader.is_alive()


async def test_reports_are_handled_on_the_loop_in_order() -> None:
    """However many are posted before the loop looks."""
    handled: list[tuple[int, int]] = []
    enough = asyncio.Event()

    def handle(report: Report) -> None:
        handled.append((report.step, threading.get_ident()))
        if len(handled) == 500:
            enough.set()

    channel = ReportChannel(asyncio.get_running_loop(), handle)

    def post() -> None:
        for step in range(500):
            channel.post(Report(step=step))

    poster = threading.Thread(target=post)
    poster.start()
    async with asyncio.timeout(10):
        await enough.wait()
    poster.join(10)

    assert handled == [(step, threading.get_ident()) for step in range(500)]


async def test_behind_a_first_token_the_loop_goes_on_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute thread stands still until the report is taken; behind others it does not."""
    monkeypatch.setattr(report_channel, "HAND_OVER_S", 60.0)
    happened: list[str] = []
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(report: Report) -> None:
        happened.append(f"taken {report.step}")

    channel = ReportChannel(loop, handle)

    def post() -> None:
        for step in range(3):
            channel.post(Report(step=step, begins=True))
            happened.append(f"behind {step}")
        loop.call_soon_threadsafe(over.set)

    poster = threading.Thread(target=post)
    poster.start()
    async with asyncio.timeout(20):
        await over.wait()
    poster.join(10)

    assert happened == [f"{what} {step}" for step in range(3) for what in ("taken", "behind")]


async def test_the_loop_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be busy, and this call comes from its own thread."""
    monkeypatch.setattr(report_channel, "HAND_OVER_S", 0.0)
    taken: list[int] = []
    channel = ReportChannel(asyncio.get_running_loop(), lambda report: taken.append(report.step))

    channel.post(Report(step=1, begins=True))

    assert taken == []
    channel.drain()
    assert taken == [1]


async def test_a_hanging_loop_stops_the_compute_thread() -> None:
    """Reports do not pile up without end."""
    channel = ReportChannel(asyncio.get_running_loop(), lambda report: None, capacity=3)
    for step in range(3):
        channel.post(Report(step=step))

    with pytest.raises(InternalError, match="hangs"):
        channel.post(Report(step=3))
