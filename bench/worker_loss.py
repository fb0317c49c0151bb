"""How long streams pause when the worker that computes them is killed.

A whole cell on this machine, every process and NATS real, with two workers. Clients stream answers all the time; the
worker that runs the most is killed (SIGKILL) again and again, and started again by the supervisor. For each kill:

- ``noticed``: from the kill to ``WorkerLost`` in the stream, by the broker's timestamp;
- ``longest_pause``: the longest time between two messages with tokens that a stream which ran on it saw;
- ``calm_pause``: the same of all streams in the seconds before the kill, which is what the load alone does.

And for each stream that ran on it, what its pause consists of behind ``noticed``:

- ``asked``: until the gateway's ``ResumeRequest`` is stored;
- ``admitted``: from there until another worker is told of the request. It may wait there for a place in a batch;
- ``next_token``: from there until its client has the next token. What it had is loaded, restored or computed again.

A stream that breaks, or an answer that differs from the one to the same request without kills, ends the benchmark.

``python -m bench.worker_loss [--kills 20] [--save]``
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from bench.killed_under_load import WAIT_S, Load, Stream, active, arguments, report, spread, under_load
from shared import subjects
from shared.bus.protocol import Bus, StreamMessage
from shared.codec import decode_input, decode_published
from shared.errors import CodecError
from shared.messages.cell_events import WorkerLost
from shared.messages.gateway_notices import GatewayNotice, ResumeNeeded
from shared.messages.requests import ResumeRequest
from shared.messages.status import WorkerStatus
from shared.messages.worker_plans import AdmitRequest, WorkerPlan
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

TARGET_S = 2.0
CALM_S = 2.0
POLL_S = 0.05
PARTS = ("asked", "admitted", "next_token")


@dataclass
class Loss:
    """What came of one kill. Times are of the wall clock (ns)."""

    killed_ns: int
    lost: StreamMessage
    reason: str
    attempts: dict[str, int] = field(default_factory=dict)  # Of each request that ran there: the one that goes on.
    asked_ns: dict[str, int] = field(default_factory=dict)
    admitted_ns: dict[str, int] = field(default_factory=dict)


async def kill_once(cell: RunningCell, bus: Bus, load: Load, workers: int) -> tuple[dict[str, float], list[Any]]:
    """Milliseconds of one kill, and the parts for each stream that ran on the worker."""
    await all_listed(bus, workers)
    await asyncio.sleep(CALM_S)
    calm_pause_s = load.longest_pause_s(time.monotonic() - CALM_S, time.monotonic())
    victim = max((await active(bus)).workers, key=lambda worker: worker.running)
    inputs_seq = (await bus.stream_info(subjects.INPUTS_STREAM)).last_seq
    outputs_seq = (await bus.stream_info(subjects.OUTPUTS_STREAM)).last_seq
    killed_s, killed_ns = time.monotonic(), time.time_ns()
    cell.kill(victim.worker_id, signal.SIGKILL)
    loss = await noticed(bus, victim, inputs_seq, killed_ns)
    streams = await gone_on(bus, load, loss, outputs_seq, killed_ns - int(killed_s * 1e9))
    parts = []
    for request_id, (_, token_ns) in streams.items():
        points = (loss.lost.time_ns, loss.asked_ns[request_id], loss.admitted_ns[request_id], token_ns)
        spans = [(late - early) / 1e6 for early, late in itertools.pairwise(points)]
        parts.append(dict(zip(PARTS, spans, strict=True)))
    pauses_s = [stream.longest_pause_s(killed_s, time.monotonic()) for stream, _ in streams.values()]
    load.forget(killed_s)
    return {
        "noticed": (loss.lost.time_ns - killed_ns) / 1e6,
        "longest_pause": max(pauses_s) * 1e3,
        "calm_pause": calm_pause_s * 1e3,
        "streams": len(streams),
        "by_silence": float(loss.reason == "heartbeat_lost"),
    }, parts


async def all_listed(bus: Bus, workers: int) -> None:
    """Wait until all workers are there and each of them runs something."""
    async with asyncio.timeout(WAIT_S):
        while True:
            known = (await active(bus)).workers
            if len(known) == workers and all(worker.running for worker in known):
                return
            await asyncio.sleep(POLL_S)


async def noticed(bus: Bus, victim: WorkerStatus, behind_seq: int, killed_ns: int) -> Loss:
    """Wait for the word of the worker's loss in the stream."""
    async with asyncio.timeout(WAIT_S):
        async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=behind_seq + 1):
            try:
                found = decode_input(message.data)
            except CodecError:
                continue
            if isinstance(found, WorkerLost) and found.incarnation == victim.incarnation:
                return Loss(killed_ns, message, found.reason)
    raise SystemExit("nobody noticed")


async def gone_on(bus: Bus, load: Load, loss: Loss, outputs_seq: int, wall_ns: int) -> dict[str, tuple[Stream, int]]:
    """Wait until every stream that ran on the worker goes on; returns each with the time of its next token.

    ``wall_ns`` is what the wall clock is ahead of the monotonic one.
    """
    async with asyncio.timeout(WAIT_S):
        while True:
            await asyncio.sleep(POLL_S)
            if (await active(bus)).seq < loss.lost.seq:
                continue
            await read_streams(bus, loss, outputs_seq)
            if not loss.attempts:
                raise SystemExit("nothing ran on the worker that was killed: the load is too small")
            if loss.admitted_ns.keys() != loss.attempts.keys():
                continue
            by_id = {f"{stream.answer_id}-0": stream for stream in load.streams}
            next_ns = {}
            for request_id, admitted_ns in loss.admitted_ns.items():
                came_ns = (int(at_s * 1e9) + wall_ns for at_s in by_id[request_id].came_s)
                next_ns[request_id] = next((at_ns for at_ns in came_ns if at_ns > admitted_ns), 0)
            if all(next_ns.values()):
                return {request_id: (by_id[request_id], at_ns) for request_id, at_ns in next_ns.items()}


async def read_streams(bus: Bus, loss: Loss, outputs_seq: int) -> None:
    """Fill in what both streams say by now about the requests that ran on the worker."""
    async for message in bus.follow(subjects.OUTPUTS_STREAM, from_seq=outputs_seq + 1, live=False):
        output = decode_published(message.data)
        word = output.word if isinstance(output, GatewayNotice) else None
        order = output.order if isinstance(output, WorkerPlan) else None
        if isinstance(word, ResumeNeeded) and output.cause == loss.lost.seq:
            loss.attempts[word.request_id] = word.attempt
        elif isinstance(order, AdmitRequest) and order.attempt == loss.attempts.get(order.request_id):
            loss.admitted_ns.setdefault(order.request_id, message.time_ns)
    async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=loss.lost.seq, live=False):
        try:
            found = decode_input(message.data)
        except CodecError:
            continue
        if isinstance(found, ResumeRequest) and found.attempt == loss.attempts.get(found.request_id):
            loss.asked_ns.setdefault(found.request_id, message.time_ns)


async def measure(cell: RunningCell, options: argparse.Namespace) -> dict[str, Any]:
    """All kills, one after another."""

    async def kill(bus: Bus, load: Load, number: int) -> tuple[dict[str, float], list[Any]]:
        row, of_streams = await kill_once(cell, bus, load, options.workers)
        print(f"{number + 1:4}: " + ", ".join(f"{name} {value:.0f}" for name, value in row.items()), flush=True)
        return row, of_streams

    found, counters = await under_load(cell, options, kill)
    rows = [row for row, _ in found]
    parts = [part for _, of_streams in found for part in of_streams]
    return {
        "kills": options.kills,
        "target_longest_pause_p99_ms": TARGET_S * 1e3,
        **{f"{name}_ms": spread([row[name] for row in rows]) for name in ("noticed", "longest_pause", "calm_pause")},
        **{f"{name}_ms": spread([part[name] for part in parts]) for name in PARTS},
        "streams_that_went_on": len(parts),
        "noticed_by_silence": sum(row["by_silence"] for row in rows),
        "requests_accepted": counters["requests_accepted"],
        "requests_resumed": counters["requests_resumed"],
        "workers_joined": counters["workers_joined"],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.kills < 1 or options.workers < 2:
        parser.error("there must be a kill, and somebody to go on")
    with running(SupervisorConfig(workers=options.workers, port=0)) as cell:
        found = asyncio.run(measure(cell, options))
    report("worker_loss", found, options)


if __name__ == "__main__":
    main()
