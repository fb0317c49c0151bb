"""``thermocline demo``: start a cell, ask, check, report. Exit 1 if answers are wrong or nothing was reused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from shared.arguments import ArgumentParser, whole_number
from shared.broker import BrokerSettings
from shared.config import parse_bytes
from shared.errors import ContextTooLong, OperatorError
from shared.guard import guarded
from shared.messages.status import CellStatus
from shared.model_folder import check_model, find_model
from shared.progress_line import shown
from thermocline.cache.argument_types import size
from thermocline.cache.connection import calls_of
from thermocline.client import Answer, RequestError, connect, served_model, stream_answer
from thermocline.demo import report
from thermocline.demo.verdict import Seen, faults, notes
from thermocline.demo.workload import Workload, build, talk_messages
from thermocline.supervisor.api import CellNotReady, running
from thermocline.supervisor.config import SupervisorConfig, bundled_model

CHAT = "/v1/chat/completions"
LOOK_S = 0.05
MOST_WAIT_S = 30.0
AS_KV = {"THERMOCLINE_RESTORING": "kv"}
"""Settings of both cells: a planner might keep hidden states or recompute, and the demo shows KV in every tier."""

FROM_DISK = AS_KV | {"THERMOCLINE_PREFETCH_WAIT": "full"}
"""Settings of the cell after the restart: requests wait for a fetch, however slow, and do not recompute."""


def _payload(messages: list[dict[str, Any]], *, cached: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24, "timing": True}
    body |= {"return_token_ids": True}
    # Logprobs show whether an answer that differs does so by rounding.
    return body if cached else body | {"cache": {"read": False, "write": False}, "logprobs": True, "top_logprobs": 2}


async def _ask_all(
    client: httpx.AsyncClient, model: str, work: Workload, *, name: str, cached: bool, concurrency: int
) -> report.Pass:
    """Send every question, at most ``concurrency`` at once, then the conversation turn by turn."""
    done = report.Pass(name)
    gate = asyncio.Semaphore(concurrency)
    with shown(name, len(work.asks) + len(work.talk)) as bar:

        async def ask(messages: list[dict[str, Any]]) -> Answer:
            async with gate:
                answer = await stream_answer(client, CHAT, {"model": model, **_payload(messages, cached=cached)})
            bar.advance()
            return answer

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(each.messages)) for each in work.asks]
        done.answers = [task.result() for task in asking]
        done.right = [task.result().text.strip() == each.answer for task, each in zip(asking, work.asks, strict=True)]
        history: list[tuple[str, str]] = []
        for question, wanted in work.talk:
            answer = await ask(talk_messages(work.talk_document, history, question))
            history.append((question, answer.text))
            done.answers.append(answer)
            done.right.append(answer.text.strip() == wanted)
        done.seconds = time.perf_counter() - started
    return done


def _tell(console: Console, found: list[str], answers: int) -> int:
    """Print the faults, or that there are none; return the exit code."""
    for fault in found:
        console.print(f"[red]WRONG[/red] {fault}")
    if not found:
        text = f"all {answers} answers are the same, token for token, with the cache, without, and from disk."
        console.print(f"[green]OK[/green] {text}")
    return 1 if found else 0


@dataclasses.dataclass(frozen=True)
class _First:
    """Results of the first cell, whose device pool holds ``device_tokens`` and whose disk had ``chunks`` at the end."""

    cached: report.Pass
    plain: report.Pass
    device_tokens: int
    chunks: int


async def _with_and_without(base_url: str, nats_url: str, work: Workload, concurrency: int) -> _First:
    """Run the whole workload with the cache, then without."""
    # A cell can serve before its storage joins, but copies nothing to host memory until then.
    status = await _when(nats_url, lambda status: any(pool.tier == "host" for pool in status.pools))
    pages = sum(pool.total for pool in status.pools if pool.tier == "device")
    async with _client(base_url, concurrency) as client:
        model = (await served_model(client))["id"]
        cached = await _ask_all(client, model, work, name="cached", cached=True, concurrency=concurrency)
        plain = await _ask_all(client, model, work, name="uncached", cached=False, concurrency=concurrency)
    # Saves give way to requests. The cell is about to end, and what it has not saved will be lost.
    last = await _when(nats_url, lambda status: not status.saves)
    return _First(cached, plain, pages * status.page_size, last.chunks)


async def _when(nats_url: str, is_so: Callable[[CellStatus], bool]) -> CellStatus:
    """Wait until the status satisfies ``is_so``, MOST_WAIT_S at most; return the latest status."""
    async with calls_of(BrokerSettings(nats=(nats_url,))) as calls:
        ends_s = time.monotonic() + MOST_WAIT_S
        while True:
            status = await calls.status()
            if is_so(status) or time.monotonic() >= ends_s:
                return status
            await asyncio.sleep(LOOK_S)


async def _after_restart(base_url: str, nats_url: str, work: Workload, chunks: int) -> report.Pass:
    """Ask one question about each document, one at a time, of a cell that has only the ``chunks`` of the first one."""
    # A cell can serve before its storage has scanned its disk.
    await _when(nats_url, lambda status: status.chunks >= chunks)
    async with _client(base_url, 1) as client:
        model = (await served_model(client))["id"]
        first = dataclasses.replace(work, asks=[work.asks[index] for index in _first_questions(work)], talk=[])
        return await _ask_all(client, model, first, name="restarted", cached=True, concurrency=1)


def _client(base_url: str, concurrency: int) -> httpx.AsyncClient:
    return connect(base_url, timeout=120, limits=httpx.Limits(max_connections=concurrency + 4))


def _first_questions(work: Workload) -> list[int]:
    """Return the indexes of the first question about each document."""
    first: dict[int, int] = {}
    for index, ask in enumerate(work.asks):
        first.setdefault(ask.document, index)
    return list(first.values())


def _run(config: SupervisorConfig, work: Workload, concurrency: int, console: Console) -> int:
    with running(config, environ=AS_KV) as first:
        first_seen = asyncio.run(_with_and_without(first.base_url, first.nats_url, work, concurrency))
    # All processes and the broker are new; only the disk stays.
    with running(config, environ=FROM_DISK) as second:
        again = asyncio.run(_after_restart(second.base_url, second.nats_url, work, first_seen.chunks))
    cached, plain = first_seen.cached, first_seen.plain
    report.print_passes(console, [cached, plain, again])
    report.print_sources(console, [*cached.answers, *again.answers])
    report.print_broker(console, cached.answers[len(work.asks) :])
    seen = Seen(
        cached=cached,
        plain=plain,
        again=again,
        firsts=_first_questions(work),
        device_tokens=first_seen.device_tokens,
        saved_chunks=first_seen.chunks,
        concurrency=concurrency,
        is_bundled=Path(config.model) == bundled_model(),
    )
    for note in notes(seen):
        console.print(f"Note: {note}.")
    return _tell(console, faults(work, seen), len(cached.answers))


_DESCRIPTION = """Start a cell, ask it about shared documents with the cache, without it and after a restart, and
compare every token. Exit code 1: an answer is wrong, or nothing was reused."""


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(prog="thermocline demo", description=_DESCRIPTION)
    made.add_argument(
        "--model", type=Path, metavar="DIR", help="Hugging Face model folder (default: the bundled model)"
    )
    made.add_argument("--documents", type=whole_number(10_000), default=16, metavar="N", help="documents")
    made.add_argument("--questions", type=whole_number(1000), default=6, metavar="N", help="questions per document")
    made.add_argument(
        "--document-tokens", type=whole_number(1_000_000), default=1024, metavar="N", help="tokens per document"
    )
    made.add_argument("--turns", type=whole_number(1000), default=8, metavar="N", help="turns of the conversation")
    made.add_argument(
        "--concurrency", type=whole_number(1000), default=2, metavar="N", help="at most N requests at once"
    )
    made.add_argument(
        "--device-kv-bytes",
        type=size,
        default="32MiB",
        metavar="SIZE",
        help="device pool; by default a third of the documents fits",
    )
    made.add_argument("--seed", type=int, default=7, metavar="N", help="seed of documents and questions")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the demo. Exit codes: 0 all answers agree, 1 a fault or failed request, 2 bad flags or model."""
    options = parser().parse_args(argv)
    console = Console()
    model_dir = options.model or bundled_model()
    if model_dir is None:
        print("thermocline demo: there is no bundled model here; name one with --model DIR", file=sys.stderr)
        return 2
    try:
        model_dir = find_model(str(model_dir))
        check_model(model_dir)
    except OperatorError as error:
        print(f"thermocline demo: {error.message}", file=sys.stderr)
        return 2
    model = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    context = float(model.get("max_position_embeddings") or math.inf)
    if options.document_tokens >= context:
        told = f"--document-tokens {options.document_tokens} is too long: the model's context has {context:,.0f} tokens"
        console.print(f"thermocline demo: {told}, and questions take some of them", style="red")
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
    # float32 on a CPU, so that the two passes can be compared token for token: batches differ in shape between them,
    # and in bfloat16, or on a GPU, a sum in another order may round to another token.
    config = SupervisorConfig(
        model=str(model_dir),
        port=0,
        dtype="float32",
        device="cpu",
        device_kv_bytes=parse_bytes(options.device_kv_bytes),
        host_kv_bytes=parse_bytes("512MiB"),
    )
    code = 1
    try:
        with tempfile.TemporaryDirectory(prefix="thermocline-disk-") as disk:
            config = msgspec.structs.replace(config, disk_dir=(disk,), disk_kv_bytes=parse_bytes("1GiB"))
            return _run(config, work, options.concurrency, console)
    except* RequestError as group:
        refused = _first_of(group)
        if isinstance(refused, RequestError) and refused.code == ContextTooLong.code:
            console.print(f"thermocline demo: a document or the conversation is too long: {refused}", style="red")
            code = 2
        else:
            console.print(f"[red]WRONG[/red] a request failed: {refused}")
    except* CellNotReady as group:
        console.print(f"[red]WRONG[/red] {_first_of(group)}")
    return code


def _first_of(group: BaseExceptionGroup[Exception]) -> BaseException:
    """Return the first exception of a group, however deep."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


if __name__ == "__main__":
    sys.exit(guarded(main))
