"""``thermocline demo``: start everything, ask, check, report. Exit 1 if answers are wrong or nothing was reused."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from shared.config import parse_bytes
from thermocline.client import Answer, RequestError, served_model, stream_answer
from thermocline.demo import report
from thermocline.demo.workload import Workload, build, talk_messages
from thermocline.supervisor.api import CellNotReady, running
from thermocline.supervisor.config import SupervisorConfig, bundled_model

# The bundled model is right on at least nine of ten such questions; well below that something is broken.
MIN_ACCURACY = 0.85

CHAT = "/v1/chat/completions"


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


def _verdict(console: Console, cached: report.Pass, plain: report.Pass) -> int:
    """Print what is wrong, if anything; returns the exit code."""
    faults = []
    differing = sum(a.token_ids != b.token_ids for a, b in zip(cached.answers, plain.answers, strict=True))
    if differing:
        faults.append(f"{differing} answers differ between the pass with the cache and the one without")
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
        console.print(f"[green]OK[/green] all {len(cached.answers)} answers are the same, token for token, both ways.")
    return 1 if faults else 0


async def _run(base_url: str, work: Workload, concurrency: int, console: Console) -> int:
    limits = httpx.Limits(max_connections=concurrency + 4)
    async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits) as client:
        model = (await served_model(client))["id"]
        with Progress(console=console) as bar:
            common: dict[str, Any] = {"concurrency": concurrency, "bar": bar}
            cached = await _ask_all(client, model, work, name="cached", cached=True, **common)
            plain = await _ask_all(client, model, work, name="uncached", cached=False, **common)
    report.print_passes(console, [cached, plain])
    report.print_sources(console, cached)
    report.print_broker(console, cached.answers[len(work.asks) :])
    return _verdict(console, cached, plain)


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
        with running(config) as cell:
            return asyncio.run(_run(cell.base_url, work, options.concurrency, console))
    except* RequestError as group:
        console.print(f"[red]WRONG[/red] a request failed: {group.exceptions[0]}")
    except* CellNotReady as group:
        console.print(f"[red]WRONG[/red] {group.exceptions[0]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
