"""``thermocline trace``: send a trace's arrivals and prefix structure to a running system, or import a server's log."""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from shared.arguments import ArgumentParser, add_old_name, positive, say_renamed, whole_number
from shared.errors import InvalidRequest, ThermoclineError, TransportError
from shared.guard import guarded
from shared.progress_line import Bar, shown
from thermocline.cache import gateway_client
from thermocline.client import Answer, RequestError, stream_answer
from thermocline.client.figures import quantile
from thermocline.flags import add_json, add_url
from thermocline.load.clock import MonotonicClock
from thermocline.trace import import_command
from thermocline.trace.arrival_order import OrderedTrace
from thermocline.trace.format import Scale, TraceRequest, prompt_tokens

# Byte-level vocabularies put special tokens first; blocks use only ordinary ones.
FIRST_ORDINARY_TOKEN = 8


@dataclass
class Outcome:
    """All answers and errors of a run; ``late_s`` is the delay of each request behind its due time."""

    answers: list[Answer] = field(default_factory=list)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    late_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return totals for JSON; times are milliseconds, except ``seconds``."""
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
    concurrency: int,
    bar: Bar,
) -> Outcome:
    """Send each request at its scaled time (open loop), at most ``concurrency`` at once.

    Requests are in order of time, which counts from the first.
    """
    outcome = Outcome()
    gate = asyncio.Semaphore(concurrency)
    clock = MonotonicClock()
    origin = clock.now_s()
    first_s = scale.starts_at_s(requests[0])

    async def send(number: int, request: TraceRequest, due: float) -> None:
        async with gate:
            outcome.late_s.append(max(0.0, clock.now_s() - due))
            output = min(scale.output_tokens(request), max_context // 2)
            prompt = prompt_tokens(request, scale, vocabulary=vocabulary, number=number)
            body = {"model": model, "prompt": prompt[: max_context - output], "max_tokens": output, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            try:
                outcome.answers.append(await stream_answer(client, "/v1/completions", body))
            except RequestError as error:
                outcome.errors[error.code] += 1
        bar.advance()

    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            due = origin + scale.starts_at_s(request) - first_s
            await clock.sleep_until(due)
            group.create_task(send(number, request, due))
    outcome.seconds = clock.now_s() - origin
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


async def _run(options: argparse.Namespace, requests: list[TraceRequest]) -> Outcome:
    limits = httpx.Limits(max_connections=options.concurrency + 4)
    headers = gateway_client.bearer(options.api_key)
    async with gateway_client.client(options.url, headers, timeout_s=300, limits=limits) as client:
        vocab_size, max_context, model = await _served(client)
        with shown("requests", len(requests)) as bar:
            return await _drive(
                client,
                model,
                requests,
                Scale(options.length_scale, options.time_scale),
                vocabulary=range(FIRST_ORDINARY_TOKEN, vocab_size),
                max_context=max_context,
                concurrency=options.concurrency,
                bar=bar,
            )


async def _served(client: httpx.AsyncClient) -> tuple[int, int, str]:
    """Return (vocabulary size, longest context in tokens, name) of the served model.

    Raises TransportError, and GatewayRefused, as for a missing API key.
    """
    models = await gateway_client.get(client, "/v1/models")
    try:
        served = models["data"][0]
        return served["vocab_size"], served["max_model_len"], served["id"]
    except (KeyError, TypeError, IndexError) as error:
        raise TransportError(f"{client.base_url} is no Thermocline gateway") from error


def parser() -> ArgumentParser:
    """Return the command line: ``send`` and ``import``."""
    made = ArgumentParser(prog="thermocline trace", description="Send a trace to a running cell, or make one of a log.")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    importing = "turn a server's log into a trace that holds none of its text"
    import_command.add_arguments(verbs.add_parser("import", help=importing, description=importing))
    sending = "replay a trace's arrivals and prefix structure against a running cell"
    _add_sending(verbs.add_parser("send", help=sending, description=sending))
    return made


def _add_sending(to: argparse.ArgumentParser) -> None:
    to.add_argument("path", type=Path, metavar="FILE", help="trace in the Mooncake format (JSON lines)")
    add_url(to, "a gateway of the cell")
    gateway_client.add_key(to, "--api-key", "API_KEY", "one of the gateway's --api-keys")
    to.add_argument(
        "--requests", type=whole_number(10**9), default=500, metavar="N", help="send the first N requests of the trace"
    )
    to.add_argument("--length-scale", type=positive, default=32.0, metavar="X", help="divide lengths in tokens by X")
    to.add_argument("--time-scale", type=positive, default=4.0, metavar="X", help="divide recorded times by X")
    concurrency = to.add_argument(
        "--concurrency", type=whole_number(4096), default=64, metavar="N", help="at most N requests at once"
    )
    add_old_name(to, "--max-in-flight", concurrency)
    add_json(to)


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 all requests answered, or imported; 1 a request failed; 2 bad input."""
    options = parser().parse_args(_with_verb(sys.argv[1:] if argv is None else argv))
    try:
        if options.verb == "send":
            return _send(options)
        import_command.run_import(options)
    except ThermoclineError as error:
        print(f"thermocline trace: {error.message}", file=sys.stderr)
        return 2
    return 0


def _with_verb(argv: Sequence[str]) -> list[str]:
    """Return the command line with the verb ``send`` where it lacks one, as in release 0.2."""
    given = list(argv)
    if given and given[0] not in ("-h", "--help") and (given[0].startswith("-") or os.path.isfile(given[0])):
        say_renamed("thermocline trace", "trace FILE", "trace send FILE")
        return ["send", *given]
    return given


def _send(options: argparse.Namespace) -> int:
    """Send a trace; return 0 if every request was answered, else 1. Raises ThermoclineError."""
    trace = OrderedTrace(options.path, options.requests)
    requests = list(trace)
    if not requests:
        raise InvalidRequest(f"{options.path} holds no request")
    if trace.warning is not None:
        print(f"thermocline trace: {trace.warning}", file=sys.stderr)
    scale = Scale(options.length_scale, options.time_scale)
    for request in requests:
        scale.block_tokens(request)  # Refuses a scale that leaves nothing of a block, before anything is sent.
    outcome = asyncio.run(_run(options, requests))
    summary = outcome.summary()
    if options.json:
        print(json.dumps(summary))
    else:
        _print(Console(), summary, scale)
    return 1 if outcome.errors else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
