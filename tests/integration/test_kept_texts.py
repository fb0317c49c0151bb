"""Sessions of long prompts at workers that keep texts: they are told what is new, and no answer changes."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from shared import subjects
from shared.bus.nats_bus import connect
from shared.codec import decode_published
from shared.messages.worker_plans import AdmitRequest, WorkerPlan
from tests.idle import status_at
from tests.integration.test_prompts_by_reference import (
    FIRST_TOKENS,
    Session,
    kill_active,
    model,
    two_schedulers,
)
from tests.integration.test_survival import UNHURRIED
from tests.waiting import holds, is_ready
from thermocline.supervisor.api import RunningCell, running

__all__ = ["model"]

pytestmark = pytest.mark.integration

NEW_TOKENS = 150
TURN_BYTES = 6_000 + 4 * NEW_TOKENS


async def admissions(nats_url: str) -> list[tuple[AdmitRequest, int]]:
    """Every admission in the stream of outputs, with its bytes there; what a new scheduler says again counts once."""
    bus = await connect(tuple(nats_url.split(",")), "test")
    try:
        stored = [each.data async for each in bus.follow(subjects.OUTPUTS_STREAM, live=False)]
    finally:
        await bus.close()
    found = [(decode_published(data), len(data)) for data in stored]
    plans = {
        (plan.incarnation, plan.number): (plan.order, nbytes) for plan, nbytes in found if isinstance(plan, WorkerPlan)
    }
    return [(order, nbytes) for order, nbytes in plans.values() if isinstance(order, AdmitRequest)]


async def admitted(cell: RunningCell) -> None:
    """Wait until the worker has a request."""
    async with asyncio.timeout(60):
        while not any(each.running for each in (await status_at(cell.nats_url)).workers):
            await asyncio.sleep(0.02)


def test_a_session_survives_its_worker_and_its_scheduler(model: Path) -> None:
    """A worker that is new is told everything, whether the one before died between two answers or amid one; a scheduler
    that is new knows what its worker keeps.
    """
    with (
        running(two_schedulers(model), environ=UNHURRIED) as cell,
        httpx.Client(base_url=cell.base_url, timeout=240, trust_env=False) as http,
        ThreadPoolExecutor(1) as clients,
    ):
        session = Session(http, model.name)
        session.go_on(new=FIRST_TOKENS)
        session.go_on(2)
        asyncio.run(kill_active(cell))
        assert holds(lambda: is_ready(cell.base_url)), cell.logs("gateway")
        session.go_on(2)
        pid = cell.kill("worker-0")
        cell.wait_restarted("worker-0", pid)
        session.go_on(2)
        cell.kill("worker-0", signal.SIGSTOP)  # What it is told from now on it does not end.
        asked = clients.submit(session.go_on, new=FIRST_TOKENS)
        asyncio.run(admitted(cell))
        pid = cell.kill("worker-0")
        asked.result()
        cell.wait_restarted("worker-0", pid)
        session.go_on(2)
        told = asyncio.run(admissions(cell.nats_url))
        counters = asyncio.run(status_at(cell.nats_url)).counters
        again = [session.ask(prompt, read=False, write=False) for prompt, _ in session.turns]

    assert again == [answer for _, answer in session.turns]
    assert "texts_missing" not in counters
    assert counters["workers_lost"] == 2
    whole = [order.base is None for order, _ in told]
    #              first   turns; another scheduler      worker  turn   long   again  turns
    assert whole == [True, False, False, False, False, True, False, False, True, False, False]
    turns = [nbytes for order, nbytes in told if order.base is not None and order.prompt_tokens < 2 * FIRST_TOKENS]
    assert max(turns) <= TURN_BYTES
