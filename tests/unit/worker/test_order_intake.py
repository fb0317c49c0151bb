"""Orders go to the compute thread, and the worker ends where they cannot."""

from __future__ import annotations

import pytest

from services.worker.ending import Ending
from services.worker.inbox import Inbox
from services.worker.order_intake import OrderIntake
from shared.errors import InternalError, OperatorError
from shared.messages.worker_plans import Dismiss, WorkerOrder, WorkerPlan
from tests.unit.worker.driven_executor import abort


def plan(order: WorkerOrder) -> WorkerPlan:
    return WorkerPlan(worker_id="w", incarnation="inc", number=7, epoch=1, cause=1, order=order)


async def test_an_order_keeps_the_number_of_its_plan() -> None:
    """The compute thread says by it how far it is."""
    inbox = Inbox()

    await OrderIntake(inbox, Ending(), None).deliver(plan(abort()))

    arrival = inbox.take()
    assert arrival is not None
    assert (arrival.number, arrival.order) == (7, abort())


async def test_a_closed_inbox_takes_no_order() -> None:
    """The worker is leaving, and nobody would read it."""
    inbox = Inbox()
    inbox.close()

    await OrderIntake(inbox, Ending(), None).deliver(plan(abort()))

    assert inbox.take() is None


async def test_the_first_reason_ends_the_worker() -> None:
    """A compute thread that takes no orders any more is one; what comes of it is not another."""
    ending = Ending()
    intake = OrderIntake(Inbox(capacity=0), ending, None)
    await intake.deliver(plan(abort()))
    await intake.deliver(plan(Dismiss(reason="other model")))

    with pytest.raises(InternalError, match="hangs") as raised:
        await ending.wait()
    assert not isinstance(raised.value, OperatorError)
