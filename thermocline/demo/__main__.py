"""``thermocline demo``: start everything, ask, check, report. Exit 1 if answers are wrong or nothing was reused."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.progress import Progress

from shared.broker import BrokerSettings
from shared.config import parse_bytes
from thermocline.cache.connection import cell
from thermocline.client import Answer, RequestError, served_model, stream_answer
from thermocline.demo import report
from thermocline.demo.workload import Workload, build, talk_messages
from thermocline.supervisor.api import CellNotReady, running
from thermocline.supervisor.config import SupervisorConfig, bundled_model

# The bundled model is right on at least nine of ten such questions; well below that something is broken.
MIN_ACCURACY = 0.85

CHAT = "/v1/chat/completions"
LISTED_S = 30.0


def _payload(messages: list[dict[str, Any]], *, cached: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24, "timing": True}
    body |= {"return_token_ids": True}
    return body if cached else body | {"cache": {"read": False, "write": False}}


async def _ask_all(
    client: httpx.AsyncClient, model: str, work: Workload, *, name: str, cached: bool, concurrency: int, bar: Progress
) -> report.Pass:
    """Send every question, at most ``concurrency`` at once, then the conversation turn by turn."""
    done = report.Pass(name)
    answers: list[Answer | None] = [None] * len(work.asks)
    task = bar.add_task(name, total=len(work.asks) + len(work.talk))
    gate = asyncio.Semaphore(concurrency)

    async def ask(index: int) -> None:
        async with gate:
            body = {"model": model, **_payload(work.asks[index].messages, cached=cached)}
            answers[index] = await stream_answer(client, CHAT, body)
        bar.advance(task)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(len(work.asks)):
            group.create_task(ask(index))
    for wanted, answer in zip(work.asks, answers, strict=True):
        assert answer is not None
        done.answers.append(answer)
        done.right.append(answer.text.strip() == wanted.answer)
    history: list[tuple[str, str]] = []
    for question, wanted_text in work.talk:
        body = {"model": model, **_payload(talk_messages(work.talk_document, history, question), cached=cached)}
        answer = await stream_answer(client, CHAT, body)
        history.append((question, answer.text))
        done.answers.append(answer)
        done.right.append(answer.text.strip() == wanted_text)
        bar.advance(task)
    done.seconds = time.perf_counter() - started
    return done


def _verdict(console: Console, cached: report.Pass, plain: report.Pass, again: report.Pass, firsts: list[int]) -> int:
    """Print what is wrong, if anything; returns the exit code. ``again`` answers the questions ``firsts``."""
    faults = []
    differing = sum(a.token_ids != b.token_ids for a, b in zip(cached.answers, plain.answers, strict=True))
    if differing:
        faults.append(f"{differing} answers differ between the pass with the cache and the one without")
    differing = sum(a.token_ids != plain.answers[i].token_ids for a, i in zip(again.answers, firsts, strict=True))
    if differing:
        faults.append(f"{differing} answers differ after the restart")
    if not all(a.disk_tokens for a in again.answers):
        faults.append("not every document was found on the disk after the restart")
    for one in (cached, plain):
        if one.accuracy < MIN_ACCURACY:
            faults.append(f"{one.name}: only {one.accuracy:.0%} of the answers are right, below {MIN_ACCURACY:.0%}")
    if not sum(a.device_tokens for a in cached.answers):
        faults.append("nothing was reused from device memory")
    if not sum(a.host_tokens for a in cached.answers):
        faults.append("nothing was loaded back from host memory")
    if any(a.cached_tokens for a in plain.answers):
        faults.append("the pass without caching reports cached tokens")
    for fault in faults:
        console.print(f"[red]WRONG[/red] {fault}")
    if not faults:
        text = (
            f"all {len(cached.answers)} answers are the same, token for token, with the cache, without, and from disk."
        )
        console.print(f"[green]OK[/green] {text}")
    return 1 if faults else 0


async def _with_and_without(base_url: str, work: Workload, concurrency: int, bar: Progress) -> list[report.Pass]:
    """The whole workload twice over: with the cache, and without."""
    async with _client(base_url, concurrency) as client:
        model = (await served_model(client))["id"]
        common: dict[str, Any] = {"concurrency": concurrency, "bar": bar}
        return [
            await _ask_all(client, model, work, name="cached", cached=True, **common),
            await _ask_all(client, model, work, name="uncached", cached=False, **common),
        ]


async def _disk_is_listed(nats_url: str) -> None:
    """Wait until the scheduler knows of chunks: a cell serves before its storage has looked through its disk."""
    try:
        async with cell(BrokerSettings(nats=(nats_url,))) as calls, asyncio.timeout(LISTED_S):
            while True:
                if (await calls.status()).chunks:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass  # The verdict will say what was not found.


async def _after_restart(base_url: str, nats_url: str, work: Workload, concurrency: int, bar: Progress) -> report.Pass:
    """A question about each document, of a cell that has nothing but the disk of the last one."""
    await _disk_is_listed(nats_url)
    async with _client(base_url, concurrency) as client:
        model = (await served_model(client))["id"]
        first = dataclasses.replace(work, asks=[work.asks[index] for index in _first_questions(work)], talk=[])
        return await _ask_all(client, model, first, name="restarted", cached=True, concurrency=concurrency, bar=bar)


def _client(base_url: str, concurrency: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=base_url, timeout=120, limits=httpx.Limits(max_connections=concurrency + 4))


def _first_questions(work: Workload) -> list[int]:
    """Indexes of the first question about each document."""
    first: dict[int, int] = {}
    for index, ask in enumerate(work.asks):
        first.setdefault(ask.document, index)
    return list(first.values())


def _run(config: SupervisorConfig, work: Workload, concurrency: int, console: Console) -> int:
    with Progress(console=console) as bar:
        with running(config) as first:
            cached, plain = asyncio.run(_with_and_without(first.base_url, work, concurrency, bar))
        # All processes and the broker are new; only the disk is not. A fetch is waited for, however slow.
        with running(config, environ={"THERMOCLINE_PREFETCH_WAIT": "full"}) as second:
            again = asyncio.run(_after_restart(second.base_url, second.nats_url, work, concurrency, bar))
    report.print_passes(console, [cached, plain, again])
    report.print_sources(console, [*cached.answers, *again.answers])
    report.print_broker(console, cached.answers[len(work.asks) :])
    return _verdict(console, cached, plain, again, _first_questions(work))


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``thermocline demo``."""
    parser = argparse.ArgumentParser(prog="thermocline demo", description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="Hugging Face directory (default: the bundled model)")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--questions", type=int, default=6, help="questions per document")
    parser.add_argument("--document-tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=8, help="turns of the conversation")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--device-kv-bytes", default="32MiB", help="room for about a third of the documents")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(argv)
    console = Console()
    model_dir = options.model or bundled_model()
    if model_dir is None:
        console.print("thermocline demo: no bundled model here; name one with --model DIR", style="red")
        return 2
    work = build(
        model_dir,
        documents=options.documents,
        questions=options.questions,
        tokens=options.document_tokens,
        turns=options.turns,
        seed=options.seed,
    )
    console.print(
        f"{len(work.asks)} questions over {options.documents} shared documents ({work.document_tokens:,} tokens), "
        f"and a conversation of {len(work.talk)} turns. Device KV: {options.device_kv_bytes}. Starting the cell ..."
    )
    # float32, so that the two passes can be compared token for token: batches differ in shape between them,
    # and in bfloat16 a sum in another order may round to another token.
    config = SupervisorConfig(
        model=str(model_dir),
        port=0,
        dtype="float32",
        device_kv_bytes=parse_bytes(options.device_kv_bytes),
        host_kv_bytes=parse_bytes("512MiB"),
    )
    try:
        with tempfile.TemporaryDirectory(prefix="thermocline-disk-") as disk:
            config = msgspec.structs.replace(config, disk_dir=(disk,), disk_kv_bytes=parse_bytes("1GiB"))
            return _run(config, work, options.concurrency, console)
    except* RequestError as group:
        console.print(f"[red]WRONG[/red] a request failed: {group.exceptions[0]}")
    except* CellNotReady as group:
        console.print(f"[red]WRONG[/red] {group.exceptions[0]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
