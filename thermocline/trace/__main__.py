"""``thermocline trace``: send a trace's arrivals and prefix structure to a running system, or import a server's log."""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shared.errors import InvalidRequest, OperatorError
from shared.guard import guarded
from thermocline.client import Answer, RequestError, connect, served_model, stream_answer
from thermocline.client.figures import quantile
from thermocline.trace import import_command
from thermocline.trace.format import Scale, TraceRequest, prompt_tokens, read_trace

# Byte-level vocabularies put special tokens first; blocks are made of ordinary ones.
FIRST_ORDINARY_TOKEN = 8


@dataclass
class Outcome:
    """Everything that came back."""

    answers: list[Answer] = field(default_factory=list)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    late_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Totals as plain numbers; times in milliseconds."""
        ttft = [a.ttft_s * 1e3 for a in self.answers]
        prompt = sum(a.prompt_tokens for a in self.answers)
        hits = {
            "device": sum(a.device_tokens for a in self.answers),
            "host": sum(a.host_tokens + a.lent_tokens for a in self.answers),
        }
        return {
            "requests": len(self.answers) + sum(self.errors.values()),
            "answered": len(self.answers),
            "errors": dict(sorted(self.errors.items())),
            "prompt_tokens": prompt,
            "output_tokens": sum(a.completion_tokens for a in self.answers),
            "hit_tokens": hits,
            "hit_ratio": sum(hits.values()) / max(1, prompt),
            "ttft_ms": {
                "mean": statistics.fmean(ttft) if ttft else 0.0,
                "p50": quantile(ttft, 0.5),
                "p99": quantile(ttft, 0.99),
            },
            "sent_late_ms_p99": quantile(self.late_s, 0.99) * 1e3,
            "seconds": self.seconds,
        }


async def _drive(
    client: httpx.AsyncClient,
    model: str,
    requests: list[TraceRequest],
    scale: Scale,
    *,
    vocabulary: range,
    max_context: int,
    max_in_flight: int,
    bar: Progress,
) -> Outcome:
    """Send each request at its scaled time (open loop), at most ``max_in_flight`` at once."""
    outcome = Outcome()
    task = bar.add_task("trace", total=len(requests))
    gate = asyncio.Semaphore(max_in_flight)
    origin = time.perf_counter()
    first_s = scale.starts_at_s(requests[0])

    async def send(request: TraceRequest, due: float) -> None:
        async with gate:
            outcome.late_s.append(max(0.0, time.perf_counter() - due))
            output = min(scale.output_tokens(request), max_context // 2)
            prompt = prompt_tokens(request, scale, vocabulary=vocabulary)[: max_context - output]
            body = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            try:
                outcome.answers.append(await stream_answer(client, "/v1/completions", body))
            except RequestError as error:
                outcome.errors[error.code] += 1
        bar.advance(task)

    async with asyncio.TaskGroup() as group:
        for request in requests:
            due = origin + scale.starts_at_s(request) - first_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(send(request, due))
    outcome.seconds = time.perf_counter() - origin
    return outcome


def _print(console: Console, summary: dict[str, Any], scale: Scale) -> None:
    table = Table(title=f"Trace with lengths / {scale.length:g} and times / {scale.time:g}", show_header=False)
    hits, ttft, prompt = summary["hit_tokens"], summary["ttft_ms"], max(1, summary["prompt_tokens"])
    table.add_row("requests", f"{summary['requests']:,} in {summary['seconds']:.1f} s")
    table.add_row("prompt tokens", f"{summary['prompt_tokens']:,}")
    for tier, tokens in hits.items():
        table.add_row(f"hit tokens, {tier}", f"{tokens:,} ({tokens / prompt:.1%})")
    table.add_row("TTFT mean / p50 / p99", f"{ttft['mean']:.1f} / {ttft['p50']:.1f} / {ttft['p99']:.1f} ms")
    table.add_row("sent late, p99", f"{summary['sent_late_ms_p99']:.1f} ms")
    errors = ", ".join(f"{count} {code}" for code, count in summary["errors"].items()) or "none"
    table.add_row("errors", errors)
    console.print(table)


async def _run(options: argparse.Namespace, requests: list[TraceRequest], console: Console) -> Outcome:
    limits = httpx.Limits(max_connections=options.max_in_flight + 4)
    async with connect(options.base_url, timeout=300, limits=limits) as client:
        served = await served_model(client)
        with Progress(console=console) as bar:
            return await _drive(
                client,
                served["id"],
                requests,
                Scale(options.length_scale, options.time_scale),
                vocabulary=range(FIRST_ORDINARY_TOKEN, served["vocab_size"]),
                max_context=served["max_model_len"],
                max_in_flight=options.max_in_flight,
                bar=bar,
            )


def parser_of_verbs() -> argparse.ArgumentParser:
    """Return the command line: ``send`` and ``import``."""
    known = argparse.ArgumentParser(prog="thermocline trace", description=__doc__, allow_abbrev=False)
    verbs = known.add_subparsers(dest="verb", required=True, metavar="VERB")
    importing = "turn a server's log into a trace that holds none of its text"
    import_command.add_arguments(verbs.add_parser("import", help=importing, description=importing, allow_abbrev=False))
    sending = "drive a running system with a trace"
    parser = verbs.add_parser("send", help=sending, description=sending)
    parser.add_argument("path", type=Path, help="trace in the Mooncake format (JSON lines)")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=500, help="how many of its first requests to send")
    parser.add_argument("--length-scale", type=float, default=32.0, help="divide token lengths by this")
    parser.add_argument("--time-scale", type=float, default=4.0, help="divide times by this")
    parser.add_argument("--max-in-flight", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return known


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 if all was sent and answered, or imported; 1 if a request was not answered; 2 for bad input."""
    options = parser_of_verbs().parse_args(_with_verb(sys.argv[1:] if argv is None else argv))
    if options.verb == "send":
        return send(options)
    try:
        import_command.run_import(options)
    except (OperatorError, InvalidRequest) as error:
        print(f"thermocline trace: {error.message}", file=sys.stderr)
        return 2
    return 0


def _with_verb(argv: Sequence[str]) -> list[str]:
    """A line of release 0.2, which had one verb and did not name it, with that verb."""
    given = list(argv)
    if given and given[0] not in ("-h", "--help") and (given[0].startswith("-") or Path(given[0]).is_file()):
        print("thermocline trace FILE is thermocline trace send FILE now", file=sys.stderr)
        return ["send", *given]
    return given


def send(options: argparse.Namespace) -> int:
    """Send a trace. Exit code 0 if every request was answered, 1 if not, 2 for bad input."""
    console = Console(stderr=options.json)
    try:
        if min(options.length_scale, options.time_scale) <= 0 or min(options.requests, options.max_in_flight) < 1:
            raise InvalidRequest("scales must be above 0, and --requests and --max-in-flight at least 1")
        requests = list(read_trace(options.path, options.requests))
        if not requests:
            raise InvalidRequest(f"{options.path} holds no request")
        outcome = asyncio.run(_run(options, requests, console))
    except InvalidRequest as error:
        console.print(f"thermocline trace: {error.message}", style="red")
        return 2
    except httpx.HTTPError as error:
        console.print(f"thermocline trace: {options.base_url} does not answer ({error}); start it with ./task up")
        return 2
    summary = outcome.summary()
    if options.json:
        print(json.dumps(summary))
    else:
        _print(console, summary, Scale(options.length_scale, options.time_scale))
    return 1 if outcome.errors else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
