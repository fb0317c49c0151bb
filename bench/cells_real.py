"""Three real cells behind a router: how much of the prompts is found, beside asking the gateways in turn.

Conversations about shared documents, several at once, of the bundled model; each way has documents of its own. The
router hears
nothing over a broker: each cell has the broker that it starts itself, on loopback.

``python -m bench.cells_real [--cells 3] [--conversations N] [--out FILE]``
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from shared.arguments import whole_number
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import BUNDLED_MODEL, SupervisorConfig
from thermocline.supervisor.ports import free_port

TURNS = 4
DOCUMENTS = 6
DOCUMENT_WORDS = 300
QUESTION_WORDS = 12
ANSWER_TOKENS = 8
AT_ONCE = 4
READY_S = 120.0

WORDS = ("harbour", "lantern", "copper", "meadow", "violet", "granite", "ledger", "orchard", "signal", "winter")


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


@contextmanager
def cells(count: int) -> Iterator[list[RunningCell]]:
    """Fresh cells of one worker each, ready."""
    settings = SupervisorConfig(port=0, threads=1, device_kv_bytes=2**25, host_kv_bytes=2**25)
    with ExitStack() as stack:
        found = [stack.enter_context(running(settings, ready=False)) for _ in range(count)]
        for cell in found:
            cell.wait_ready()
        yield found


@contextmanager
def router(urls: list[str]) -> Iterator[tuple[str, Callable[[], float]]]:
    """A router in front of them: its URL, and what tells the processor time that it took."""
    port = free_port()
    named = ",".join(f"cell-{place}={url}" for place, url in enumerate(urls))
    command = [sys.executable, "-m", "thermocline", "router", "--cells", named, "--port", str(port)]
    process = subprocess.Popen([*command, "--summaries", "false", "--log-level", "warning"])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/health/ready", trust_env=False).json()["cells_open"] == len(urls):
                    break
            except httpx.HTTPError:
                pass  # It does not listen yet.
            time.sleep(0.1)
        yield url, lambda: _processor_s(process.pid)
    finally:
        process.terminate()
        process.wait()


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def converse(pick: Callable[[], tuple[str, str]], conversations: int, seed: int) -> dict[str, Any]:
    """Have the conversations. ``pick`` says where the next request goes: the URL, and the cell where it is known."""
    rng = random.Random(seed)
    documents = [words(rng, DOCUMENT_WORDS) for _ in range(DOCUMENTS)]
    gate = asyncio.Semaphore(AT_ONCE)
    found: dict[str, Any] = {"prompt_tokens": 0, "cached_tokens": 0, "stayed": 0, "requests": 0}
    by_cell: dict[str, int] = {}

    async def one(client: httpx.AsyncClient, number: int) -> None:
        own = random.Random(seed * 1000 + number)
        messages = [{"role": "system", "content": documents[number % DOCUMENTS]}]
        homes = set()
        for _ in range(TURNS):
            messages.append({"role": "user", "content": words(own, QUESTION_WORDS)})
            async with gate:
                url, name = pick()
                response = await client.post(
                    f"{url}/v1/chat/completions",
                    json={"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0},
                )
            answer = response.raise_for_status().json()
            cell = response.headers.get("x-thermocline-cell", name)
            homes.add(cell)
            by_cell[cell] = by_cell.get(cell, 0) + 1
            usage = answer["usage"]
            found["requests"] += 1
            found["prompt_tokens"] += usage["prompt_tokens"]
            found["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        found["stayed"] += len(homes) == 1

    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        await asyncio.gather(*(one(client, number) for number in range(conversations)))
    return found | {"by_cell": [by_cell[name] for name in sorted(by_cell)]}


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--out")
    parser.add_argument("--cells", type=whole_number(64), default=3)
    parser.add_argument("--conversations", type=whole_number(100_000), default=24)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with cells(options.cells) as made:
        urls = [cell.base_url for cell in made]
        with router(urls) as (url, processor_s):
            before_s = processor_s()
            rows.append(
                {"way": "router", **asyncio.run(converse(lambda: (url, ""), options.conversations, options.seed))}
            )
            router_cpu_s = processor_s() - before_s
        print(rows[-1], flush=True)
        # The same cells: other documents, so that nothing of before is found again.
        turn = cycle((url, f"cell-{place}") for place, url in enumerate(urls))
        rows.append(
            {"way": "round robin", **asyncio.run(converse(lambda: next(turn), options.conversations, options.seed + 1))}
        )
        print(rows[-1], flush=True)
    results = {
        "cells": options.cells,
        "model": BUNDLED_MODEL,
        "conversations": options.conversations,
        "turns": TURNS,
        "documents": DOCUMENTS,
        "at_once": AT_ONCE,
        "answer_tokens": ANSWER_TOKENS,
        "rows": rows,
        "router_cpu_s": router_cpu_s,
        "router_requests": rows[0]["requests"],
    }
    print(results_file.write("cells_real", results, seed=options.seed, out=options.out))


if __name__ == "__main__":
    main()
