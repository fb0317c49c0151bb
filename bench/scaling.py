"""What a third worker brings under load, and what taking one away costs: throughput and hit ratio before and after.

A whole cell of real processes on this machine. Its workers compute what they answer, but each step is stretched to a
set time (``bench.paced_worker``), because a few cores cannot show what three devices would do. Clients ask over shared
documents in a closed loop, some documents far more often than others. Four stretches are measured one after another:
two workers; three, once the third has joined; two, after the first was told to end and has drained; and one, after
another was killed, for comparison. Nothing is short of room on the devices: host memory has only what it was handed.

``python -m bench.scaling [--seconds 20] [--clients 24] [--step-ms 40] [--token-us 250] [--save]``
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from shared.broker import BrokerSettings
from shared.errors import Unavailable
from shared.memory import unlink_all
from shared.messages.status import CellStatus
from thermocline.cache.connection import calls_of as connected
from thermocline.client import served_model, stream_answer
from thermocline.supervisor import nats_server, readiness
from thermocline.supervisor.cell import Cell, resolve
from thermocline.supervisor.child import Child, ChildSpec
from thermocline.supervisor.commands import nats_child, service_children
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.embedded_broker import write_broker_files
from thermocline.supervisor.nats_program import find_nats_program

WORKERS = 3
DOCUMENTS = 24
DOCUMENT_TOKENS = 512
QUESTION_TOKENS = 32
ANSWER_TOKENS = 16
MAX_RUNNING = 4  # Requests of a worker at once: with more, one worker would serve everybody in one batch.
VOCABULARY = 2000
START_S = 300.0
DRAIN_S = 60.0


@dataclass(slots=True)
class Stretch:
    """Answers that ended while one set of workers served, and what those found that were asked for then as well."""

    name: str
    workers: int
    seconds: float = 0.0
    answers: int = 0
    document_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    first_hits: dict[int, float] = field(default_factory=dict)  # Of the first answer over each document.

    def figures(self) -> dict[str, Any]:
        """For the results."""
        total = max(1, self.document_tokens)
        return {
            "workers": self.workers,
            "answers": self.answers,
            "answers_per_s": self.answers / self.seconds,
            "hit_ratio": sum(self.cached_tokens.values()) / total,
            "hit_ratio_by_tier": {tier: tokens / total for tier, tokens in self.cached_tokens.items()},
            "hit_ratio_of_first_questions": statistics.fmean(self.first_hits.values()) if self.first_hits else 0.0,
            "documents_asked": len(self.first_hits),
            "ttft_median_ms": statistics.median(self.ttft_s) * 1e3 if self.ttft_s else 0.0,
        }


class Clients:
    """Asks in a closed loop. ``stretch`` is where answers are counted, None while nothing is measured."""

    def __init__(self, client: httpx.AsyncClient, model: str, seed: int) -> None:
        self.stretch: Stretch | None = None
        self.wrong: list[str] = []
        self._client, self._model = client, model
        rng = random.Random(seed)
        self._documents = [[rng.randrange(8, VOCABULARY) for _ in range(DOCUMENT_TOKENS)] for _ in range(DOCUMENTS)]
        self._weights = [1.0 / rank for rank in range(1, DOCUMENTS + 1)]

    async def ask_for_ever(self, seed: int) -> None:
        """One client."""
        rng = random.Random(seed)
        while True:
            (number,) = rng.choices(range(DOCUMENTS), self._weights)
            question = [rng.randrange(8, VOCABULARY) for _ in range(QUESTION_TOKENS)]
            await self.ask(number, question)

    async def ask(self, number: int, question: list[int]) -> None:
        """One question over a document, counted where it ends."""
        body = {"model": self._model, "prompt": self._documents[number] + question, "max_tokens": ANSWER_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        began_in = self.stretch
        answer = await stream_answer(self._client, "/v1/completions", body)
        if len(answer.token_ids) != ANSWER_TOKENS:
            self.wrong.append(f"an answer of {len(answer.token_ids)} tokens")
        stretch = self.stretch
        if stretch is None:
            return
        stretch.answers += 1
        if stretch is not began_in:
            return  # What it found was found among other workers.
        stretch.document_tokens += DOCUMENT_TOKENS
        stretch.ttft_s.append(answer.ttft_s)
        tiers = {
            "device": answer.device_tokens,
            "host": answer.host_tokens,
            "neighbour": answer.cached_tokens - answer.device_tokens - answer.host_tokens,
        }
        for tier, tokens in tiers.items():
            stretch.cached_tokens[tier] = stretch.cached_tokens.get(tier, 0) + tokens
        stretch.first_hits.setdefault(number, min(1.0, answer.cached_tokens / DOCUMENT_TOKENS))

    async def measure(self, name: str, workers: int, seconds: float) -> Stretch:
        """Count for so long."""
        stretch = self.stretch = Stretch(name, workers)
        began_s = time.perf_counter()
        await asyncio.sleep(seconds)
        self.stretch, stretch.seconds = None, time.perf_counter() - began_s
        return stretch


def paced_specs(cell: Cell, step_ms: float, token_us: float) -> dict[str, ChildSpec]:
    """All processes by name, with paced workers in the place of workers."""
    specs = {}
    for spec in service_children(cell):
        if spec.name.startswith("worker-"):
            argv = tuple("bench.paced_worker" if part == "services.worker" else part for part in spec.argv)
            pace = {"PACED_STEP_MS": str(step_ms), "PACED_TOKEN_US": str(token_us)}
            spec = dataclasses.replace(spec, argv=argv, env={**spec.env, **pace})
        specs[spec.name] = spec
    return specs


@asynccontextmanager
async def processes(cell: Cell, specs: dict[str, ChildSpec], names: list[str]) -> AsyncIterator[dict[str, Child]]:
    """The broker and these processes; all that run are stopped at the end, in the order of their stages."""
    children: dict[str, Child] = {}
    config = write_broker_files(cell)
    try:
        children["nats"] = await Child.spawn(nats_child(cell, find_nats_program().path, config))
        await nats_server.wait_until_up(cell.shm_prefix, "127.0.0.1", cell.nats_port, timeout_s=30.0)
        for name in names:
            children[name] = await Child.spawn(specs[name])
        yield children
    finally:
        for child in sorted(children.values(), key=lambda each: each.spec.stage):
            await child.stop(30.0)
        unlink_all(cell.shm_prefix)


async def wait_for(nats: str, holds: Any, what: str) -> CellStatus:
    """Look at the cell's status until something holds. Raises SystemExit when it does not in time."""
    async with connected(BrokerSettings(nats=(nats,))) as calls:
        for _ in range(int(START_S / 0.1)):
            try:
                status = await calls.status()
                if holds(status):
                    return status
            except Unavailable:
                pass  # A machine as busy as this one is meant to be may keep the scheduler from answering in time.
            await asyncio.sleep(0.1)
    raise SystemExit(f"not within {START_S:.0f} s: {what}")


async def run(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the four stretches."""
    specs = paced_specs(cell, options.step_ms, options.token_us)
    nats = cell.operator_urls[0]
    names = ["scheduler", "storage", "worker-0", "worker-1", "gateway"]
    async with processes(cell, specs, names) as children:
        async with asyncio.timeout(START_S):
            await readiness.wait_until_ready(cell.base_url)
        await wait_for(nats, lambda status: len(status.workers) == 2 and len(status.pools) == 3, "two workers, pools")
        limits = httpx.Limits(max_connections=options.clients + 4)
        async with httpx.AsyncClient(base_url=cell.base_url, timeout=120, limits=limits, trust_env=False) as client:
            clients = Clients(client, (await served_model(client))["id"], options.seed)
            async with asyncio.TaskGroup() as group:
                asking = [
                    group.create_task(clients.ask_for_ever(options.seed + number)) for number in range(options.clients)
                ]
                try:
                    stretches, leaving = await _change_workers(clients, specs, children, nats, options.seconds)
                finally:
                    for task in asking:
                        task.cancel()
        if clients.wrong:
            raise SystemExit("; ".join(clients.wrong[:5]))
    return {
        "step_ms": options.step_ms,
        "token_us": options.token_us,
        "clients": options.clients,
        "documents": DOCUMENTS,
        "document_tokens": DOCUMENT_TOKENS,
        "requests_at_once_per_worker": MAX_RUNNING,
        "stretches": {stretch.name: stretch.figures() for stretch in stretches},
        "leaving": leaving,
    }


async def _change_workers(
    clients: Clients, specs: dict[str, ChildSpec], children: dict[str, Child], nats: str, seconds: float
) -> tuple[list[Stretch], dict[str, Any]]:
    await asyncio.sleep(seconds)  # Every document has been asked about by then.
    stretches = [await clients.measure("two workers", 2, seconds)]
    children["worker-2"] = await Child.spawn(specs["worker-2"])
    await wait_for(nats, lambda status: len(status.workers) == 3, "the third worker")
    stretches.append(await clients.measure("a third joined", 3, seconds))
    before = (await wait_for(nats, lambda _: True, "a status")).counters
    began_s = time.perf_counter()
    is_done = await children["worker-0"].stop(DRAIN_S)
    took_s = time.perf_counter() - began_s
    after = (await wait_for(nats, lambda status: len(status.workers) == 2, "one has left")).counters
    stretches.append(await clients.measure("one drained", 2, seconds))
    children["worker-1"].send(signal.SIGKILL)
    await wait_for(nats, lambda status: len(status.workers) == 1, "one was lost")
    stretches.append(await clients.measure("one was killed", 1, seconds))
    counted = ("drains_done", "drains_cut_short", "handed_over_pages", "requests_moved_by_drains", "resumes_needed")
    leaving = {name: after.get(name, 0) - before.get(name, 0) for name in counted}
    return stretches, leaving | {"seconds": took_s, "left_by_itself": is_done}


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--save")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each stretch")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--step-ms", type=float, default=40.0, help="time of a forward pass")
    parser.add_argument("--token-us", type=float, default=250.0, help="and of each of its tokens besides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = SupervisorConfig(
            port=0,
            workers=WORKERS,
            data_dir=folder,
            device_kv_bytes=256 * 2**20,
            host_kv_bytes=512 * 2**20,
            max_running=MAX_RUNNING,
            threads=1,
            grace_s=DRAIN_S,
            log_level="warning",
        )
        cell = resolve(config, Path(folder))
        cell.logs.mkdir(parents=True, exist_ok=True)
        results = asyncio.run(run(cell, options))
    print(json.dumps(results, indent=2))
    if options.save:
        print(results_file.write("scaling", results, seed=options.seed))


if __name__ == "__main__":
    main()
