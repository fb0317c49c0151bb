"""What a request costs the scheduler process besides its core: reading the stream, decoding, encoding, publishing.

A busy cell is recorded (:mod:`bench.recorded_load`). Another process stores its inputs in a stream of a nats-server.
This one follows the stream, decodes each input, and sends the outputs that were recorded for it through the scheduler's
outbox until the server has them all. Inputs come as fast as they are read, as they do where a scheduler is always busy:
one that idles between inputs wakes up for each, and pays more. Processor time, the least of three readings.

``python -m bench.scheduler_sockets [--requests 4000]``
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import tempfile
import time
from pathlib import Path

import uvloop

from bench import results_file
from bench.recorded_load import Load, Recorded, record
from bench.scheduler_process import SERVER_NAME, START_S, start_server
from services.scheduler.outbox import Outbox
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus, StreamLimits
from shared.codec import Published, decode_input, decode_published
from shared.lifecycle import quiet_collector
from thermocline.simulate.__main__ import GC_THRESHOLDS
from thermocline.supervisor.nats_server import wait_until_up

READINGS = 3

_FLUSH_EVERY = 500
_YIELD_EVERY = 32


def store(url: str, inputs: list[bytes]) -> None:
    """Put ``inputs`` into the stream, with ids as their senders give them."""

    async def run() -> None:
        bus = await connect((url,), "store")
        await bus.ensure_streams(StreamLimits())
        for number, data in enumerate(inputs):
            await bus.publish(subjects.request_input("gateway"), data, {"Nats-Msg-Id": f"stored-{number}"})
            if number % _FLUSH_EVERY == 0:
                await bus.flush()
        await bus.flush()
        while (await bus.stream_info(subjects.INPUTS_STREAM)).last_seq < len(inputs):  # noqa: ASYNC110 - of a server.
            await asyncio.sleep(0.1)
        await bus.close()

    asyncio.run(run())


async def read_once(bus: Bus, outputs: list[list[Published]]) -> float:
    """Processor time of following the whole stream, with the recorded outputs of each input published, in seconds."""
    outbox = Outbox(bus, time.time_ns, lambda: True)
    folding = asyncio.Lock()
    began, count = time.process_time(), 0
    async for message in bus.follow(subjects.INPUTS_STREAM, live=False):
        async with folding:
            decode_input(message.data)
            await outbox.send(outputs[count], message.seq, message.time_ns)
        count += 1
        if count % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
    await outbox.confirm()
    if count != len(outputs):
        raise SystemExit(f"the stream had {count} inputs in place of {len(outputs)}")
    return time.process_time() - began


async def measure(port: int, recorded: Recorded) -> list[float]:
    """Seconds of each reading."""
    await wait_until_up(SERVER_NAME, "127.0.0.1", port, timeout_s=START_S)
    url = f"nats://127.0.0.1:{port}"
    storing = multiprocessing.get_context("spawn").Process(
        target=store, args=(url, [data for _, _, data in recorded.inputs])
    )
    storing.start()
    await asyncio.to_thread(storing.join)
    if storing.exitcode:
        raise SystemExit("the inputs could not be stored")
    outputs = [[decode_published(body) for body in bodies] for bodies in recorded.outputs]
    quiet_collector()
    bus = await connect((url,), "read")
    seconds = [await read_once(bus, outputs) for _ in range(READINGS)]
    await bus.close()
    return seconds


def main() -> None:
    defaults = Load()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=defaults.measured)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)
    recorded = record(Load(measured=options.requests, seed=options.seed))
    with tempfile.TemporaryDirectory() as folder:
        server, port = start_server(Path(folder))
        try:
            seconds = uvloop.run(measure(port, recorded))
        finally:
            server.terminate()
            server.wait()
    best = min(seconds)
    results = {
        "ms_per_request": round(best / options.requests * 1e3, 4),
        "us_per_input": round(best / len(recorded.inputs) * 1e6, 2),
        "inputs_per_request": round(len(recorded.inputs) / options.requests, 2),
        "outputs_per_request": round(sum(map(len, recorded.outputs)) / options.requests, 2),
        "readings_s": [round(one, 3) for one in seconds],
    }
    print(results)
    print(results_file.write("scheduler_sockets", results, seed=options.seed))


if __name__ == "__main__":
    main()
