"""``thermocline load``: one run of load, or a comparison of earlier ones."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from rich.console import Console

from shared.arguments import with_new_json
from shared.errors import ConfigError, InvalidRequest, OperatorError, ThermoclineError, Unavailable
from shared.guard import guarded
from shared.progress_line import shown
from shared.result_file import check_writable
from thermocline.flags import DEFAULT_URL
from thermocline.load.arrivals import arrival_times
from thermocline.load.clock import MonotonicClock
from thermocline.load.command_line import DEFAULT_CLOSED_PLACES, MAX_PLACES, check, parser
from thermocline.load.comparison import compare, differences
from thermocline.load.dialect import Dialect, find_dialect
from thermocline.load.driver import Driver, Outcome, Pace
from thermocline.load.figures import Slo, figures, rows
from thermocline.load.http_client import HttpClient
from thermocline.load.machine import hardware, versions
from thermocline.load.null_server import null_server
from thermocline.load.prompts import PromptMaker
from thermocline.load.report import Client, Report, as_json, load, save
from thermocline.load.table import show, show_comparison
from thermocline.load.talker import Talker
from thermocline.load.workloads import UnsharedOptions, UnsharedWorkload, make_workload
from thermocline.simulate.workloads import TraceWorkload, Workload
from thermocline.trace.format import read_trace

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
CONNECT_S = 10.0
_WARMUP_TOKENS = 64

LONGEST_PROMPT_TOKENS = 2**24
"""More tokens than any model's context; a prompt of more would only fill this process's memory."""


def main(argv: list[str] | None = None) -> int:
    """Run. Exit codes: 0 all requests answered, 1 some not, 2 bad flags, file or server, 130 interrupted."""
    arguments = with_new_json(sys.argv[1:] if argv is None else argv, "thermocline load")
    options = parser().parse_args(arguments)
    try:
        if options.compare is not None:
            return _compare(options.compare)
        check(options)
        if options.out is not None:
            check_writable(options.out)
        report = _measured(options, arguments)
        if options.json:
            print(as_json(report))
        else:
            show(Console(), report)
        if options.out is not None:
            save(report, options.out)
    except KeyboardInterrupt:
        print("thermocline load: interrupted, and nothing was kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Unavailable as error:
        url = (options.url or DEFAULT_URL) if options.null_server is None else "the null server"
        print(f"thermocline load: {url}: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    except ThermoclineError as error:
        print(f"thermocline load: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK if report.figures.answered == report.figures.requests else EXIT_FAILED


def _compare(files: list[Path]) -> int:
    if len(files) < 2:
        raise ConfigError("--compare needs two files at least")
    base, *others = (load(file) for file in files)
    console = Console()
    for other in others:
        show_comparison(console, base, other, compare(base, other), differences(base, other))
    return EXIT_OK


def _measured(options: argparse.Namespace, arguments: list[str]) -> Report:
    workload = _workload(options)
    if options.null_server is None:
        return _run_to_the_end(options, arguments, options.url or DEFAULT_URL, workload)
    with null_server(options.null_server) as base_url:
        return _run_to_the_end(options, arguments, base_url, workload)


def _run_to_the_end(options: argparse.Namespace, arguments: list[str], base_url: str, workload: Workload) -> Report:
    report: Report = uvloop.run(_run(options, arguments, base_url, workload))
    return report


def _workload(options: argparse.Namespace) -> Workload:
    """Return the workload. Raises InvalidRequest for a malformed trace, before anything is sent."""
    if options.trace is None:
        return make_workload(options.workload, options.settings, options.seed)
    longest = max((request.input_length for request in read_trace(options.trace, options.requests)), default=0)
    if not longest:
        raise InvalidRequest(f"{options.trace} holds no request")
    if longest / options.length_scale > LONGEST_PROMPT_TOKENS:
        raise InvalidRequest(
            f"{options.trace} has a prompt of {longest:,} tokens, longer than any context; --length-scale divides it"
        )
    is_timed = options.rate is None and options.concurrency is None
    return TraceWorkload(options.trace, limit=options.requests, is_timed=is_timed)


def _pace(options: argparse.Namespace) -> Pace:
    times = None if options.rate is None else arrival_times(options.arrivals, options.rate, options.seed)
    is_open = times is not None or options.trace is not None or options.workload == "burst"
    return Pace(
        requests=options.requests,
        places=options.concurrency or (MAX_PLACES if is_open else DEFAULT_CLOSED_PLACES),
        time_scale=options.time_scale,
        times=times,
        seconds=options.seconds,
    )


async def _run(options: argparse.Namespace, arguments: list[str], base_url: str, workload: Workload) -> Report:
    pace, clock = _pace(options), MonotonicClock()
    # The address of an API often ends with its version, with which every path here begins.
    root = base_url.rstrip("/").removesuffix("/v1")
    http = HttpClient(root, _headers(options), clock, connect_timeout_s=min(CONNECT_S, options.timeout_s))
    try:
        dialect = await find_dialect(
            http,
            clock,
            model=options.model,
            api=options.api,
            has_turns=options.workload == "chat",
            timeout_s=options.timeout_s,
        )
        prompts = PromptMaker(
            options.seed,
            vocabulary=range(dialect.vocabulary_first, dialect.vocabulary_end),
            words_per_token=dialect.words_per_token,
            length_scale=options.length_scale,
        )
        talker = Talker(
            http,
            dialect,
            prompts,
            clock,
            timeout_s=options.timeout_s,
            retries=options.retries,
            seed=options.seed,
        )
        await _warm_up(options, http, dialect, clock)
        with shown("requests", options.requests) as bar, _long_lived_objects_left_alone():
            used_s, began_s = time.process_time(), time.perf_counter()
            outcome = await Driver(workload, talker, clock, pace, lambda reply: bar.advance()).run()
            cpu_part = (time.process_time() - used_s) / max(1e-9, time.perf_counter() - began_s)
    finally:
        http.close()
    return _report(options, arguments, dialect, outcome, cpu_part)


@contextmanager
def _long_lived_objects_left_alone() -> Iterator[None]:
    """Freeze long-lived objects for the garbage collector, whose full scan would delay a request by tens of ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _headers(options: argparse.Namespace) -> dict[str, str]:
    headers = {"User-Agent": "thermocline-load", "Accept-Encoding": "identity"}
    key = os.environ.get(options.api_key_env, "")
    if key:
        if not key.isascii() or not key.isprintable():
            raise OperatorError(f"{options.api_key_env} holds no key: only printable ASCII can be sent")
        headers["Authorization"] = f"Bearer {key}"
    return headers


async def _warm_up(options: argparse.Namespace, http: HttpClient, dialect: Dialect, clock: MonotonicClock) -> None:
    """Send requests of another seed, so that the server's code is warm but no measured prompt is cached.

    Raises OperatorError when one of them fails.
    """
    if not options.warmup:
        return
    prompts = PromptMaker(
        options.seed + 2**64,
        vocabulary=range(dialect.vocabulary_first, dialect.vocabulary_end),
        words_per_token=dialect.words_per_token,
        length_scale=1.0,
    )
    talker = Talker(http, dialect, prompts, clock, timeout_s=options.timeout_s, retries=0, seed=0)
    asked = UnsharedWorkload(UnsharedOptions(prompt_tokens=_WARMUP_TOKENS, answer_tokens=8), 0)
    pace = Pace(requests=options.warmup, places=options.concurrency or DEFAULT_CLOSED_PLACES)
    outcome = await Driver(asked, talker, clock, pace, lambda reply: None).run()
    failed = [reply for reply in outcome.replies if reply.error]
    if failed:
        raise OperatorError(f"a request of the warm-up failed: {failed[0].message}")


def _report(
    options: argparse.Namespace, arguments: list[str], dialect: Dialect, outcome: Outcome, cpu_part: float
) -> Report:
    slo = Slo(ttft_ms=options.slo_ttft_ms, itl_ms=options.slo_itl_ms)
    asked = ("requests", "seconds", "rate", "arrivals", "concurrency", "length_scale", "warmup", "retries")
    settings = {name: getattr(options, name) for name in asked}
    # Named as in files of earlier releases, so that they can be compared.
    settings |= {"scale": options.time_scale, "set": sorted(options.settings)}
    return Report(
        label=options.label or (options.out.stem if options.out else dialect.model),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=shlex.join(["thermocline", "load", *arguments]),
        seed=options.seed,
        workload=options.workload or f"trace {options.trace.name}",
        settings=settings,
        server=dialect,
        client=Client(cpu_part=cpu_part, versions=versions(), hardware=hardware()),
        slo=slo,
        figures=figures(outcome, slo),
        requests=rows(outcome),
    )


if __name__ == "__main__":
    sys.exit(guarded(main))
