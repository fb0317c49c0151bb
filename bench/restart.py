"""How long a killed scheduler is away: its process is started again with a snapshot of a million nodes.

A real nats-server and a real scheduler with its defaults. The state of :mod:`bench.million_nodes` is stored as a
snapshot, a few hundred inputs follow it in the stream, and a scheduler starts from it. It is killed and started again,
a few times; each time it is measured how long it takes from the start of the process until the scheduler answers a
call, which it does only as the holder of the lead with its state restored. The lead of the one that was killed has run
out by then, so that its length is not part of the time.

The parts are measured in a process of their own, by the same calls that a start makes: fetching the bytes of the
snapshot from the broker, checking and decoding them, and folding what follows in the stream; and, in that state, the
first step of a new request.

``python -m bench.restart [--nodes 1000000] [--times 3]``
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import core_steps, results_file
from bench.live_cell import leave_state
from bench.million_nodes import HOST, ask, million_nodes
from bench.scheduler_process import process_seconds, start_server, wait_until_live
from services.scheduler import core
from services.scheduler.fold import load_state
from services.scheduler.heap import keep_heap
from services.scheduler.snapshots import SnapshotStore
from shared import subjects
from shared.bus.nats_bus import connect
from shared.codec import encode
from shared.messages.status import Heartbeat
from thermocline.supervisor.nats_server import wait_until_up

SERVER_NAME = "scheduler-process"
TAIL_INPUTS = 500
LEAD_MS = 2000
LEAD_OVER_S = 3.0
START_S = 60.0


def start_scheduler(url: str) -> subprocess.Popen[bytes]:
    """A scheduler that takes nobody for dead meanwhile."""
    flags = ["--nats", url, "--log-level", "warning", "--lead-ms", str(LEAD_MS), "--heartbeat-lost-ms", "60000"]
    return subprocess.Popen([sys.executable, "-m", "services.scheduler", *flags])


async def leave_cell(port: int, nodes: int, seed: int) -> dict[str, Any]:
    """Store the snapshot and the inputs behind it."""
    cell = million_nodes(nodes=nodes, seed=seed, config=core_steps.CONFIG)
    # The stream's clock must not run backwards.
    cell.state.now_ns = time.time_ns()
    bus = await connect((f"nats://127.0.0.1:{port}",), "restart")
    try:
        size = await leave_state(bus, cell.state, port)
        for number in range(TAIL_INPUTS):
            message = encode(ask(f"tail-{number}", cell.tokens(512)))
            await bus.publish(subjects.request_input("gateway-0"), message, {"Nats-Msg-Id": f"tail-{number}"})
    finally:
        await bus.close()
    return {"nodes": len(cell.state.tree.nodes), "snapshot_bytes": size}


async def beat(bus: Any) -> None:
    """Heartbeats of the members that the snapshot knows, until cancelled."""
    members = [("worker", f"worker-{number}") for number in range(8)] + [("storage", HOST)]
    while True:
        for kind, name in members:
            told = Heartbeat(kind=kind, id=name, incarnation="one")  # type: ignore[arg-type]
            await bus.publish(subjects.heartbeat(kind, name), encode(told))
        await asyncio.sleep(1.0)


async def measure_starts(port: int, times: int) -> list[dict[str, float]]:
    """Start, wait until it answers, kill, and once more."""
    url = f"nats://127.0.0.1:{port}"
    bus = await connect((url,), "restart")
    beating = asyncio.create_task(beat(bus))
    found = []
    try:
        for _ in range(times + 1):
            begun = time.monotonic()
            scheduler = start_scheduler(url)
            status = await wait_until_live(bus)
            took = time.monotonic() - begun
            if len(status.workers) != 8:
                raise SystemExit("the scheduler did not start from the snapshot")
            spent = process_seconds(scheduler.pid)
            figures = {"s": round(took, 2)} | {f"{name}_s": round(each, 2) for name, each in spent.items()}
            found.append(figures | {"resident_bytes": _resident_bytes(scheduler.pid)})
            print(found[-1], flush=True)
            scheduler.send_signal(signal.SIGKILL)
            await asyncio.to_thread(scheduler.wait)
            await asyncio.sleep(LEAD_OVER_S)
    finally:
        beating.cancel()
        await bus.close()
    return found[1:]  # The first was no restart.


async def measure_parts(port: int) -> dict[str, float]:
    """What a start spends its time on, in this process, which has done nothing else; wall clock, seconds."""
    keep_heap()
    parts: dict[str, float] = {"imports": time.time() - _process_started()}
    bus = await connect((f"nats://127.0.0.1:{port}",), "restart")
    try:
        begun = time.monotonic()
        snapshot = await anext(SnapshotStore(bus).newest_first())
        parts["fetch"] = time.monotonic() - begun
        begun = time.monotonic()
        state = load_state(snapshot.state)
        parts["decode"] = time.monotonic() - begun
        gc.freeze()
        begun = time.monotonic()
        tail = [message async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=snapshot.seq + 1, live=False)]
        seq, time_ns = snapshot.seq, snapshot.time_ns
        for message in tail:
            seq, time_ns = message.seq, message.time_ns
            core.step(state, core.Stamped(seq, time_ns, ask(f"again-{seq}", bytes(2048))))
        parts["tail"] = time.monotonic() - begun
        begun = time.monotonic()
        core.step(state, core.Stamped(seq + 1, time_ns + 1, ask("first", bytes(4096))))
        parts["first_step"] = time.monotonic() - begun
    finally:
        await bus.close()
    return {name: round(seconds, 3) for name, seconds in parts.items()}


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096


def _process_started() -> float:
    """When this process began, by the machine's clock."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--out")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--parts-of", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--leave", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts_of:
        print(json.dumps(asyncio.run(measure_parts(options.parts_of))))
        return
    if options.leave:
        print(json.dumps(asyncio.run(leave_cell(options.leave, options.nodes, options.seed))))
        return
    with tempfile.TemporaryDirectory() as folder:
        server, port = start_server(Path(folder))
        try:
            asyncio.run(wait_until_up(SERVER_NAME, "127.0.0.1", port, timeout_s=START_S))
            results = _apart("--leave", port, options)
            results["parts"] = _apart("--parts-of", port, options)
            print(results, flush=True)
            results["starts"] = asyncio.run(measure_starts(port, options.times))
        finally:
            server.terminate()
            server.wait()
    print(results_file.write("restart", results, seed=options.seed, out=options.out))


def _apart(flag: str, port: int, options: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own prints: the state must not be in the memory of the one that measures."""
    command = [sys.executable, "-m", "bench.restart", flag, str(port), "--nodes", str(options.nodes)]
    answer = subprocess.run([*command, "--seed", str(options.seed)], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


if __name__ == "__main__":
    main()
