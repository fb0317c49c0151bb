"""What a request costs the whole scheduler process with its default settings: sockets, decoding, encoding, publishing.

A real nats-server and a real scheduler; the members around it are simulated (:mod:`bench.live_cell`) and answer at the
speed of the load asked for. Processor time of the scheduler's process is read over a window behind the first seconds,
with the number of requests that were answered, inputs that were folded and outputs that came in it.

``python -m bench.scheduler_process [--rate 100] [--seconds 30] [--profile FILE]``
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import results_file
from bench.live_cell import LiveCell, leave_snapshot, warm_simulation
from bench.recorded_load import Load
from bench.scheduler_rate import yardstick_ms
from shared import subjects
from shared.bus.nats_bus import connect
from shared.codec import decode, encode
from shared.errors import Unavailable
from shared.messages.status import CellStatus, GetStatus
from thermocline.simulate.__main__ import GC_THRESHOLDS
from thermocline.supervisor.nats_config import nats_config_text
from thermocline.supervisor.nats_program import find_nats_program
from thermocline.supervisor.nats_server import wait_until_up
from thermocline.supervisor.ports import free_ports

START_S = 60.0
YARDSTICK_S = 0.5

SERVER_NAME = "scheduler-process"
_TICKS = os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> dict[str, float]:
    """Processor time of a process so far, in its own code and in the kernel's."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return {"user": int(fields[11]) / _TICKS, "system": int(fields[12]) / _TICKS}


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A nats-server of this benchmark's own, as the embedded one is configured, and its port."""
    (port,) = free_ports(1)
    config = folder / "nats.conf"
    text = nats_config_text(server_name=SERVER_NAME, port=port, store_dir=folder / "store")
    config.write_text(text, encoding="utf-8")
    program = str(find_nats_program().path)
    return subprocess.Popen([program, "-c", str(config)], stderr=subprocess.DEVNULL), port


def start_scheduler(url: str, profile: Path | None) -> subprocess.Popen[bytes]:
    """The scheduler with its defaults, but for patience with a machine that does other work."""
    flags = ["--nats", url, "--log-level", "warning", "--lead-ms", "10000", "--heartbeat-lost-ms", "60000"]
    command = [sys.executable, "-m", "services.scheduler", *flags]
    if profile is not None:
        command = [sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "services.scheduler", *flags]
    return subprocess.Popen(command)


async def wait_until_live(bus: Any) -> CellStatus:
    """Until the scheduler answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            return decode(await bus.call(subjects.rpc("scheduler", "status"), encode(GetStatus())), CellStatus)
        except Unavailable:
            await asyncio.sleep(0.02)  # As long as a measured start is overstated at most.
    raise SystemExit(f"the scheduler did not answer within {START_S} s")


async def measure(port: int, options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Run the cell, and read the window."""
    simulation = warm_simulation(load)
    gc.freeze()
    await wait_until_up(SERVER_NAME, "127.0.0.1", port, timeout_s=START_S)
    url = f"nats://127.0.0.1:{port}"
    bus = await connect((url,), "live")
    await leave_snapshot(bus, simulation, port)
    live = LiveCell(bus, simulation, rate=options.rate, seed=load.seed)
    await bus.subscribe(subjects.OUTPUTS, live.received)
    scheduler = start_scheduler(url, options.profile)
    tasks = [asyncio.create_task(live.beat())]
    try:
        status = await wait_until_live(bus)
        if not status.workers:
            raise SystemExit("the scheduler did not start from the snapshot")
        tasks.append(asyncio.create_task(live.run()))
        await asyncio.sleep(options.ramp)
        before = await _reading(bus, live, scheduler.pid)
        yardsticks = []
        until = time.monotonic() + options.seconds
        while time.monotonic() < until and not any(task.done() for task in tasks):
            yardsticks.append(await asyncio.to_thread(yardstick_ms))
            await asyncio.sleep(YARDSTICK_S)
        after = await _reading(bus, live, scheduler.pid)
        for task in tasks:
            if task.done():
                task.result()
        status = await wait_until_live(bus)
    finally:
        for task in tasks:
            task.cancel()
        scheduler.send_signal(signal.SIGTERM)
        await asyncio.to_thread(scheduler.wait)
        await bus.close()
    return _summary(before, after, statistics.fmean(yardsticks)) | {"unanswered": len(live.cell.open)}


async def _reading(bus: Any, live: LiveCell, pid: int) -> dict[str, float]:
    return {
        "clock": time.monotonic(),
        "requests": float(live.cell.figures.finished),
        "inputs": float((await bus.stream_info(subjects.INPUTS_STREAM)).last_seq),
        "outputs": float(live.published),
        **process_seconds(pid),
    }


def _summary(before: dict[str, float], after: dict[str, float], yardstick: float) -> dict[str, Any]:
    """Per request of the window."""
    grown = {name: after[name] - before[name] for name in after}
    requests = grown["requests"]
    ms = (grown["user"] + grown["system"]) / requests * 1e3
    return {
        "requests": round(requests),
        "requests_per_s": round(requests / grown["clock"], 1),
        "inputs_per_request": round(grown["inputs"] / requests, 2),
        "outputs_per_request": round(grown["outputs"] / requests, 2),
        "busy": round((grown["user"] + grown["system"]) / grown["clock"], 3),
        "ms_per_request": round(ms, 3),
        "system_ms_per_request": round(grown["system"] / requests * 1e3, 3),
        "requests_per_s_of_one_core": round(1e3 / ms),
        "yardstick_ms": round(yardstick, 2),
    }


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    defaults = Load()
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--ramp", type=float, default=15.0, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the window")
    parser.add_argument("--workers", type=int, default=defaults.workers)
    parser.add_argument("--device-tokens", type=int, default=defaults.device_tokens)
    parser.add_argument("--warm", type=int, default=defaults.warm)
    parser.add_argument("--profile", type=Path, default=None, help="run the scheduler under cProfile")
    parser.add_argument("--name", default="scheduler_process", help="of the results file")
    options = parser.parse_args()
    load = Load(workers=options.workers, device_tokens=options.device_tokens, warm=options.warm, seed=options.seed)
    gc.set_threshold(*GC_THRESHOLDS)
    with tempfile.TemporaryDirectory() as folder:
        server, port = start_server(Path(folder))
        try:
            results = asyncio.run(measure(port, options, load))
        finally:
            server.terminate()
            server.wait()
    print(results)
    settings = {"workers": load.workers, "device_tokens": load.device_tokens, "warm": load.warm, "rate": options.rate}
    print(results_file.write(options.name, {"settings": settings, **results}, seed=options.seed))


if __name__ == "__main__":
    main()
