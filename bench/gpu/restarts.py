"""Each process of a cell on the GPU is killed, comes back, and serves as before.

A whole cell with the bundled model in float32, in which equal prompts have equal answers. Gateway, scheduler, storage
and worker are killed (SIGKILL) one after the other. After each a document that nobody knows is asked about, its KV is
written through to host memory, the device is emptied, and it is asked about again: the answer is to be the same tokens,
most of its prefix from host memory. Between storage and worker that takes CUDA IPC in both directions, so a storage
that maps a dead worker's pool, or a worker that maps a dead storage's, is found here.

``python -m bench.gpu.restarts [--quick | --cpu] [--seconds 40]``
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec

from bench.emptying import empty, rest
from bench.gpu import reading
from bench.gpu.from_disk import configure
from bench.gpu.served_cases import PLAIN
from bench.gpu.small_cell import answer, questions, small_cell
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.errors import Unavailable
from thermocline.client import Answer, RequestError, served_model
from thermocline.demo.workload import Ask
from thermocline.supervisor.api import RunningCell

PROCESSES = ("worker-0", "storage", "scheduler", "gateway")
BACK_S = 90.0
"""A process that is not back by then fails the part."""

_THROUGH = msgspec.structs.replace(PLAIN, host_writes="through")


async def round_trip(cell: RunningCell, ask: Ask) -> dict[str, Any]:
    """Ask, empty the device, ask again. Raises SystemExit if the second answer is another, or not from host memory."""
    bus = await connect((cell.nats_url,), "bench")
    try:
        await settled(bus)
        await configure(bus, _THROUGH)
        async with httpx.AsyncClient(base_url=cell.base_url, timeout=60, trust_env=False) as client:
            model = (await served_model(client))["id"]
            first = await answer(client, model, ask)
            await rest(bus)
            await empty(bus, ("device",))
            again = await answer(client, model, ask)
    finally:
        await bus.close()
    if again.token_ids != first.token_ids:
        raise SystemExit(f"from host memory came another answer: {again.token_ids} instead of {first.token_ids}")
    if 2 * again.host_tokens < again.prompt_tokens:
        raise SystemExit(f"{again.host_tokens} of {again.prompt_tokens} tokens came from host memory")
    return {"host_tokens": again.host_tokens, "prompt_tokens": again.prompt_tokens, "ttft_ms": again.ttft_s * 1e3}


async def settled(bus: Bus) -> None:
    """Wait until every process is known again, and nothing runs or moves."""
    async with asyncio.timeout(BACK_S):
        while True:
            try:
                await rest(bus)
                return
            except Unavailable:  # The storage is away.
                await asyncio.sleep(0.05)


async def first_answer(cell: RunningCell, ask: Ask) -> Answer:
    """Ask again until there is an answer: what fails while a process is away is not what is measured here."""
    async with (
        asyncio.timeout(BACK_S),
        httpx.AsyncClient(base_url=cell.base_url, timeout=60, trust_env=False) as client,
    ):
        while True:
            try:
                return await answer(client, (await served_model(client))["id"], ask)
            except (RequestError, httpx.HTTPError, KeyError, ValueError):
                await asyncio.sleep(0.05)


def killed(cell: RunningCell, name: str, known: Ask, expected: list[int], fresh: Ask) -> dict[str, Any]:
    """Kill one process. ``known`` was answered before by ``expected``; nobody has asked ``fresh``."""
    began = time.monotonic()
    old = cell.kill(name)
    cell.wait_restarted(name, old, BACK_S)
    restarted_s = time.monotonic() - began
    found = asyncio.run(first_answer(cell, known))
    answered_s = time.monotonic() - began
    if found.token_ids != expected:
        raise SystemExit(f"after {name} was killed, another answer: {found.token_ids} instead of {expected}")
    return {"restarted_s": restarted_s, "answered_s": answered_s, **asyncio.run(round_trip(cell, fresh))}


def headline(found: dict[str, Any]) -> reading.Headline:
    return [
        (f"{name} killed: answered again after", each["answered_s"],
         f"s, then {each['host_tokens']} of {each['prompt_tokens']} tokens from host memory")
        for name, each in found.items()
    ]  # fmt: skip


def main() -> None:
    run = reading.begin("restarts", __doc__)
    known, before, *fresh = questions(2 + len(PROCESSES), seed=7)
    found: dict[str, Any] = {}
    results: dict[str, Any] = {"processes": found}
    with small_cell(run.device.type, "float32") as cell:
        expected = asyncio.run(first_answer(cell, known)).token_ids
        results["before"] = asyncio.run(round_trip(cell, before))
        for name, ask in run.each(list(zip(PROCESSES, fresh, strict=True)), lambda each: each[0]):
            found[name] = killed(cell, name, known, expected, ask)
            run.keep(results)
    run.finish(results, headline(found))


if __name__ == "__main__":
    main()
