"""What clients notice when a cluster of three brokers loses a server.

A whole cell on this machine, every process real, on three NATS servers that keep three copies of each stream. Clients
stream answers all the time; one server is killed (SIGKILL), started again, and given time to catch up, again and again.
In turn it is the one that leads the cluster's metadata, which consumers are made by, and the one that leads the stream
of inputs, which requests are stored by. For each kill:

- ``longest_pause``: the longest time between two messages with tokens that a stream which was open at the kill saw;
- ``answered``: from the kill until a request that is sent behind it has its first token. Like any client it tries again
  when it is answered 503, after the time that the answer names;
- ``calm_pause``: as ``longest_pause``, in the seconds before the kill, which is what the load alone does.

A stream that breaks, or an answer that differs from the one to the same request without kills, ends the benchmark.

``python -m bench.broker_loss [--kills 20] [--save]``
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.killed_under_load import WAIT_S, Load, arguments, report, spread, under_load
from shared import subjects
from shared.bus.protocol import Bus
from tests.nats_server import NatsCluster
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

KINDS = ("metadata", "inputs")
STREAMS = 6  # Inputs, outputs, snapshots, records, kept responses and answers.
MEASURES = ("longest_pause", "answered", "calm_pause")
CALM_S = 2.0
AFTER_S = 1.0
POLL_S = 0.1


async def until(claim: Callable[[], bool]) -> None:
    """Wait until ``claim``, which may block, holds."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if await asyncio.to_thread(claim):
                return
            await asyncio.sleep(POLL_S)


def is_whole(cluster: NatsCluster) -> bool:
    """Whether every stream has a leader, and every copy is current."""
    try:
        followers = cluster.metadata_leader().monitor("jsz")["meta_cluster"]["replicas"]
        streams = [stream for _, stream in cluster.led_streams()]
    except (OSError, KeyError, StopIteration):
        return False  # A server starts, or a leader is being elected.
    copies = [copy for stream in streams for copy in stream["cluster"].get("replicas", ())]
    return len(streams) == STREAMS and all(one["current"] and not one.get("offline") for one in [*followers, *copies])


async def kill_once(cluster: NatsCluster, bus: Bus, load: Load, kind: str) -> dict[str, float]:
    """Milliseconds of one kill."""
    await until(lambda: is_whole(cluster))
    await asyncio.sleep(CALM_S)
    calm_pause_s = load.longest_pause_s(time.monotonic() - CALM_S, time.monotonic())
    find = {"metadata": cluster.metadata_leader, "inputs": lambda: cluster.leader_of(subjects.INPUTS_STREAM)}[kind]
    victim = await asyncio.to_thread(find)
    killed_s = time.monotonic()
    open_then = [stream for stream in load.streams if stream.ended_s > killed_s]
    victim.kill()
    answered_s = await load.probe() - killed_s
    await asyncio.sleep(AFTER_S)
    ends = [stream for stream in open_then if stream.came_s and stream.came_s[0] < killed_s]
    await until(lambda: all(stream.ended_s < float("inf") for stream in ends))
    pause_s = max((stream.longest_pause_s(killed_s, time.monotonic()) for stream in ends), default=0.0)
    load.forget(killed_s)
    await asyncio.to_thread(victim.start)
    return {name: value * 1e3 for name, value in zip(MEASURES, (pause_s, answered_s, calm_pause_s), strict=True)}


async def measure(cell: RunningCell, cluster: NatsCluster, options: argparse.Namespace) -> dict[str, Any]:
    """All kills, one after another."""
    refused = 0

    async def kill(bus: Bus, load: Load, number: int) -> tuple[str, dict[str, float]]:
        nonlocal refused
        kind = KINDS[number % len(KINDS)]
        row = await kill_once(cluster, bus, load, kind)
        refused = load.refused
        print(f"{number + 1:4} {kind}: " + ", ".join(f"{name} {value:.0f}" for name, value in row.items()), flush=True)
        return kind, row

    found, counters = await under_load(cell, options, kill)
    return {
        "kills": options.kills,
        **{
            f"{kind}_{name}_ms": spread([row[name] for each, row in found if each == kind])
            for kind in KINDS
            for name in MEASURES
        },
        "refused_503": refused,
        "requests_accepted": counters["requests_accepted"],
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.kills < len(KINDS):
        raise SystemExit(f"--kills must be at least {len(KINDS)}")
    with tempfile.TemporaryDirectory() as folder:
        cluster = NatsCluster(Path(folder))
        try:
            cluster.start()
            with running(SupervisorConfig(nats=cluster.urls, stream_replicas=3, port=0)) as cell:
                found = asyncio.run(measure(cell, cluster, options))
        finally:
            cluster.stop()
    report("broker_loss", found, options)


if __name__ == "__main__":
    main()
