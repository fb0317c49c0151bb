"""How long a cell is without a scheduler when the active one is killed and another stands by.

A whole cell on this machine, every process and NATS real, with two schedulers. Clients stream answers all the time; the
active scheduler is killed (SIGKILL) again and again, and started again by the supervisor as the standby. For each kill:

- ``take_over``: from the kill to the successor's ``SchedulerStarted`` in the stream, by the broker's timestamp;
- ``longest_pause``: the longest time between two messages with tokens that a stream open at the time of the kill saw
  until one second after the take-over, the first message of a request that was waiting included;
- ``calm_pause``: the same in the seconds before the kill, which is what the load alone does.

A stream that breaks, or an answer that differs from the one to the same request without kills, ends the benchmark.

``python -m bench.take_over [--kills 20] [--save]``
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from typing import Any

from bench.killed_under_load import WAIT_S, Load, active, arguments, report, spread, under_load
from shared import subjects
from shared.bus.protocol import Bus, StreamMessage
from shared.codec import decode_input
from shared.errors import CodecError
from shared.messages.cell_events import SchedulerStarted
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

TARGET_S = 1.0
CALM_S = 2.0
AFTER_S = 1.0


async def next_start(bus: Bus, behind_seq: int, epoch: int) -> StreamMessage:
    """The next scheduler's start in the stream."""
    async with asyncio.timeout(WAIT_S):
        async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=behind_seq + 1):
            try:
                started = decode_input(message.data)
            except CodecError:
                continue
            if isinstance(started, SchedulerStarted) and started.epoch > epoch:
                return message
    raise SystemExit("nobody took over")


async def standing_by(cell: RunningCell, names: list[str], count: int) -> None:
    """Wait until the logs of the schedulers show so many entries into standby."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if sum(cell.logs(name, 100_000).count("standing_by") for name in names) >= count:
                return
            await asyncio.sleep(0.05)


async def kill_once(cell: RunningCell, bus: Bus, load: Load) -> dict[str, float]:
    """Seconds of one take-over."""
    await asyncio.sleep(CALM_S)
    status = await active(bus)
    calm_pause_s = load.longest_pause_s(time.monotonic() - CALM_S, time.monotonic())
    seq = (await bus.stream_info(subjects.INPUTS_STREAM)).last_seq
    killed_s, killed_ns = time.monotonic(), time.time_ns()
    cell.kill(status.scheduler_id, signal.SIGKILL)
    started = await next_start(bus, seq, status.epoch)
    await asyncio.sleep(AFTER_S)
    pause_s = load.longest_pause_s(killed_s, time.monotonic())
    load.forget(killed_s)
    return {
        "take_over": (started.time_ns - killed_ns) / 1e9,
        "longest_pause": pause_s,
        "calm_pause": calm_pause_s,
    }


async def measure(cell: RunningCell, options: argparse.Namespace) -> dict[str, Any]:
    """All kills, one after another."""
    names = [name for name in cell.children() if name.startswith("scheduler")]

    async def kill(bus: Bus, load: Load, number: int) -> dict[str, float]:
        await standing_by(cell, names, len(names) - 1 + number)
        row = await kill_once(cell, bus, load)
        print(f"{number + 1:4}: " + ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in row.items()))
        return row

    rows, counters = await under_load(cell, options, kill)
    return {
        "kills": options.kills,
        "target_take_over_p99_ms": TARGET_S * 1e3,
        **{f"{name}_ms": spread([row[name] * 1e3 for row in rows]) for name in rows[0]},
        "requests_accepted": counters["requests_accepted"],
        "workers_joined": counters["workers_joined"],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--schedulers", type=int, default=2)
    options = parser.parse_args()
    if options.kills < 1 or options.schedulers < 2:
        parser.error("there must be a kill, and somebody to take over")
    with running(SupervisorConfig(schedulers=options.schedulers, port=0)) as cell:
        found = asyncio.run(measure(cell, options))
    report("take_over", found, options)


if __name__ == "__main__":
    main()
