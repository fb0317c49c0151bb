"""Real schedulers of which each dies by the same input: they leave it out, and a recording of that replays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.scheduler import core
from services.scheduler.quarantine import FAILURES
from services.scheduler.record import record
from services.scheduler.replay import replay
from services.scheduler.skip_input import main as skip_main
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus, StreamLimits
from shared.codec import Input, encode
from shared.messages.requests import SubmitRequest
from tests.integration.scheduler_process import SchedulerProcess, folded
from tests.nats_server import NatsServer
from tests.scripted_cell import submit, worker_joined

pytestmark = pytest.mark.integration

POISONED = """
import sys
from services.scheduler import core

original = core.step

def step(state, stamped):
    if getattr(stamped.input, "request_id", "") == "poison" and type(stamped.input).__name__ == "SubmitRequest":
        {what}
    return original(state, stamped)

core.step = step
from services.scheduler.__main__ import main
sys.exit(main())
"""


async def put(bus: Bus, *messages: Input) -> int:
    """Store inputs; the sequence of the last."""
    return [await bus.append(subjects.request_input("gw"), encode(message)) for message in messages][-1]


async def test_schedulers_that_die_by_an_input_leave_it_out(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start that fails ends its process, but the last: that goes on, and says so."""
    program = ("-c", POISONED.format(what='raise KeyError("poisoned")'))
    process = SchedulerProcess(nats_server.url, tmp_path, "only", program)
    bus = await connect([nats_server.url], "test")
    await bus.ensure_streams(StreamLimits())
    try:
        process.start()
        await put(bus, worker_joined(), submit("before", [1] * 20))
        await folded(bus, 1)
        poison = await put(bus, submit("poison", [2] * 20))
        codes = []
        for _ in range(FAILURES - 1):
            codes.append(process.wait())
            process.start()
        after = await put(bus, submit("after", [3] * 20))
        status = await folded(bus, after)
        path = tmp_path / "fatal.tcrec"
        await record(bus, path)
    finally:
        process.close()
        await bus.close()

    assert 0 not in codes
    assert process.log().count("step_failed") == FAILURES
    assert status.running == 2
    (shown,) = [each.reason for each in status.degraded if each.what == "input"]
    assert f"input {poison} (SubmitRequest on {subjects.request_input('gw')}) is in quarantine" in shown
    original = core.step

    def step(state: core.CellState, stamped: core.Stamped) -> list[core.Output]:
        assert not (isinstance(stamped.input, SubmitRequest) and stamped.input.request_id == "poison")
        return original(state, stamped)

    monkeypatch.setattr(core, "step", step)
    report = replay(path)
    assert (report.difference, report.skipped) == (None, 1)


async def test_an_order_gets_schedulers_past_an_input_that_kills_them(
    nats_server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing can be counted where the process is gone at once; the next start obeys the command's order."""
    program = ("-c", POISONED.format(what="import os; os._exit(9)"))
    process = SchedulerProcess(nats_server.url, tmp_path, "only", program)
    bus = await connect([nats_server.url], "test")
    await bus.ensure_streams(StreamLimits())
    try:
        process.start()
        await put(bus, worker_joined())
        await folded(bus, 1)
        poison = await put(bus, submit("poison", [2] * 20))
        assert process.wait() == 9
        command = [str(poison), "--reason", "it kills", "--wait-s", "0", "--nats", nats_server.url]
        unheard = await asyncio.to_thread(skip_main, command)
        process.start()
        await folded(bus, poison)
        obeyed = await asyncio.to_thread(skip_main, command)
        refused = await asyncio.to_thread(skip_main, ["1", "--nats", nats_server.url])
    finally:
        process.close()
        await bus.close()

    assert (unheard, obeyed, refused) == (1, 0, 2)
    said = capsys.readouterr()
    assert said.out == f"input {poison} is left out: it kills\n"
    assert "the next scheduler that starts obeys it" in said.err
    assert "input 1 was folded already" in said.err
